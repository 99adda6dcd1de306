"""Errors and warnings. Every error that tritile raises on purpose is a `TritileError`."""

import difflib
import sys
from collections import abc
from typing import Final

_INSIDE: Final = ("tritile.", "torch.", "triton.")  # modules whose frames a warning skips
_IMPORTING: Final = "importlib._bootstrap"  # frames that `stacklevel` does not count


class TritileError(Exception):
    """Base class of every error that tritile raises on purpose."""


class ShapeError(TritileError, ValueError):
    """Raised when shapes, dimensions or strides do not fit the operation."""


class DtypeError(TritileError, TypeError):
    """Raised when the operation does not take a dtype, or a combination of dtypes."""


class DeviceError(TritileError, ValueError):
    """Raised when tensors are on different devices, or on one that tritile does not run on."""


class UnsupportedError(TritileError, RuntimeError):
    """Raised for a valid request that this GPU, or this version of tritile, does not support."""


class GpuTakenError(UnsupportedError):
    """Raised where another process, which is to measure, cannot have the GPU, or too little memory there.

    `for_all`: no call can be measured there, not just this one, whose tensors are too large.
    """

    def __init__(self, text: str, for_all: bool = True) -> None:
        super().__init__(text)
        self.for_all = for_all


class OverlapError(TritileError, ValueError):
    """Raised when an output shares memory with an input, or overlaps itself."""


class GradientError(TritileError, RuntimeError):
    """Raised when a tensor requires a gradient that the operation does not compute."""


class NotTunedError(TritileError, LookupError):
    """Raised in mode "strict" when no measurement covers a problem, and by commands for an unknown kernel.

    Also by `tritile.sync(check=True)` when ranks chose different configs.
    """


class NotCompiledError(TritileError, LookupError):
    """Raised in mode "strict" when a kernel is neither in this process nor in Triton's cache."""


class InvalidValueError(TritileError, ValueError):
    """Raised for an invalid setting, config or problem, or an invalid entry of a file."""


class FileError(InvalidValueError):
    """Raised for a file that is missing, cannot be read, or is not of the expected kind."""


class TuningError(TritileError, RuntimeError):
    """Raised when no config of a problem compiled, ran and gave the right answer."""


class StoreWarning(UserWarning):
    """Issued when measurements or a table cannot be read or written; calls go on without them."""


class SettingWarning(UserWarning):
    """Issued on import when a variable for logs, adoption or batch invariance has an invalid value."""


class UntunedWarning(UserWarning):
    """Issued when a kernel runs with a config that no measurement on this GPU model supports."""


class UntestedWarning(UserWarning):
    """Issued when Triton or torch is newer than the newest version that tritile is tested with."""


class IsolationWarning(UserWarning):
    """Issued when a kernel cannot be measured in a process of its own, and is measured in this one."""


class RetuningWarning(UserWarning):
    """Issued when a kernel was tuned anew for many values of one number in its key."""


class HostWarning(UserWarning):
    """Issued when tensors are in host memory: torch computes the result, and no kernel runs."""


def callers_level() -> int:
    """Return the `stacklevel` with which a warning points at the line that called tritile.

    It is relative to the function that calls this one. Frames of torch, Triton and imports are skipped.
    """
    frame, level = sys._getframe(1), 1
    name = frame.f_globals.get("__name__", "")
    while frame.f_back is not None and f"{name}.".startswith((*_INSIDE, _IMPORTING)):
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        level += not name.startswith(_IMPORTING)
    return level


def did_you_mean(name: object, names: abc.Iterable[str]) -> str:
    """Return " (did you mean ...?)" for a misspelt name, "" if none of `names` is close to it."""
    if not isinstance(name, str):
        return ""
    names = list(names)
    near = [each for each in names if each.lower() == name.lower()]
    near = near or difflib.get_close_matches(name, names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def is_bug(error: BaseException) -> bool:
    """True for an error in a program, tritile's or Triton's, which no other config would avoid.

    Triton wraps what its compiler finds wrong with a kernel in errors of its own. Drivers and assemblers
    raise RuntimeError and ValueError.
    """
    kinds = AttributeError, ImportError, NameError, TypeError
    return isinstance(error, kinds) and not isinstance(error, TritileError)


def drop_frames(error: BaseException) -> None:
    """Have an error that is kept, and what caused it, refer to no frames, which hold tensors."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__


def brief(error: BaseException) -> str:
    """Return an error's type and the line that says what is wrong, cut to 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # An error of Triton's compiler begins with a location and some source, and ends with the reason.
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return f"{type(error).__name__}: {text}"[:200]
