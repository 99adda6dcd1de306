"""What can go wrong, one class each. Every error tritile raises on purpose is a `TritileError`."""

import sys
from typing import Final

_INSIDE: Final = ("tritile.", "torch.", "triton.")  # whose frames stand between a warning and its caller


class TritileError(Exception):
    """Base of every error that tritile raises on purpose."""


class ShapeError(TritileError, ValueError):
    """Shapes, dimensions or strides that do not fit the operation."""


class DtypeError(TritileError, TypeError):
    """A dtype, or a combination of dtypes, that the operation does not take."""


class DeviceError(TritileError, ValueError):
    """Tensors on different devices, or on a kind of device that tritile does not run on."""


class UnsupportedError(TritileError, RuntimeError):
    """Something valid in itself that this GPU, or this version of tritile, does not offer."""


class OverlapError(TritileError, ValueError):
    """An output whose memory overlaps an input's, or its own."""


class GradientError(TritileError, RuntimeError):
    """A tensor that requires a gradient, where none is offered."""


class NotTunedError(TritileError, LookupError):
    """Mode `strict` met a problem for which nothing measured is remembered."""


class NotCompiledError(TritileError, LookupError):
    """Mode `strict` met a call with a kernel that is not compiled: neither here nor in Triton's cache."""


class InvalidValueError(TritileError, ValueError):
    """A setting, a config, a problem or an entry of a file that is not what it must be."""


class TuningError(TritileError, RuntimeError):
    """No config of a space compiled, ran and gave the right answer."""


class DistributedError(TritileError, RuntimeError):
    """Ranks of a distributed run that differ, or of which one is lost that the others need."""


class StoreWarning(UserWarning):
    """Remembered results could not be read or written; calls go on without them."""


class UntunedWarning(UserWarning):
    """A kernel runs with a config that nothing measured supports."""


class UntestedWarning(UserWarning):
    """Triton or torch is newer than the newest version with which tritile is tested."""


class IsolationWarning(UserWarning):
    """A kernel cannot be sent to another process: it is measured in this one, which it may take down."""


class WrongAnswerWarning(UserWarning):
    """A config of a decorated kernel that fails the kernel's reference: another one runs."""


class ConversionWarning(UserWarning):
    """Layers of a model that `tritile.nn.convert` left as they were."""


class InterpreterWarning(UserWarning):
    """Kernels run in Triton's interpreter: answers are right, speed is not the GPU's."""


def callers_level() -> int:
    """The `stacklevel`, in the function that asks, of a warning that points at the line that called tritile.

    Frames of torch and Triton in between do not count as a caller.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return level


def brief(error: BaseException) -> str:
    """The kind of an error and the line that says what it is, short enough to keep."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # Triton's compiler begins with the place, and a part of the source, and ends with what is wrong.
    text = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return f"{type(error).__name__}: {text}"[:200]
