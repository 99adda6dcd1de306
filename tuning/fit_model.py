"""Fit the model's constants to measured trials: python tuning/fit_model.py [STORE ...] [--steps 400]

Stores are SQLite files of H200 trials, or .gz of them, one for each tuning; by default those in
tuning/trials. Regret is the time of the measured config that the formula puts first, over the time of the
fastest. Only stores of whole spaces hold configs that no search would try and a pick may still fall for, so
they count more in the fit, and their regret is printed apart.

Problems are dealt to three parts. For each part the constants are fitted to the other two. The regret of
each part under the fit that left it out is what a new problem has to expect. Such a fit begins with
constants that are off at random, as those in the source have seen the problems it leaves out. The constants
printed last are fitted to all. The matmul formulas of the tile kernel and of kernels with descriptors are
fitted in turn, so that they also agree. --steps 0 prints the regret of the constants as they are.
"""

import argparse
import math
import random
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.families.common.tma_time import TMA_FITTED
from tritile.families.matmul_tile import family as tile
from tritile.families.permute.family import PERMUTE_FITTED
from tritile.families.registry import FAMILIES
from tritile.families.space import legal_configs
from tritile.lab.report import recorded
from tritile.lab.report.recorded import Times

Tiled = MatmulProblem | PermuteProblem
Fits = dict[str, Any]  # "tile" and "tma", both of matmul, and "permute", to their constants
DEVICE = target_device("nvidia-h200")
TRIALS = sorted((Path(__file__).parent / "trials").glob(f"{DEVICE.slug}*.sqlite3.gz"))
START: Fits = {"tile": tile.FITTED, "tma": TMA_FITTED, "permute": PERMUTE_FITTED}
FORMULAS = {"matmul": ("tma", "tile", "tma"), "permute": ("permute",)}
PARTS = 3
WHOLE_WEIGHT = 6.0  # of a problem whose whole space was measured; a searched one weighs 1
BLUR = 0.015  # predictions nearer than this fraction count as equal
SHARES = ("repack_share", "overlap", "bandwidth", "exposed")  # never above 1
FACTORS = ("lone", "small_mma", "odd_store")  # never below 1


@dataclass(frozen=True)
class Case:
    """Hold what one tuning measured of one problem: configs, ordered by text, and microseconds of each."""

    problem: Tiled
    configs: list[Config]
    times: list[float]
    whole: bool

    @property
    def best(self) -> float:
        """Return the microseconds of the fastest."""
        return min(self.times)


def cases(measured: Times) -> list[Case]:
    """Return the problems of some tunings. A case is whole if nearly every legal config was measured."""
    found = []
    for (problem, _), times in measured.items():
        configs = sorted(times, key=lambda config: config.key)
        whole = len(configs) > 100 and len(configs) >= 0.9 * len(legal_configs(problem, DEVICE))
        found.append(Case(problem, configs, [times[config] for config in configs], whole))
    return found


def formula(config: Config, problem: Tiled) -> str:
    """Name the formula that predicts a config."""
    if isinstance(problem, PermuteProblem):
        return "permute"
    return "tile" if config.family == tile.NAME else "tma"


def predicted(config: Config, problem: Tiled, fits: Fits) -> float:
    """Predict microseconds by the formula of the operation and the config's family."""
    formula_of = FAMILIES[problem.op][config.family].predicted_us
    return formula_of(config, problem, DEVICE, fits[formula(config, problem)])


def regret(case: Case, fits: Fits) -> float:
    """Return the time of the predicted best over that of the best."""
    times = [predicted(config, case.problem, fits) for config in case.configs]
    return case.times[times.index(min(times))] / case.best


def penalty(case: Case, times: list[float]) -> float:
    """Return the cost of a prediction: the logarithm of regret, its square, and half the misfit.

    Regret is a mean over all configs predicted to be about as fast as the first, as chance orders them. The
    misfit is the mean error of logarithms of times up to twice the best. An error by the same factor for all
    configs counts less, as it changes no choice.
    """
    first = min(times)
    chances = [(math.exp((1 - us / first) / BLUR), t) for us, t in zip(times, case.times, strict=True)]
    expected = sum(chance * t for chance, t in chances) / sum(chance for chance, _ in chances)
    lost = math.log(expected / case.best)
    near = 2 * case.best
    logs = [math.log(us / t) for us, t in zip(times, case.times, strict=True) if t < near]
    middle = statistics.fmean(logs)
    misfit = statistics.fmean(abs(log - middle) for log in logs) + 0.3 * abs(middle)
    return lost + 4 * lost * lost + 0.5 * misfit


