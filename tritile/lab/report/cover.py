"""Choose the fewest configs that serve all problems of a table, each within a tolerance of its best.

A smaller table compiles less and loads faster. A config serves the problems on which it was measured to be
fast enough. This is set cover, solved exactly as an integer program.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tritile.core.config import Config
from tritile.core.problem import Problem
from tritile.errors import InvalidValueError, TuningError
from tritile.planning.table import Entry
from tritile.planning.trial import Trial

Slower = dict[Config, tuple[float, float]]  # how much slower than the best, as a fraction, and microseconds


@dataclass(frozen=True)
class Covered:
    """Hold a table's entries with few configs.

    `before` and `after` count different configs. `worst` and `mean` are losses over the problems: 0.01 means
    that an entry's config takes 1% longer than the best known of its problem.
    """

    entries: tuple[Entry, ...]
    before: int
    after: int
    worst: float
    mean: float


def careful_us(trial: Trial) -> float:
    """Return a trial's time in microseconds with a margin for luck; infinity where it failed.

    Trials with a checked answer are finalists, timed side by side, and need no margin. Others were screened
    quickly: half the distance between their 20th and 80th percentiles is added.
    """
    return trial.time if trial.error is not None else trial.time * (1 + (trial.spread or 0.0) / 2)


def candidates(entries: Iterable[Entry], trials: Iterable[Trial], within: float) -> dict[Problem, Slower]:
    """Return for each entry the configs measured to be slower by at most `within`, its own included."""
    best = {entry.problem: entry for entry in entries}
    found: dict[Problem, Slower] = {
        problem: {entry.config: (0.0, entry.us or 0.0)} for problem, entry in best.items()
    }
    for trial in trials:
        entry = best.get(trial.problem)
        if entry is not None and entry.us is not None and trial.us is not None:
            slower = max(0.0, careful_us(trial) / entry.us - 1)
            if slower <= within:
                found[trial.problem].setdefault(trial.config, (slower, trial.us))
    return found


def fewest(sets: Sequence[Iterable[Config]]) -> set[Config]:
    """Return the smallest set that has at least one config of every set, exactly.

    The integer program has a binary variable for each config and a row for each set; HiGHS solves it through
    scipy. Raises TuningError if it is not solved.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    rows = [sorted(set(own), key=lambda config: config.key) for own in sets]
    places: dict[Config, int] = {}
    for config in (config for row in rows for config in row):
        places.setdefault(config, len(places))
    if not places:
        return set()
    pairs = [(number, places[config]) for number, row in enumerate(rows) for config in row]
    has = csr_array(([1.0] * len(pairs), tuple(zip(*pairs, strict=True))), shape=(len(rows), len(places)))
    ones = [1.0] * len(places)
    solved = milp(ones, integrality=ones, bounds=Bounds(0, 1), constraints=LinearConstraint(has, 1, math.inf))
    if not solved.success:
        raise TuningError(f"the smallest set of {len(places)} configs was not found: {solved.message}")
    return {config for config, place in places.items() if solved.x[place] > 0.5}


def covered(entries: Sequence[Entry], trials: Iterable[Trial], within: float) -> Covered:
    """Return the entries with the fewest configs, each measured to be at most `within` slower than the best.

    Each problem gets its fastest config of those kept. Predicted entries keep theirs.
    Raises InvalidValueError for a tolerance below 0, and as `fewest` does.
    """
    if not 0 <= within < math.inf:
        raise InvalidValueError(f"a tolerance of {within}: wanted 0 or more, as 0.02 for 2%")
    near = candidates(entries, trials, within)
    kept = fewest([near[entry.problem] for entry in entries])
    chosen, losses = [], []
    for entry in entries:
        own = near[entry.problem]
        config = min((c for c in own if c in kept), key=lambda c: (own[c][0], c != entry.config, c.key))
        loss, us = own[config]
        chosen.append(entry if config == entry.config else replace(entry, config=config, us=us))
        losses.append(loss)
    before = len({entry.config for entry in entries})
    mean = sum(losses) / len(losses) if losses else 0.0
    return Covered(tuple(chosen), before, len(kept), max(losses, default=0.0), mean)
