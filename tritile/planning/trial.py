"""Describe a trial, one config measured on one problem, and check every value that is read back.

A trial is remembered under a key of three parts: the environment (`ENVIRONMENT_COLUMNS`: the GPU, the
versions of Triton and its assembler, the kernel's digest), the problem and the config. A trial of the same
key replaces it.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import torch

from tritile.core.config import Config
from tritile.core.problem import Problem, problem_from_dict, problem_key, problem_to_dict
from tritile.errors import FileError, InvalidValueError

MAX_TEXT: Final = 1 << 16
# Failures of the machine. What a compiler refuses, and a wrong answer, are the config's own.
_OF_THE_MOMENT: Final = re.compile(
    r"out of memory|cannot allocate|MemoryError|no space left|too many open files|signal 9|busy"
    r"|no process can|CUDA (driver )?error|device-side assert|illegal memory|launch failure|unspecified"
    r"|^hung: |^the process died|^garbled",
    re.IGNORECASE,
)
MAX_US: Final = 1e12
_MAX_ERROR: Final = 1.7e308
_MAX_FAILURE: Final = 2000
_MAX_COUNT: Final = 2**31
_KEYS: Final = ("problem", "op", "config")
_FACTS: Final = ("us", "spread", "registers", "spills", "shared", "error", "failure", "measured_utc")
TRIAL_COLUMNS: Final = (*_KEYS, *_FACTS)
# Fields of Device, and the digest of the kernel. The driver's version is not one of them: a driver loads the
# machine code of Triton's assembler as it is, and each update of a driver would void all measurements.
ENVIRONMENT_COLUMNS: Final = (
    "name", "backend", "arch", "processors", "l2_bytes", "shared_memory", "triton", "compiler", "kernel"
)  # fmt: skip
# The digest under which torch's own time of a problem is remembered, with the config `aten.CONFIG`.
TORCH: Final = f"torch {torch.__version__}"
Row = tuple[Any, ...]


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
        """Return microseconds, infinite where it failed or was not timed."""
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


def parsed(text: Any) -> Any:
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise InvalidValueError(f"{str(text)[:80]!r} is not JSON text of at most {MAX_TEXT} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{text[:80]!r} is not JSON: {error}") from error


def read_json(file: Path | Traversable, most: int) -> Any:
    """Return what a JSON file of at most `most` bytes holds. Raises FileError for any other file."""
    try:
        if not file.is_file():  # a pipe or a device may have no end
            raise FileError(f"{file} is not there, or no regular file")
        with file.open("rb") as opened:
            raw = opened.read(most + 1)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    if len(raw) > most:
        raise FileError(f"{file} holds more than {most >> 20} MiB")
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file} is not JSON: {error}") from error


def pair_from(problem: Any, config: Any) -> tuple[Problem, Config]:
    """Return the problem and config of parsed dictionaries. Raises InvalidValueError for anything else."""
    try:
        pair = problem_from_dict(problem), Config.from_dict(config)
        hash(pair)
        json.dumps([problem_to_dict(pair[0]), pair[1].to_dict()], allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError(f"no problem and config: {str(error)[:200]}") from error
    return pair


def number_from(value: Any, low: float, high: float, whole: bool = False) -> Any:
    """Return a number from low to high, or None, as it is. Raises InvalidValueError for anything else."""
    kind = int if whole else (int, float)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high
    ):
        raise InvalidValueError(f"{str(value)[:80]!r}: wanted a number from {low} to {high}")
    return value


def numbers_from(what: str, values: Any, count: int, low: float, high: float) -> tuple[float, ...]:
    """Return a list of `count` numbers from low to high. Raises InvalidValueError for anything else."""
    if not isinstance(values, list) or len(values) != count or None in values:
        raise InvalidValueError(f"{str(values)[:80]!r}: wanted {count} {what}")
    return tuple(float(number_from(value, low, high)) for value in values)


def moment(text: Any) -> float:
    """Return seconds since 1970 of an ISO time, -inf for "". Raises InvalidValueError for anything else."""
    if text == "":
        return -math.inf
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidValueError(f"{str(text)[:80]!r} is not an ISO time") from error


def trial_from(row: Sequence[Any]) -> Trial:
    """Return the trial of one row. Raises InvalidValueError for a row that `row_of` cannot have made."""
    problem_text, op, config_text, us, spread, registers, spills, shared, error, failure, measured = row
    problem, config = pair_from(parsed(problem_text), parsed(config_text))
    # A second spelling of the same key would be a second row of the same trial.
    if (problem_key(problem), problem.op, config.key) != (problem_text, op, config_text):
        raise InvalidValueError(f"{problem_text[:80]!r} and {config_text[:80]!r} are not spelled as keys are")
    if not (failure is None or (isinstance(failure, str) and len(failure) <= MAX_TEXT)):
        raise InvalidValueError(f"{str(failure)[:80]!r} is not a line of text")
    if not isinstance(measured, str) or (us is None and failure is None):
        raise InvalidValueError("a trial has a time or a failure, and a date")
    moment(measured)
    number_from(us, math.ulp(0.0), MAX_US)
    number_from(spread, 0, MAX_US)
    number_from(error, 0, _MAX_ERROR)
    for count in (registers, spills, shared):
        number_from(count, 0, _MAX_COUNT, whole=True)
    return Trial(problem, config, us, spread, registers, spills, shared, error, failure, measured)


def _line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[:_MAX_FAILURE]).split())


def _settled(trial: Trial) -> Trial:
    """Return the trial, failed if its time or error is not a finite number: it must not win, nor be lost."""
    us, spread, error, failure = trial.us, trial.spread, trial.error, trial.failure
    if us is not None and not 0 < us <= MAX_US:
        us, failure = None, failure or f"measured {us} us"
    if error is not None and not error <= _MAX_ERROR:
        error, failure = None, failure or f"wrong answer: relative error {error}"
    spread = spread if spread is not None and math.isfinite(spread) else None
    failure = failure if failure is None else _line(failure)
    return replace(trial, us=us, spread=spread, error=error, failure=failure)


def row_of(trial: Trial) -> Row:
    """Return the row of a trial. Raises InvalidValueError where `trial_from` could not read it back."""
    trial = _settled(trial)
    try:
        keys = problem_key(trial.problem), trial.problem.op, trial.config.key
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError(str(error)[:200]) from error
    row = (*keys, *(getattr(trial, name) for name in _FACTS))
    trial_from(row)
    return row


def environment_from(row: Sequence[Any]) -> Row:
    """Return the row of an environment, checked. Raises InvalidValueError for one that no device has."""
    for name, value in zip(ENVIRONMENT_COLUMNS, row, strict=True):
        count = isinstance(value, int) and 0 <= value < 2**63
        text = isinstance(value, str) and len(value) <= MAX_TEXT
        whole = name in ("processors", "l2_bytes", "shared_memory")
        if not (count if whole else text or (name == "arch" and count)):
            raise InvalidValueError(f"{name} = {str(value)[:80]!r} is not a fact of a GPU")
    return tuple(row)