def bounded(fit: Any, changes: dict[str, float]) -> Any:
    """Return `fit` with these changes, each bounded by what its constant means."""
    low = {name: max(1.0, value) if name in FACTORS else value for name, value in changes.items()}
    return replace(fit, **{name: min(1.0, value) if name in SHARES else value for name, value in low.items()})


class Fitting:
    """Compute the loss of one formula's constants while predictions of the others stay."""

    def __init__(self, name: str, own: list[Case], fits: Fits) -> None:
        self.name, self.fits, self.cases = name, fits, own
        self.weights = [WHOLE_WEIGHT if case.whole else 1.0 for case in own]
        self.times = [[predicted(c, case.problem, fits) for c in case.configs] for case in own]
        self.places = [
            [i for i, config in enumerate(case.configs) if formula(config, case.problem) == name]
            for case in own
        ]

    def loss(self, fit: Any) -> float:
        """Return the weighted mean cost of all cases."""
        fits, costs = self.fits | {self.name: fit}, []
        for case, times, places in zip(self.cases, self.times, self.places, strict=True):
            for i in places:
                times[i] = predicted(case.configs[i], case.problem, fits)
            costs.append(penalty(case, times))
        return statistics.fmean(costs, self.weights)

    def fitted(self, steps: int) -> Any:
        """Take random steps of the constants, and keep each that lowers the loss."""
        draw, fit = random.Random(0), self.fits[self.name]
        best, names = self.loss(fit), [field.name for field in fields(fit)]
        for step in range(steps):
            moved = draw.sample(names, draw.choice((1, 1, 2, 3)))
            scale = 0.4 * (1 - step / steps) + 0.03
            changes = {name: getattr(fit, name) * math.exp(draw.gauss(0, scale)) for name in moved}
            trial = bounded(fit, changes)
            value = self.loss(trial)
            if value < best:
                best, fit = value, trial
        return fit


def blind(fit: Any) -> Any:
    """Return the constants, each off by a random factor of up to 8.

    The constants in the source were fitted to the very problems that are now left out.
    """
    draw = random.Random(1)
    return bounded(fit, {name: value * 8 ** draw.uniform(-1, 1) for name, value in asdict(fit).items()})


def fit_all(op: str, own: list[Case], steps: int, afresh: bool) -> Fits:
    """Fit each formula of an operation in turn, `afresh` or from the constants as they are."""
    if not steps:
        return START
    fits = {name: blind(fit) if afresh else fit for name, fit in START.items()}
    for name in FORMULAS[op]:
        fits = fits | {name: Fitting(name, own, fits).fitted(steps)}
    return fits


def report(name: str, regrets: Iterable[float]) -> None:
    """Print the median, mean, 95th percentile and worst regret."""
    ratios = sorted(regrets)
    middle, mean = statistics.median(ratios), statistics.fmean(ratios)
    tail = ratios[int(0.95 * (len(ratios) - 1))]
    told = f"median {middle:.3f}, mean {mean:.3f}, 95% {tail:.3f}, worst {ratios[-1]:.3f}"
    print(f"{name} ({len(ratios)}): {told}")


def main() -> None:
    """Fit, and print regrets and constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="*", default=TRIALS)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    everything = cases(recorded.times(given.stores, DEVICE))
    for op, formulas in FORMULAS.items():
        own = [case for case in everything if case.problem.op == op]
        problems = sorted({case.problem for case in own}, key=lambda problem: problem.label)
        left_out = {}
        for part in range(PARTS):
            held = set(problems[part::PARTS])
            kept = [case for case in own if case.problem not in held]
            left_out |= dict.fromkeys(held, fit_all(op, kept, given.steps, True))
        fits = fit_all(op, own, given.steps, False)
        regrets: dict[str, list[float]] = {}
        for case in own:
            kind = "whole spaces" if case.whole else "searched"
            for name, used in (
                ("before", START),
                ("left out", left_out[case.problem]),
                ("fitted to all", fits),
            ):
                regrets.setdefault(f"{op}, {kind}, {name}", []).append(regret(case, used))
        for name, found in sorted(regrets.items()):
            report(name, found)
        for name in dict.fromkeys(formulas):
            print(name, {field: float(f"{value:.3g}") for field, value in asdict(fits[name]).items()})


if __name__ == "__main__":
    main()
