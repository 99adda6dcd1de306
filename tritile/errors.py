"""Define errors and warnings. Every error that tritile raises on purpose is a `TritileError`."""

import sys
from typing import Final

_INSIDE: Final = ("tritile.", "torch.", "triton.")  # modules whose frames a warning skips
_IMPORTING: Final = "importlib._bootstrap"  # frames that `stacklevel` does not count


class TritileError(Exception):
    """Base class of every error that tritile raises on purpose."""


class ShapeError(TritileError, ValueError):
    """Raised where shapes, dimensions or strides do not fit the operation."""


class DtypeError(TritileError, TypeError):
    """Raised where the operation does not take a dtype, or a combination of dtypes."""


class DeviceError(TritileError, ValueError):
    """Raised where tensors are on different devices, or on one that tritile does not run on."""


class UnsupportedError(TritileError, RuntimeError):
    """Raised for a valid request that this GPU, or this version of tritile, does not support."""


class OverlapError(TritileError, ValueError):
    """Raised where an output shares memory with an input, or with itself."""


class GradientError(TritileError, RuntimeError):
    """Raised where a tensor requires a gradient that the operation does not compute."""


class NotTunedError(TritileError, LookupError):
    """Raised in mode `strict` where nothing was measured for a problem."""


class NotCompiledError(TritileError, LookupError):
    """Raised in mode `strict` where a kernel is compiled neither in this process nor in Triton's cache."""


class InvalidValueError(TritileError, ValueError):
    """Raised for an invalid setting, config, problem, or entry of a file."""


class FileError(InvalidValueError):
    """Raised for a file that cannot be read, or does not hold what was wanted."""


class TuningError(TritileError, RuntimeError):
    """Raised where no config of a space compiled, ran and gave the right answer."""


class StoreWarning(UserWarning):
    """Issued where remembered results cannot be read or written; calls go on without them."""


class SettingWarning(UserWarning):
    """Issued where a variable of the environment has a value that is left out."""


class UntunedWarning(UserWarning):
    """Issued where a kernel runs with a config that no measurement supports."""


class UntestedWarning(UserWarning):
    """Issued where Triton or torch is newer than the newest version that tritile is tested with."""


class IsolationWarning(UserWarning):
    """Issued where a kernel cannot run in another process: it is measured in this one."""


class HostWarning(UserWarning):
    """Issued where tensors are in host memory: torch computes them, and no kernel runs."""


def callers_level() -> int:
    """Return the `stacklevel` of a warning that points at the line that called tritile.

    It is counted from the function that calls this one. Frames of torch, Triton and imports are skipped.
    """
    frame, level = sys._getframe(1), 1
    name = frame.f_globals.get("__name__", "")
    while frame.f_back is not None and f"{name}.".startswith((*_INSIDE, _IMPORTING)):
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        level += not name.startswith(_IMPORTING)
    return level


def brief(error: BaseException) -> str:
    """Return an error's type and the line that says what is wrong, cut to 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # An error of Triton's compiler begins with a location and some source, and ends with the reason.
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return f"{type(error).__name__}: {text}"[:200]
