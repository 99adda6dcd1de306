"""Caches of this process that are dropped together: plans, launches, configs of decorated kernels."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")
MOST: Final = 8192  # entries of a memo; a prepared launch takes some 10 KB of host memory


class Memo(dict[K, V]):
    """Hold at most `most` entries: `memo[key] = value` beyond that drops the older half.

    Nothing else adds entries. A look-up is a dict's own, and does not make an entry younger. Threads may look
    up and add at the same time.
    """

    __slots__ = ("most",)

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        """Add or replace an entry."""
        super().__setitem__(key, value)
        if len(self) > self.most:
            for old in list(self)[: len(self) // 2]:
                self.pop(old, None)  # another thread may have dropped it


_memos: list[dict[Any, Any]] = []
_forgetful: list[Callable[[], None]] = []


def new_memo() -> dict[Any, Any]:
    """Return a new `Memo`, which `forget` empties."""
    _memos.append(Memo())
    return _memos[-1]


def also_forgets(drop: Callable[[], None]) -> None:
    """Register a function that `forget` calls after it has emptied all memos."""
    if drop not in _forgetful:
        _forgetful.append(drop)


def forget() -> None:
    """Drop every plan and prepared call of this process, so that the next calls read the store again.

    Call it to use results that another process measured. Nothing is deleted from the store, and what ranks
    agreed on in `tritile.sync` stays.
    """
    for memo in _memos:
        memo.clear()
    for drop in _forgetful:
        drop()
