"""Which switches are on: those of this thread, innermost last, and the one of the whole process.

Those of a thread are kept where torch keeps what it carries to other threads that work for it, as those of a
backward pass. What is kept is a tuple that is never changed, so that a thread which got it keeps its own.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from tritile.core import settings
from tritile.core.of_torch import is_kept_in_thread, keep_in_thread, kept_in_thread, remove_from_thread
from tritile.core.settings import environment_is_silent
from tritile.errors import InvalidValueError
from tritile.in_torch.report import Report
from tritile.in_torch.tally import ASKED, NOBODY, PYTHON, ask_python, new_tally

POLICIES: Final = ("expected", "always", "never")
_KEY: Final = "tritile.in_torch"
_TALLY_KEY: Final = "tritile.in_torch.tally"  # of what crossing.cpp asks


def checked_policy(policy: str) -> str:
    """The policy. Raises InvalidValueError for a word that is none."""
    if policy not in POLICIES:
        raise InvalidValueError(f"use_in_torch: policy is {policy!r}: wanted one of {', '.join(POLICIES)}")
    return policy


@dataclass(eq=False, slots=True)
class Entry:
    """A switch that was entered. One that is no longer open counts for nothing, wherever it is still kept."""

    policy: str
    keys: tuple[str, ...] = ()  # the dispatch keys that it wants kernels at
    report: Report = field(default_factory=Report)
    open: bool = True
    chosen: settings.Chosen | None = None  # by the thread that turned it on
    thread: int = 0
    tally: bytearray = field(init=False)

    def __post_init__(self) -> None:
        asked = ASKED[self.policy]
        if asked != NOBODY and not environment_is_silent():
            asked = PYTHON
        self.tally = new_tally(asked)
        self.report.follow(self.tally)

    def close(self) -> None:
        """Turn it off, once: whoever still keeps it learns of that in Python."""
        if self.open:
            self.open, self.chosen = False, None
            ask_python(self.tally)
            self.report.settle(self.tally)


_PAUSE: Final = Entry("never")
_AS_HERE: Final = contextlib.nullcontext()
_everywhere: Entry | None = None


def kept() -> tuple[Entry, ...]:
    """The open switches of this thread."""
    return tuple(e for e in kept_in_thread(_KEY) if e.open) if is_kept_in_thread(_KEY) else ()


def _stash(key: str, kept_there: object, held: bool) -> None:
    if not held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept_there))
    keep_in_thread(key, kept_there)


def _holds() -> bool:
    """Whether torch takes a reference to what it keeps: torch 2.11 lets go of one that it never took."""
    probe = object()
    before = sys.getrefcount(probe)
    _stash(_KEY, probe, False)
    held = sys.getrefcount(probe) > before + 1
    if held:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(probe))
    _stash(_KEY, (), held)
    return held


_HELD: Final = _holds()


def _keep(stack: tuple[Entry, ...]) -> None:
    # Nothing is left to be let go of as the thread ends, maybe at exit.
    if not stack and remove_from_thread is not None:
        for key in (_KEY, _TALLY_KEY):
            if is_kept_in_thread(key):
                remove_from_thread(key)
    elif stack or is_kept_in_thread(_KEY):
        _stash(_KEY, stack, _HELD)
        _stash(_TALLY_KEY, stack[-1].tally if stack else None, _HELD)


def active() -> Entry | None:
    """The innermost switch that is on here, None where calls are torch's."""
    found = _everywhere
    if is_kept_in_thread(_KEY):
        stack = kept_in_thread(_KEY)
        if stack and not stack[-1].open:  # left in another order than entered, or in another thread
            stack = kept()
        if stack:
            found = stack[-1]
    return None if found is None or found.policy == "never" else found


def in_its_mode(entry: Entry) -> AbstractContextManager[None]:
    """Have the mode that a switch was turned on in count in threads that autograd runs under it.

    The switch's own thread goes by the mode that it is in now. An open switch keeps what was chosen, so that
    code without Python asks Python of every call.
    """
    choices = entry.chosen
    if choices is None or entry.thread == threading.get_ident():
        return _AS_HERE
    return settings.carried(choices)


def enter(entry: Entry) -> None:
    """Turn a switch on in this thread."""
    entry.chosen, entry.thread = settings.chosen(), threading.get_ident()
    _keep((*kept(), entry))


def leave(entry: Entry) -> None:
    """Turn a switch off, in whatever order and thread."""
    entry.close()
    _keep(kept())


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leave the calls in the `with` to torch: those of tritile's own work."""
    before = kept()
    _keep((*before, _PAUSE))
    try:
        yield
    finally:
        _keep(before)


settings.torch_alone = paused


def everywhere(entry: Entry | None) -> Entry | None:
    """Make a switch that of all threads with none of their own, or None; what it was before, which ends."""
    global _everywhere
    before, _everywhere = _everywhere, entry
    if before is not None:
        before.close()
    return before


def tally_everywhere() -> bytearray | None:
    """The tally of the switch of all threads."""
    return None if _everywhere is None else _everywhere.tally
