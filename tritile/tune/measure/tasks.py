"""Describe what is tuned, by which rules, and the outcome; propose the next configs from known trials."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tritile.core.config import Config
from tritile.core.log import log
from tritile.core.problem import Problem
from tritile.planning.trial import Trial
from tritile.tune.measure.bench import Subject
from tritile.tune.search import ENOUGH, exhaustive, expected_gain, screening
from tritile.tune.spaces import Listed, SearchSpace, Tried

_WHOLE = 256  # configs in a batch of a search through all
Keep = Callable[[str, Trial], None]  # takes the digest of the kernel, and what was measured of it


@dataclass(frozen=True)
class Rules:
    """Set how a search goes: by `screening`, or through every config. Its defaults are those of every search.

    `batch`: configs to compile at a time. `problem_s`: seconds after which a problem is screened no further.
    A screening ends where its next batch promises too little gain, or after `most` configs.
    `by_trials`: the winner is the fastest by its trial, as whoever reads the trials later finds it; else a
    tie goes to the incumbent, or the first by name.
    """

    exhaustive: bool = False
    batch: int = 16
    problem_s: float = 15.0
    most: int | None = None
    by_trials: bool = False


def whole(rules: Rules) -> Rules:
    """Return the rules for a search through every config, in large batches."""
    return replace(rules, exhaustive=True, batch=_WHOLE, most=None)


@dataclass(frozen=True)
class Task:
    """Hold a subject, its search space, the trials known already, and the config to beat."""

    subject: Subject
    space: SearchSpace | Listed
    known: Mapping[Config, Trial] = field(default_factory=dict)
    incumbent: Config | None = None


@dataclass(frozen=True)
class Tuned:
    """Hold the outcome of tuning one problem: the best trial, or the `failure` to find one.

    `trials`: configs measured now. `seconds`: since the operands were made.
    """

    problem: Problem
    best: Trial | None
    trials: int
    seconds: float
    failure: str | None = None


def has_more(space: SearchSpace | Listed, known: Mapping[Config, Trial], rules: Rules) -> bool:
    """True if a search would measure anything beyond the known trials."""
    return bool(proposed(space, tried_of(known.values()), rules))


def proposed(space: SearchSpace | Listed, tried: Tried, rules: Rules) -> list[Config]:
    """Return the next batch of a search; none where the search ends."""
    if rules.exhaustive or isinstance(space, Listed):
        return exhaustive(space, tried, rules.batch)
    room = rules.batch if rules.most is None else min(rules.batch, rules.most - len(tried))
    found = screening(space, tried, room) if room > 0 else []
    return [] if tried and found and expected_gain(tried, len(found)) < ENOUGH else found


def tried_of(trials: Iterable[Trial]) -> dict[Config, float]:
    """Return microseconds by config, as strategies take them; infinite where a config failed."""
    return {trial.config: trial.time for trial in trials}


def now() -> str:
    """Return the time in UTC, as trials record it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def logged(keep: Keep) -> Keep:
    """Return a `keep` that also logs each trial, at level DEBUG."""
    last: dict[tuple[Problem, Config], Trial] = {}

    def both(digest: str, trial: Trial) -> None:
        keep(digest, trial)
        key = trial.problem, trial.config
        before, last[key] = last.get(key), trial
        if before is None or (before.us, before.failure) != (trial.us, trial.failure):  # else it was checked
            facts = {"problem": trial.problem.label, "config": str(trial.config)}
            log("tune", logging.DEBUG, **facts, us=trial.us, failure=trial.failure)

    return both
