"""Describe what is tuned, by which rules, and the outcome; propose the next configs from known trials."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tritile.core.config import Config
from tritile.core.problem import Problem
from tritile.errors import TuningError
from tritile.planning.trial import Trial, best_of
from tritile.tune.measure.protocols import Subject
from tritile.tune.search import BATCH, ENOUGH, STRATEGIES, SearchSpace, Tried, expected_gain

_WHOLE = 256  # configs in a batch of a search through all
Keep = Callable[[str, Trial], None]  # takes the digest of the kernel, and what was measured of it


@dataclass(frozen=True)
class Rules:
    """Set how a search goes: by a strategy of `STRATEGIES`. Its defaults are those of every search.

    `batch`: configs to ask of the strategy at a time. `finalists`: configs in the final race. `problem_s`:
    seconds after which a problem is screened no further. `verify_all`: check every config's answer, not only
    the winner's. `spilled`: time configs that spill registers like others, not only where nothing else works.
    A search ends where its next batch promises less than `least_gain`, or after `most` configs.
    """

    strategy: str = "screening"
    batch: int = BATCH
    finalists: int = 4
    problem_s: float = 15.0
    verify_all: bool = False
    spilled: bool = False
    least_gain: float = ENOUGH
    most: int | None = None


def whole(rules: Rules) -> Rules:
    """Return the rules for a search through every config: in large batches, none held back."""
    return replace(rules, batch=_WHOLE, least_gain=0.0, most=None, spilled=True)


@dataclass(frozen=True)
class Task:
    """Hold a subject, its search space, the trials known already, and the config to beat."""

    subject: Subject
    space: SearchSpace
    known: Mapping[Config, Trial] = field(default_factory=dict)
    incumbent: Config | None = None


@dataclass(frozen=True)
class Tuned:
    """Hold the outcome of tuning one problem: the best trial, or the `failure` to find one.

    `trials`: configs measured now. `seconds`: since the operands were made. `failures`: counts by reason.
    """

    problem: Problem
    best: Trial | None
    trials: int
    seconds: float
    failure: str | None = None
    failures: tuple[tuple[str, int], ...] = ()


def has_more(space: SearchSpace, known: Mapping[Config, Trial], rules: Rules) -> bool:
    """Tell whether a search would measure anything beyond the known trials."""
    return bool(proposed(space, tried_of(known.values()), rules))


def proposed(space: SearchSpace, tried: Tried, rules: Rules) -> list[Config]:
    """Return the next batch of a search; none where the search ends."""
    room = rules.batch if rules.most is None else min(rules.batch, rules.most - len(tried))
    found = STRATEGIES[rules.strategy](space, tried, room) if room > 0 else []
    if tried and found and expected_gain(tried, len(found)) < rules.least_gain:
        return []
    return found


def tried_of(trials: Iterable[Trial]) -> dict[Config, float]:
    """Return microseconds by config, as strategies take them; infinite where a config failed."""
    return {trial.config: trial.time for trial in trials}


def fastest(trials: Collection[Trial]) -> Config:
    """Return the config of the best trial. Raises TuningError where none worked."""
    best = best_of(trials)
    if best is None:
        raise TuningError(
            "no config works: " + "; ".join(sorted({t.failure for t in trials if t.failure})[:4])
        )
    return best.config


def now() -> str:
    """Return the time in UTC, as trials record it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
