"""A trial: what was measured of one config on one problem."""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import torch

from tritile.core.config import Config
from tritile.core.problem import Problem

_PAUSE_S: Final = 60.0  # between trials of one tuning, at most
# The digest under which torch's own time of a problem is stored, with the config `aten.CONFIG`.
TORCH: Final = f"torch {torch.__version__}"
# Failures to be tried again, as C libraries, drivers and tritile's workers word them. A wrong answer and what
# a compiler or driver refuses (a launch that does not fit, machine code of another GPU) are the config's
# fault. A fault in a kernel is among these: every later call in the process fails with the same text, so
# nothing says which config caused it.
_TRANSIENT: Final = re.compile(
    "|".join(
        (
            # Memory, disks and processes.
            r"\bout of memory\b", r"\bcan(not|'t) allocate memory\b", r"\bMemoryError\b", r"std::bad_alloc",
            r"\bno space left on device\b", r"\bdisk quota exceeded\b", r"\btoo many open files\b",
            r"\btext file busy\b", r"\b(device or )?resource busy\b", r"\bresource temporarily unavailable\b",
            r"\bsignal 9\b", r"\bSIGKILL\b", r"\bno process can be started\b",
            # Faults that a CUDA context does not survive.
            r"\billegal (memory access|instruction)\b", r"\bmisaligned address\b",
            r"\binvalid program counter\b", r"\bhardware stack error\b", r"\bunspecified launch failure\b",
            r"\bnot supported on global/shared address space\b", r"\bdevice-side assert\b",
            r"\bthe launch timed out and was terminated\b", r"\bcontext is destroyed\b",
            # A GPU that is lost, ill, or in use by others.
            r"\buncorrectable (ECC|NVLink) error\b", r"\bCUDA-capable device\S* (is|are|is/are) busy\b",
            r"\bno (CUDA|ROCm)-capable device is detected\b", r"\bGPU is lost\b", r"\bdriver shutting down\b",
            r"\b(CUDA|HIP)\b.*\b(unknown|initialization) error\b", r"\bsystem not yet initialized\b",
            r"\bMPS (client|server)s?\b", r"\bdevice already in use\b", r"\bor a hardware error\b",
            r"\bCUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)\b",
            # Another thread's work during a capture.
            r"\bwhen stream is capturing\b", r"\bprevious error during capture\b", r"\bcapturing.* stream\b",
            # Workers.
            r"^hung: ", r"^the process died", r"^garbled: ",
        )
    ),
    re.IGNORECASE,
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """What was measured of one config on one problem, or why it failed.

    - `us`: the median time in microseconds.
    - `spread`: the distance between the 20th and 80th percentiles, divided by the median.
    - `registers`: per thread; `spills` and `shared` memory in bytes.
    - `error`: None if the answer was not checked, else its relative error: of tritile's own operations by
      norms (`tune.subject.answers.norm_error`), of decorated kernels the largest of an element
      (`measure.outputs.error_of`). It compares configs of one problem.
    - `failure`: a short line, None if nothing failed.
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
        """Microseconds; infinite if the config failed or was not timed."""
        return self.us if self.us and self.us > 0 and self.failure is None else math.inf

    @property
    def works(self) -> bool:
        return self.time < math.inf

    @property
    def is_final(self) -> bool:
        """True if measuring again would give the same outcome."""
        return self.failure is None or is_final_failure(self.failure)

    @property
    def right(self) -> bool:
        return self.works and self.error is not None


def is_final_failure(failure: str) -> bool:
    """True if the config is at fault, False if the machine is: no memory, a hang, a lost GPU."""
    return _TRANSIENT.search(failure) is None


def rank(trial: Trial) -> tuple[bool, bool, float, str]:
    """Return a sort key that puts the best trial of a problem first.

    A checked answer goes first: its time was measured more carefully, too.
    """
    return not trial.works, trial.error is None, trial.us or 0.0, trial.config.key


def best_of(trials: Iterable[Trial]) -> Trial | None:
    return min((trial for trial in trials if trial.works), key=rank, default=None)


def seconds_between(trials: Iterable[Trial]) -> float:
    """Return the seconds from the first of some trials to the last, without pauses of more than a minute."""
    times = sorted(datetime.fromisoformat(trial.measured_utc) for trial in trials if trial.measured_utc)
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(times)]
    return sum(gap for gap in gaps if gap <= _PAUSE_S)
