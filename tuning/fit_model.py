"""Fit the model's constants to a store's trials: python tuning/fit_model.py STORE.sqlite3 [--steps 400]

Regret is the time of the config that the formula puts first among those measured, over the time of the
fastest. Every third problem is left out of the fit, and its regret printed beside.
"""

import argparse
import math
import random
import sqlite3
import statistics
from collections import defaultdict
from dataclasses import asdict, fields, replace
from pathlib import Path

from tritile.config import Config
from tritile.device import target_device
from tritile.model import FITTED, Fit, matmul_us
from tritile.problem import MatmulProblem
from tritile.store import Store

Measured = dict[MatmulProblem, dict[Config, float]]
DEVICE = target_device("nvidia-h200")


def read(path: Path) -> Measured:
    """Microseconds by problem and config, of the matmul trials that worked."""
    found: Measured = defaultdict(dict)
    for _, trial in Store(DEVICE, path.parent).everything():
        if isinstance(trial.problem, MatmulProblem) and trial.us and trial.failure is None:
            found[trial.problem][trial.config] = trial.us
    return found


def regrets(measured: Measured, fit: Fit) -> list[float]:
    """For each problem, the time of the predicted best over that of the best."""
    ratios = []
    for problem, times in measured.items():
        pick = min(times, key=lambda config: (matmul_us(config, problem, DEVICE, fit), config.key))
        ratios.append(times[pick] / min(times.values()))
    return ratios


def loss(measured: Measured, fit: Fit) -> float:
    """The mean logarithm of regret, the worst tenth counted twice."""
    logs = sorted(math.log(ratio) for ratio in regrets(measured, fit))
    return statistics.mean(logs) + statistics.mean(logs[-max(1, len(logs) // 10) :])


def report(name: str, measured: Measured, fit: Fit) -> None:
    """Print the median, 95th percentile and worst regret."""
    ratios = sorted(regrets(measured, fit))
    tail = ratios[int(0.95 * (len(ratios) - 1))]
    print(f"{name}: median {statistics.median(ratios):.3f}, 95% {tail:.3f}, worst {ratios[-1]:.3f}")


def main() -> None:
    """Random steps from the present constants, each kept where the loss falls."""
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
    draw, fit, best = random.Random(0), FITTED, loss(fitted_to, FITTED)
    for name, part in (("fitted to, before", fitted_to), ("left out, before", held_out)):
        report(name, part, fit)
    for step in range(given.steps):
        names = draw.sample([field.name for field in fields(Fit)], draw.choice((1, 1, 2, 3)))
        scale = 0.5 * (1 - step / given.steps) + 0.05
        changes = {name: getattr(fit, name) * math.exp(draw.gauss(0, scale)) for name in names}
        trial = replace(fit, **changes)
        value = loss(fitted_to, trial)
        if value < best:
            best, fit = value, trial
            print(f"step {step}: loss {best:.4f}", flush=True)
    for name, part in (("fitted to, after", fitted_to), ("left out, after", held_out)):
        report(name, part, fit)
    print({name: round(value, 4) for name, value in asdict(fit).items()})


if __name__ == "__main__":
    main()
