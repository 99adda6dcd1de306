"""Run a ladder without a GPU: interpret each step, check it, count its traffic, compile it for a target."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.errors import InterpreterWarning, InvalidValueError, brief
from tritile.lab.counting import SECTOR, counted
from tritile.lab.ladder.launching import failed, noted, planned, reading_of, run_interpreted
from tritile.lab.ladder.matrices import error_of, matrices
from tritile.lab.ladder.reading import Reading
from tritile.lab.ladder.steps import Library, Step

DEFAULT_N: Final = 96
_LARGEST: Final = 512  # at which the naive product takes minutes


def check_size(n: int) -> None:
    """Raise InvalidValueError for an n that the interpreter would take too long over."""
    if not 1 <= n <= _LARGEST:
        raise InvalidValueError(
            f"n = {n}: wanted 1 to {_LARGEST} without a GPU, where kernels run in the interpreter"
        )


def counted_climb(
    steps: Iterable[Step], n: int, device: Device, done: Callable[[str], None]
) -> list[Reading]:
    """Return readings of steps without a GPU: memory traffic, and resources on a device.

    `done` is called with each step's name. Yardsticks are left out, as they have nothing but a time. Steps in
    bfloat16, which Triton's interpreter gets wrong, are interpreted in float16. Raises InvalidValueError for
    an n that the interpreter would take too long over.
    """
    check_size(n)
    readings = []
    for step in steps:
        if not step.yardstick:
            readings.append(_counted(reading_of(step, n, planned(step, n, device), device), step, n))
        done(step.name)
    return readings


def _counted(reading: Reading, step: Step, n: int) -> Reading:
    """Run a step in the interpreter, check its answer, and return the reading with its traffic."""
    unfit = step.unfit(devices.INTERPRETER, n)
    if unfit:
        return noted(reading, unfit)
    given = matrices(step.op, n, "float16" if step.dtype == "bfloat16" else step.dtype, "cpu")
    try:
        with warnings.catch_warnings(), counted() as counts:
            warnings.simplefilter("ignore", InterpreterWarning)
            run_interpreted(step, given)
        error = error_of(step.op, given)
    except Exception as failure:  # a step that raises costs itself alone
        return failed(reading, brief(failure))
    if isinstance(step.runs, Library):
        reading = noted(reading, "counted with the config that matrices in host memory get")
    touched = SECTOR * (counts.read_sectors + counts.written_sectors)
    return replace(reading, read=counts.read, written=counts.written, touched=touched, error=error)
