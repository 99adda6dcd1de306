"""Fit the model's constants to measured trials: python tuning/fit_model.py [STORE ...] [--steps 400]

Stores are SQLite files of H200 trials, or .gz of them, one for each tuning; by default those in
tuning/trials. Regret is the time of the config that the formula puts first among those that a tuning
measured, over the time of the fastest. Every third problem is left out of the fit, and its regret printed
beside. Of the matmul formulas, the constants of the tile kernel and of those with descriptors are fitted one
after the other, each to all trials, so that they also agree with each other. --steps 0 prints the regret of
the constants as they are.
"""

import argparse
import gzip
import math
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from tritile.config import Config
from tritile.device import target_device
from tritile.model.matmul import FITTED, TMA_FITTED, matmul_us, tma_us
from tritile.model.permute import PERMUTE_FITTED, permute_us
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.space import illegal, tile
from tritile.store import Store

Tiled = MatmulProblem | PermuteProblem
Measured = dict[tuple[Tiled, int], dict[Config, float]]  # by problem and tuning
Fits = dict[str, Any]  # "tile" and "tma", both of matmul, and "permute", to their constants
DEVICE = target_device("nvidia-h200")
TRIALS = sorted((Path(__file__).parent / "trials").glob(f"{DEVICE.slug}*.sqlite3.gz"))


def read(paths: Iterable[Path]) -> Measured:
    """Microseconds of the trials that worked, of configs that are still legal."""
    found: Measured = defaultdict(dict)
    for tuning, path in enumerate(paths):
        with tempfile.TemporaryDirectory() as folder:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            (Path(folder) / f"{DEVICE.slug}.sqlite3").write_bytes(data)
            for _, trial in Store(DEVICE, Path(folder)).everything():
                if not isinstance(trial.problem, Tiled) or not trial.us or trial.failure is not None:
                    continue
                if illegal(trial.config, trial.problem, DEVICE) is None:
                    found[trial.problem, tuning][trial.config] = trial.us
    return found


def predicted(config: Config, problem: Tiled, fits: Fits) -> float:
    """Microseconds by the formula of the operation and the config's family."""
    if isinstance(problem, PermuteProblem):
        return permute_us(config, problem, DEVICE, fits["permute"])
    if config.family == tile.NAME:
        return matmul_us(config, problem, DEVICE, fits["tile"])
    return tma_us(config, problem, DEVICE, fits["tma"])


def regrets(measured: Measured, fits: Fits) -> list[float]:
    """For each problem, the time of the predicted best over that of the best."""
    ratios = []
    for (problem, _), times in measured.items():
        pick = min(times, key=lambda config: (predicted(config, problem, fits), config.key))
        ratios.append(times[pick] / min(times.values()))
    return ratios


def misfit(measured: Measured, fits: Fits) -> float:
    """How far predictions of each problem's better half are off, as a mean logarithm.

    What is off by the same factor for all configs of a problem counts less: it changes no choice.
    """
    found = []
    for (problem, _), times in measured.items():
        best = min(times.values())
        logs = [math.log(predicted(c, problem, fits) / us) for c, us in times.items() if us < 2 * best]
        middle = statistics.mean(logs)
        found.append(statistics.mean(abs(log - middle) for log in logs) + 0.3 * abs(middle))
    return statistics.mean(found)


def loss(measured: Measured, fits: Fits) -> float:
    """The mean logarithm of regret, the worst tenth counted again at half weight, and half the misfit."""
    logs = sorted(math.log(ratio) for ratio in regrets(measured, fits))
    worst = logs[-max(1, len(logs) // 10) :]
    return statistics.mean(logs) + 0.5 * statistics.mean(worst) + 0.5 * misfit(measured, fits)


def report(name: str, measured: Measured, fits: Fits) -> None:
    """Print the median, 95th percentile and worst regret."""
    ratios = sorted(regrets(measured, fits))
    tail = ratios[int(0.95 * (len(ratios) - 1))]
    print(f"{name}: median {statistics.median(ratios):.3f}, 95% {tail:.3f}, worst {ratios[-1]:.3f}")


def fitted(name: str, measured: Measured, fits: Fits, steps: int) -> Fits:
    """Random steps of one formula's constants, each kept where the loss falls."""
    draw, best = random.Random(0), loss(measured, fits)
    for step in range(steps):
        names = draw.sample([field.name for field in fields(fits[name])], draw.choice((1, 1, 2, 3)))
        scale = 0.5 * (1 - step / steps) + 0.05
        changes = {field: getattr(fits[name], field) * math.exp(draw.gauss(0, scale)) for field in names}
        shares = ("repack_share", "tail", "overlap", "bandwidth")
        if changes.get("lone", 1.0) < 1.0 or any(changes.get(share, 0.0) > 1.0 for share in shares):
            continue  # against what the constant stands for
        trial = fits | {name: replace(fits[name], **changes)}
        value = loss(measured, trial)
        if value < best:
            best, fits = value, trial
            print(f"{name} step {step}: loss {best:.4f}", flush=True)
    return fits


def main() -> None:
    """Fit, and print the constants with their regret before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", type=Path, nargs="*", default=TRIALS)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    missing = [str(path) for path in given.stores if not path.is_file()]
    if missing:
        raise SystemExit(f"no store at {', '.join(missing)}")
    measured = read(given.stores)
    if not measured:
        raise SystemExit(f"no trials in {', '.join(map(str, given.stores))}")
    fits: Fits = {"tile": FITTED, "tma": TMA_FITTED, "permute": PERMUTE_FITTED}
    for op, names in (("matmul", ("tma", "tile")), ("permute", ("permute",))):
        own = {key: times for key, times in measured.items() if key[0].op == op}
        problems = sorted({problem for problem, _ in own}, key=lambda problem: problem.label)
        left_out = set(problems[::3])
        held_out = {key: times for key, times in own.items() if key[0] in left_out}
        fitted_to = {key: times for key, times in own.items() if key[0] not in left_out}
        if not held_out or not fitted_to:
            continue
        for part, trials in (("fitted to", fitted_to), ("left out", held_out)):
            report(f"{op}, {part}, before", trials, fits)
        for name in names if given.steps else ():
            fits = fitted(name, fitted_to, fits, given.steps)
        for part, trials in (("fitted to", fitted_to), ("left out", held_out)):
            report(f"{op}, {part}, after", trials, fits)
    for name, fit in fits.items():
        print(name, {field: round(value, 4) for field, value in asdict(fit).items()})


if __name__ == "__main__":
    main()
