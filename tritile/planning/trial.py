"""A trial: what was measured of one config on one problem."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

from tritile.core.config import Config
from tritile.core.problem import Problem

# The digest under which torch's own time of a problem is remembered, with the config `aten.CONFIG`.
TORCH: Final = f"torch {torch.__version__}"
# Failures of the machine. What a compiler refuses, and a wrong answer, are the config's own.
_OF_THE_MOMENT: Final = re.compile(
    r"out of memory|cannot allocate|MemoryError|no space left|too many open files|signal 9|busy"
    r"|no process can|CUDA (driver )?error|device-side assert|illegal memory|launch failure|unspecified"
    r"|^hung: |^the process died|^garbled",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Trial:
    """Hold what was measured of one config on one problem, or why it failed.

    - `us`: the median time in microseconds.
    - `spread`: the distance of the 20th and the 80th percentile over the median.
    - `registers`: per thread; `spills` and `shared` (memory) in bytes.
    - `error`: the relative norm of the difference to a reference, None where the answer was not checked.
    - `failure`: a short line, None where nothing failed.
    """

    problem: Problem
    config: Config
    us: float | None
    spread: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    error: float | None = None
    failure: str | None = None
    measured_utc: str = ""

    @property
    def time(self) -> float:
        """Microseconds, infinite where it failed or was not timed."""
        return self.us if self.us and self.us > 0 and self.failure is None else math.inf

    @property
    def works(self) -> bool:
        return self.time < math.inf

    @property
    def settled(self) -> bool:
        return self.failure is None or is_settled(self.failure)

    @property
    def right(self) -> bool:
        return self.works and self.error is not None


def is_settled(failure: str) -> bool:
    """True for a failure that is the config's own, False for the machine's: no memory, a hang, a lost GPU."""
    return _OF_THE_MOMENT.search(failure) is None


def rank(trial: Trial) -> tuple[bool, bool, float, str]:
    """Return a key that sorts the trials of a problem, the best first.

    A checked answer goes first: its time was also measured more carefully.
    """
    return not trial.works, trial.error is None, trial.us or 0.0, trial.config.key


def best_of(trials: Iterable[Trial]) -> Trial | None:
    return min((trial for trial in trials if trial.works), key=rank, default=None)
