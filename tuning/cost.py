"""Fit what all products share to half of the sweeps, and tell what picks lose at the other half.

    python tuning/cost.py [--steps 0] [--sizes 60]

The constants are those of `Fit` in tritile/families/common/cost.py; `--steps 0` only reports. Each class of
each GPU counts alike, by `--sizes` sizes drawn from its first half. Told is, at the sizes of the second half,
what the model's pick of the configs that were timed loses to the fastest; and how far times within 1.3 of the
fastest are off: the mean of measured over predicted, and the standard deviation of its logarithm.
"""

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from train import read_all
from tritile.choose.inputs import facts_at
from tritile.choose.waves import predict_us
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.families.common.cost import FIT, Facts, Fit, Program, product_us
from tritile.families.registry import FAMILIES
from tritile.tune.calibrate.sweep import Row
from tritile.tune.calibrate.train import usable

SWEEPS = Path(__file__).parent / "sweeps"
GPUS = {"H200": (SWEEPS, SWEEPS / "more"), "H100": (SWEEPS / "h100", SWEEPS / "h100" / "more")}
SLOWEST = 4.0  # times the fastest, beyond which a config counts no less
PRESSURE = 1.5  # power by which slower configs count less
NOISE = 0.15  # share of a time beyond which errors count less than squared
PULL = 0.3  # towards the constants to begin with
STEP = 1e-3


class Sample(NamedTuple):
    config: Config
    facts: Facts
    device: Device
    program: Program
    us: float
    weight: float


def samples(rows: Sequence[Row], device: Device) -> list[Sample]:
    found = []
    for problem, times, _ in rows:
        fastest = min(times.values())
        plain, copied = (facts_at(problem, device, copies) for copies in (False, True))
        for config, us in times.items():
            program = FAMILIES[problem.op][config.family].cost(config, problem.core, device)
            weight = min(us / fastest, SLOWEST) ** -PRESSURE
            facts = copied if FAMILIES[problem.op][config.family].copies else plain
            found.append(Sample(config, facts, device, program, us, weight))
    return [each._replace(weight=each.weight / len(found)) for each in found]


def errors(theta: torch.Tensor, of: list[Sample]) -> torch.Tensor:
    fit = Fit(*theta.exp().tolist())
    return torch.tensor(
        [
            math.log(product_us(each.config, each.facts, each.device, each.program, fit) / each.us)
            for each in of
        ],
        dtype=torch.float64,
    )


def fitted(of: list[Sample], steps: int) -> Fit:
    """Robust least squares of logarithms, by Levenberg and Marquardt."""
    begin = torch.tensor(astuple(FIT), dtype=torch.float64).log()
    weights = torch.tensor([each.weight for each in of], dtype=torch.float64)
    weights *= len(of) / weights.sum()
    theta, damping, one = begin.clone(), 1e-2, torch.eye(len(begin), dtype=torch.float64)

    def cost(at: torch.Tensor, off: torch.Tensor) -> float:
        robust = 2 * NOISE**2 * ((1 + (off / NOISE) ** 2).sqrt() - 1)
        return float((weights * robust).sum() + PULL**2 * ((at - begin) ** 2).sum())

    off = errors(theta, of)
    for _ in range(steps):
        slopes = torch.stack([(errors(theta + STEP * each, of) - off) / STEP for each in one], 1)
        trust = weights * (1 + (off / NOISE) ** 2) ** -0.5
        square = slopes.T @ (slopes * trust[:, None]) + PULL**2 * one
        down = slopes.T @ (trust * off) + PULL**2 * (theta - begin)
        for _ in range(6):
            tried = theta - torch.linalg.solve(square + damping * torch.diag(square.diagonal()), down)
            if cost(tried, new := errors(tried, of)) < cost(theta, off):
                theta, off, damping = tried, new, damping / 3
                break
            damping *= 4
    return Fit(*(float(f"{value:.3g}") for value in theta.exp().tolist()))


def report(name: str, rows: Sequence[Row], device: Device) -> None:
    lost, off = [], []
    for problem, times, _ in rows:
        predicted = {config: predict_us(config, problem, device) for config in times}
        pick, fastest = min(predicted, key=lambda config: predicted[config]), min(times.values())
        lost.append(math.log(times[pick] / fastest))
        off += [math.log(us / predicted[config]) for config, us in times.items() if us < 1.3 * fastest]
    mean, p95 = statistics.fmean(lost), sorted(lost)[int(0.95 * len(lost))]
    print(
        f"{name}, {len(rows)} sizes left out: the model's pick loses {math.expm1(mean):.2%} on the geometric "
        f"mean, {math.expm1(p95):.1%} (95%); measured by predicted {math.exp(statistics.fmean(off)):.2f}, "
        f"within {statistics.pstdev(off):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=0, help="of the fit; default: 0")
    parser.add_argument("--sizes", type=int, default=60, help="of a class that are fitted to; default: 60")
    asked = parser.parse_args()
    left_out, of = {}, []
    for gpu, folders in GPUS.items():
        files = [path for folder in folders for path in sorted(folder.glob("*.gz"))]
        for name, device, rows, _ in map(usable, read_all(files)):
            rows = random.Random(name).sample(rows, len(rows))
            half = len(rows) // 2
            left_out[f"{gpu} {name}"] = rows[half:], device
            if rows[0].problem.op != "permute" and asked.steps:
                of += samples(rows[: min(half, asked.sizes)], device)
    if asked.steps:
        fit = fitted(of, asked.steps)
        print(", ".join(f"{each.name}={getattr(fit, each.name)}" for each in fields(fit)))
        product_us.__defaults__ = (replace(fit),)
    for name, (rows, device) in left_out.items():
        report(name, rows, device)


if __name__ == "__main__":
    main()
