"""Fit the model's constants to a store's trials: python tuning/fit_model.py STORE.sqlite3 [--steps 400]

Regret is the time of the config that the formula puts first among those measured, over the time of the
fastest. Every third problem is left out of the fit, and its regret printed beside. The constants of the
tile kernel and of those with descriptors are fitted one after the other, each to all trials, so that the
formulas also agree with each other.
"""

import argparse
import math
import random
import sqlite3
import statistics
from collections import defaultdict
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from tritile.config import Config
from tritile.device import target_device
from tritile.model import FITTED, TMA_FITTED, matmul_us, tma_us
from tritile.problem import MatmulProblem
from tritile.space import tile
from tritile.store import Store

Measured = dict[MatmulProblem, dict[Config, float]]
Fits = dict[str, Any]  # "tile" and "tma", to their constants
DEVICE = target_device("nvidia-h200")


def read(path: Path) -> Measured:
    """Microseconds by problem and config, of the matmul trials that worked."""
    found: Measured = defaultdict(dict)
    for _, trial in Store(DEVICE, path.parent).everything():
        if isinstance(trial.problem, MatmulProblem) and trial.us and trial.failure is None:
            found[trial.problem][trial.config] = trial.us
    return found


def predicted(config: Config, problem: MatmulProblem, fits: Fits) -> float:
    """Microseconds by the formula of the config's family."""
    if config.family == tile.NAME:
        return matmul_us(config, problem, DEVICE, fits["tile"])
    return tma_us(config, problem, DEVICE, fits["tma"])


def regrets(measured: Measured, fits: Fits) -> list[float]:
    """For each problem, the time of the predicted best over that of the best."""
    ratios = []
    for problem, times in measured.items():
        pick = min(times, key=lambda config: (predicted(config, problem, fits), config.key))
        ratios.append(times[pick] / min(times.values()))
    return ratios


def loss(measured: Measured, fits: Fits) -> float:
    """The mean logarithm of regret, the worst tenth counted twice."""
    logs = sorted(math.log(ratio) for ratio in regrets(measured, fits))
    return statistics.mean(logs) + statistics.mean(logs[-max(1, len(logs) // 10) :])


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
        trial = fits | {name: replace(fits[name], **changes)}
        value = loss(measured, trial)
        if value < best:
            best, fits = value, trial
            print(f"{name} step {step}: loss {best:.4f}", flush=True)
    return fits


def main() -> None:
    """Fit, and print the constants with their regret before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    if given.store.name != f"{DEVICE.slug}.sqlite3" or not given.store.is_file():
        raise SystemExit(f"{given.store}: wanted a store named {DEVICE.slug}.sqlite3")
    if not sqlite3.connect(given.store).execute("SELECT count(*) FROM trials").fetchone()[0]:
        raise SystemExit(f"{given.store} holds no trials")
    measured = read(given.store)
    problems = sorted(measured, key=lambda problem: problem.label)
    held_out = {p: measured[p] for p in problems[::3]}
    fitted_to = {p: measured[p] for i, p in enumerate(problems) if i % 3}
    fits: Fits = {"tile": FITTED, "tma": TMA_FITTED}
    for name, part in (("fitted to, before", fitted_to), ("left out, before", held_out)):
        report(name, part, fits)
    for name in ("tma", "tile"):
        fits = fitted(name, fitted_to, fits, given.steps)
    for name, part in (("fitted to, after", fitted_to), ("left out, after", held_out)):
        report(name, part, fits)
    for name, fit in fits.items():
        print(name, {field: round(value, 4) for field, value in asdict(fit).items()})


if __name__ == "__main__":
    main()
