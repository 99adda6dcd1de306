"""Climbing without a GPU: rungs are interpreted, checked and counted, and compiled for a GPU elsewhere."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.errors import InterpreterWarning, InvalidValueError, brief
from tritile.lab.counting import SECTOR, counted
from tritile.lab.rungs.climb import Library, Rung
from tritile.lab.rungs.launching import described, failed, noted, planned, run_interpreted
from tritile.lab.rungs.matrices import error_of, matrices
from tritile.lab.rungs.reading import Reading

DEFAULT_N: Final = 96
_LARGEST: Final = 512  # of which the naive product takes minutes


def check_size(n: int) -> None:
    """Raises InvalidValueError for an n that the interpreter would take too long over."""
    if not 1 <= n <= _LARGEST:
        raise InvalidValueError(
            f"n = {n}: wanted 1 to {_LARGEST} without a GPU, where kernels run in the interpreter"
        )


def counted_climb(
    rungs: Iterable[Rung], n: int, device: Device, done: Callable[[str], None]
) -> list[Reading]:
    """What rungs ask of memory and take on a device, without a GPU; `done` hears of each.

    Yardsticks are left out: only a time would tell of them.

    Rungs of bfloat16, which Triton's interpreter gets wrong, are interpreted in float16.
    Raises InvalidValueError for an n that the interpreter would take too long over.
    """
    check_size(n)
    readings = []
    for rung in rungs:
        if not rung.yardstick:
            readings.append(_counted(described(rung, n, planned(rung, n, device), device), rung, n))
        done(rung.name)
    return readings


def _counted(reading: Reading, rung: Rung, n: int) -> Reading:
    """The reading with what was counted as the rung ran in the interpreter, its answer checked."""
    unfit = rung.unfit(devices.INTERPRETER, n)
    if unfit:
        return noted(reading, unfit)
    given = matrices(rung.op, n, "float16" if rung.dtype == "bfloat16" else rung.dtype, "cpu")
    try:
        with warnings.catch_warnings(), counted() as counts:
            warnings.simplefilter("ignore", InterpreterWarning)
            run_interpreted(rung, given)
        error = error_of(rung.op, given)
    except Exception as failure:  # what one rung raises is not the others'
        return failed(reading, brief(failure))
    if isinstance(rung.runs, Library):
        reading = noted(reading, "counted with the config that matrices in host memory get")
    touched = SECTOR * (counts.read_sectors + counts.written_sectors)
    return replace(reading, read=counts.read, written=counts.written, touched=touched, error=error)
