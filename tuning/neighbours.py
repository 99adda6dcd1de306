"""How much longer than the model's may a neighbour's config be predicted to take: python tuning/neighbours.py

Each tuned problem of an H200's table that tuning/trials has measurements of is forgotten in turn. The nearest
one's config is then used, unless its predicted time is over that of the model's choice by more than a margin:
printed is what each margin loses to the fastest config that was measured. A config that was not measured for
the problem itself counts as the prediction, scaled by what it was off for the model's first pick. These are
what the model takes to be slow, as searches left them out; the last line knows measured ones alone.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import Tiled
from tritile.lab.report import recorded
from tritile.planning import model, plans

DEVICE = target_device("nvidia-h200")
TRIALS = sorted((Path(__file__).parent / "trials").glob(f"{DEVICE.slug}*.sqlite3.gz"))
MARGINS = (0.0, 1.0, 1.05, plans.OVERRULED, 1.15, 1.2, 1.3, 1.5, math.inf)


@dataclass(frozen=True)
class Case:
    """A forgotten problem: each choice's loss, 1 for none, and how far predictions of both are apart."""

    near: float
    chosen: float
    margin: float
    measured: bool  # both of them


def case(problem: Tiled, times: dict[Config, float]) -> Case | None:
    """What is chosen for a problem where it, and whatever has just its sizes, is not known."""
    known = plans.winners(problem, DEVICE)
    close = plans.nearest(problem, DEVICE, [winner for winner in known if winner[0] != problem])
    if close is None:
        return None
    chosen = plans.rival(problem, DEVICE, [winner for winner in known if winner[0].sizes != problem.sizes])
    us = {config: model.predict_us(config, problem, DEVICE) for config in [*times, close.config, chosen]}
    first, best = min(times, key=lambda config: (us[config], config.key)), min(times.values())
    off = times[first] / us[first]
    near_us, chosen_us = (times.get(config, us[config] * off) for config in (close.config, chosen))
    both = close.config in times and chosen in times
    return Case(near_us / best, chosen_us / best, us[close.config] / us[chosen], both)


def report(name: str, cases: list[Case], margin: float) -> None:
    """Print what a margin loses."""
    losses = sorted(one.near if one.margin <= margin else one.chosen for one in cases)
    passed = sum(one.margin > margin for one in cases)
    mean, tail = statistics.geometric_mean(losses), losses[int(0.95 * (len(losses) - 1))]
    print(
        f"{name} {margin:4.2f}: {passed:3d} of {len(cases)} passed over, geometric mean {mean:.3f}, "
        f"95% {tail:.3f}, worst {losses[-1]:.3f}"
    )


def main() -> None:
    """Print what each margin loses."""
    measured = recorded.times(TRIALS, DEVICE)
    found = [case(problem, times) for (problem, _), times in measured.items()]
    cases = [one for one in found if one is not None]
    for margin in MARGINS:
        report("up to", cases, margin)
    for margin in (0.0, plans.OVERRULED, math.inf):
        report("both measured, up to", [one for one in cases if one.measured], margin)


if __name__ == "__main__":
    main()
