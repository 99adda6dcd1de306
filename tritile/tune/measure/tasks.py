"""Describe what is tuned, by which rules, and the outcome; propose the next configs from known trials.

Each trial goes to a store as it is measured, and to a log: JSON lines.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from tritile.core.config import Config
from tritile.core.log import log as log_facts
from tritile.core.problem import Problem, problem_to_dict
from tritile.core.settings import tune_log
from tritile.errors import StoreWarning
from tritile.planning.trial import Trial
from tritile.tune.measure.bench import Subject
from tritile.tune.search import BATCH, ENOUGH, STRATEGIES, next_batch
from tritile.tune.spaces import SearchSpace, Tried

_WHOLE = 256  # configs in a batch of a search through all
_LOGGED = ("us", "spread", "registers", "spills", "shared", "error", "failure", "measured_utc")
Keep = Callable[[str, Trial], None]  # takes the digest of the kernel, and what was measured of it


@dataclass(frozen=True)
class Rules:
    """Set how a search goes: by a strategy of `STRATEGIES`. Its defaults are those of every search.

    `batch`: configs to ask of the strategy at a time. `problem_s`: seconds after which a problem is screened
    no further. `verify_all`: check every config's answer, not only the winner's. `spilled`: time configs that
    spill registers like others, not only where nothing else works. A search ends where its next batch
    promises less than `least_gain`, or after `most` configs.
    `by_trials`: the winner is the fastest by its trial, as whoever reads the trials later finds it; else a
    tie goes to the incumbent, or the first by name.
    """

    strategy: str = "screening"
    batch: int = BATCH
    problem_s: float = 15.0
    verify_all: bool = False
    spilled: bool = False
    least_gain: float = ENOUGH
    most: int | None = None
    by_trials: bool = False


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

    `trials`: configs measured now. `seconds`: since the operands were made.
    """

    problem: Problem
    best: Trial | None
    trials: int
    seconds: float
    failure: str | None = None


def has_more(space: SearchSpace, known: Mapping[Config, Trial], rules: Rules) -> bool:
    """True if a search would measure anything beyond the known trials."""
    return bool(proposed(space, tried_of(known.values()), rules))


def proposed(space: SearchSpace, tried: Tried, rules: Rules) -> list[Config]:
    """Return the next batch of a search; none where the search ends."""
    strategy = STRATEGIES[rules.strategy]
    return next_batch(space, tried, strategy, rules.batch, rules.most, rules.least_gain)


def tried_of(trials: Iterable[Trial]) -> dict[Config, float]:
    """Return microseconds by config, as strategies take them; infinite where a config failed."""
    return {trial.config: trial.time for trial in trials}


def now() -> str:
    """Return the time in UTC, as trials record it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def logged(keep: Keep, log: Path | None = None) -> Keep:
    """Return a `keep` that also logs each trial, at level DEBUG, and appends it to a file.

    The default file is `TRITILE_TUNE_LOG`, if set. Warns with StoreWarning of a log that cannot be written.
    """
    path, last = log or tune_log(), dict[tuple[Problem, Config], Trial]()

    def both(digest: str, trial: Trial) -> None:
        keep(digest, trial)
        key = trial.problem, trial.config
        before, last[key] = last.get(key), trial
        if before is None or (before.us, before.failure) != (trial.us, trial.failure):  # else it was checked
            facts = {"problem": trial.problem.label, "config": str(trial.config)}
            log_facts("tune", logging.DEBUG, **facts, us=trial.us, failure=trial.failure)
        if path is None:
            return
        line = {
            "problem": problem_to_dict(trial.problem),
            "config": trial.config.to_dict(),
            "kernel": digest,
            **{name: getattr(trial, name) for name in _LOGGED},
        }
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            warnings.warn(f"a trial cannot be logged: {error}", StoreWarning, stacklevel=2)

    return both
