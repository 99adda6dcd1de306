"""Keep choices of a process that are forgotten together: plans, launches, configs of decorated kernels."""

from collections.abc import Callable
from typing import Any

_memos: list[dict[Any, Any]] = []
_forgetful: list[Callable[[], None]] = []


def new_memo() -> dict[Any, Any]:
    """Return a new dictionary, for prepared launches, that `drop` empties."""
    _memos.append({})
    return _memos[-1]


def also_forgets(forget: Callable[[], None]) -> None:
    """Have this called by `drop` too, after all memos are empty."""
    if forget not in _forgetful:
        _forgetful.append(forget)


def drop() -> None:
    """Drop every plan, choice and prepared launch of this process."""
    for memo in _memos:
        memo.clear()
    for forget in _forgetful:
        forget()
