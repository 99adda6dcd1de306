"""Keep which overrides are on: those of each thread, innermost last, and that of the whole process.

Those of a thread lie where torch keeps what it carries to threads that work for it, such as those of a
backward pass. They are a tuple that is never changed, so that a thread which received it keeps its own.
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
_TALLY_KEY: Final = "tritile.in_torch.tally"  # of the tally that crossing.cpp reads


def checked_policy(policy: str) -> str:
    """Return the policy. Raise InvalidValueError for an unknown one."""
    if policy not in POLICIES:
        raise InvalidValueError(f"use_in_torch: policy is {policy!r}: wanted one of {', '.join(POLICIES)}")
    return policy


@dataclass(eq=False, slots=True)
class Entry:
    """Hold an override that was entered. A closed one has no effect, wherever it is still kept."""

    policy: str
    keys: tuple[str, ...] = ()  # dispatch keys at which it needs kernels
    report: Report = field(default_factory=Report)
    open: bool = True
    chosen: settings.Chosen | None = None  # settings of the thread that turned it on
    thread: int = 0
    tally: bytearray = field(init=False)

    def __post_init__(self) -> None:
        asked = ASKED[self.policy]
        if asked != NOBODY and not environment_is_silent():
            asked = PYTHON
        self.tally = new_tally(asked)
        self.report.follow(self.tally)

    def close(self) -> None:
        """Turn the override off, once. Threads that still keep it learn of that in Python."""
        if self.open:
            self.open, self.chosen = False, None
            ask_python(self.tally)
            self.report.settle(self.tally)


_PAUSE: Final = Entry("never")
_AS_HERE: Final = contextlib.nullcontext()
_everywhere: Entry | None = None


def kept() -> tuple[Entry, ...]:
    """Return the open overrides of this thread."""
    return tuple(e for e in kept_in_thread(_KEY) if e.open) if is_kept_in_thread(_KEY) else ()


def _stash(key: str, kept_there: object, held: bool) -> None:
    if not held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept_there))
    keep_in_thread(key, kept_there)


def _holds() -> bool:
    """Tell whether torch takes a reference to what it keeps: torch 2.11 releases one that it never took."""
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
    # Leave nothing for torch to release when the thread ends, which may be at exit.
    if not stack and remove_from_thread is not None:
        for key in (_KEY, _TALLY_KEY):
            if is_kept_in_thread(key):
                remove_from_thread(key)
    elif stack or is_kept_in_thread(_KEY):
        _stash(_KEY, stack, _HELD)
        _stash(_TALLY_KEY, stack[-1].tally if stack else None, _HELD)


def active() -> Entry | None:
    """Return the innermost override that is on here, None where calls are torch's."""
    found = _everywhere
    if is_kept_in_thread(_KEY):
        stack = kept_in_thread(_KEY)
        if stack and not stack[-1].open:  # closed out of order, or in another thread
            stack = kept()
        if stack:
            found = stack[-1]
    return None if found is None or found.policy == "never" else found


def in_its_mode(entry: Entry) -> AbstractContextManager[None]:
    """Apply the mode in which an override was turned on, in threads that autograd runs under it.

    The override's own thread uses its current mode. An open override keeps what was chosen, so that C++ asks
    Python about every call.
    """
    choices = entry.chosen
    if choices is None or entry.thread == threading.get_ident():
        return _AS_HERE
    return settings.carried(choices)


def enter(entry: Entry) -> None:
    """Turn an override on in this thread."""
    entry.chosen, entry.thread = settings.chosen(), threading.get_ident()
    _keep((*kept(), entry))


def leave(entry: Entry) -> None:
    """Turn an override off, in any order and thread."""
    entry.close()
    _keep(kept())


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pass through the calls in the `with`, which are those of tritile's own work."""
    before = kept()
    _keep((*before, _PAUSE))
    try:
        yield
    finally:
        _keep(before)


settings.torch_alone = paused


def everywhere(entry: Entry | None) -> Entry | None:
    """Set the override of all threads that have none of their own, or None; close and return the last."""
    global _everywhere
    before, _everywhere = _everywhere, entry
    if before is not None:
        before.close()
    return before


def tally_everywhere() -> bytearray | None:
    """Return the tally of the override of all threads."""
    return None if _everywhere is None else _everywhere.tally
