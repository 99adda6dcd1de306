"""What is to be tuned, how, and what came of it; and what a search would try next, from what is known."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tritile.core.config import Config
from tritile.core.problem import Problem
from tritile.errors import TuningError
from tritile.planning.trial import Trial, best_of
from tritile.tune.measure.protocols import Subject
from tritile.tune.search import BATCH, ENOUGH, STRATEGIES, SearchSpace, Tried, expected_gain

_WHOLE = 256  # configs that compile at a time
Keep = Callable[[str, Trial], None]  # takes the digest of the kernel, and what was measured of it


@dataclass(frozen=True)
class Rules:
    """Say how a search goes; its defaults are those of every search, whoever starts it.

    `strategy` is a name in `STRATEGIES`, asked for `batch` configs a time; `problem_s` seconds are given to
    one problem, after which it is screened no further; `verify_all` checks every config's answer and not only
    the winner's.
    Configs that spill registers are timed like others if `spilled`, else only where nothing else works. A
    search ends where its next batch promises less than `least_gain`, or `most` configs were tried.
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
    """The rules for a search that is to ask for every config: nothing is learnt on the way, nor held back."""
    return replace(rules, batch=_WHOLE, least_gain=0.0, most=None, spilled=True)


@dataclass(frozen=True)
class Task:
    """A subject, where to search, what is known of it already, and the config to beat."""

    subject: Subject
    space: SearchSpace
    known: Mapping[Config, Trial] = field(default_factory=dict)
    incumbent: Config | None = None


@dataclass(frozen=True)
class Tuned:
    """What tuning one problem came to.

    The best trial, or why there is none; how many configs were measured now, the seconds that this took
    from when its operands were there, and how many failed, by reason.
    """

    problem: Problem
    best: Trial | None
    trials: int
    seconds: float
    failure: str | None = None
    failures: tuple[tuple[str, int], ...] = ()


def has_more(space: SearchSpace, known: Mapping[Config, Trial], rules: Rules) -> bool:
    """Whether a search would measure anything beyond what is known already."""
    return bool(proposed(space, tried_of(known.values()), rules))


def proposed(space: SearchSpace, tried: Tried, rules: Rules) -> list[Config]:
    """The next batch of a search; none where it ends."""
    room = rules.batch if rules.most is None else min(rules.batch, rules.most - len(tried))
    found = STRATEGIES[rules.strategy](space, tried, room) if room > 0 else []
    if tried and found and expected_gain(tried, len(found)) < rules.least_gain:
        return []
    return found


def tried_of(trials: Iterable[Trial]) -> dict[Config, float]:
    """Microseconds by config, as strategies take them; infinite where one failed."""
    return {trial.config: trial.time for trial in trials}


def fastest(trials: Collection[Trial]) -> Config:
    """The best of what was measured. Raises TuningError where nothing worked."""
    best = best_of(trials)
    if best is None:
        raise TuningError(
            "no config works: " + "; ".join(sorted({t.failure for t in trials if t.failure})[:4])
        )
    return best.config


def now() -> str:
    """The time as trials tell it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
