"""Choose the portfolio of a class from what `tuning/sweep.py` measured, fit its constants, put it in a table.

    python tuning/portfolio.py CLASS SWEEP.jsonl [...] [--table tritile/tables/GPU.json] [--count 48]

What picks lose is measured by halves: the portfolio and the constants of each half of the sizes are tried on
the other half. What is kept is chosen and fitted by all sizes.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem
from tritile.planning import table
from tritile.planning.classes import MEASURED, class_of
from tritile.planning.formula import product_us, shape_of
from tritile.planning.portfolio import Portfolio
from tritile.tune.calibrate import fit
from tritile.tune.suites import Case

FEWEST = 5  # configs that were timed at a size, below which it tells nothing


def banded(config: Config) -> Config:
    """The config with tiles in bands of 8 rows, which is the order of one row of tiles as well."""
    pairs = tuple((name, 8 if name == "GROUP_M" else value) for name, value in config.kwargs)
    return replace(config, kwargs=pairs)


def read(paths: list[Path], name: str) -> tuple[Device, list[MatmulProblem], list[Config], torch.Tensor]:
    """The GPU, the sizes of a class, configs, and microseconds (sizes, configs), NaN where not timed."""
    places: dict[Config, int] = {}
    rows: list[tuple[MatmulProblem, dict[int, float]]] = []
    for path in paths:
        head, *lines = map(json.loads, path.read_text().splitlines())
        own = [places.setdefault(banded(Config.from_dict(each)), len(places)) for each in head["configs"]]
        for line in lines:
            m, n, k = line["mnk"]
            layout = "NT" if line["b"] == "column" else "NN"
            problem = Case("sweep", "matmul", "bfloat16", layout, m=m, n=n, k=k).problem
            if class_of(problem) == name and len(line["us"]) >= FEWEST:
                rows.append((problem, {own[int(place)]: us for place, us in line["us"].items()}))
    us = torch.full((len(rows), len(places)), torch.nan, dtype=torch.float64)
    for row, (_, times) in enumerate(rows):
        for place, each in times.items():
            us[row, place] = each
    return Device.from_dict(head["device"]), [problem for problem, _ in rows], list(places), us


def kind_of(config: Config) -> tuple[str, bool]:
    return config.family, dict(config.kwargs).get("SPLIT_K", 1) > 1


def made(name, device, problems, configs, us, rows, count):
    """Portfolio of the sizes of `rows`, and what it predicts at all sizes for its configs' places."""
    places = fit.chosen(us[rows], count)
    own = [configs[place] for place in places]
    here, copying = (fit.facts_at(problems, device, copies) for copies in (False, True))
    facts = [here if config.family == "tile" else copying for config in own]
    shapes = [shape_of(config, problems[0], device) for config in own]
    constants = fit.fitted(shapes, list(map(kind_of, own)), facts, us[:, places], rows)
    predicted = [product_us(*each) for each in zip(shapes, facts, constants, strict=True)]
    return own, constants, places, torch.stack(predicted, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=MEASURED)
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--count", type=int, default=48)
    asked = parser.parse_args()
    device, problems, configs, us = read(asked.sweeps, asked.name)
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(0))
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    shares = []
    for chosen, left_out in (halves, halves[::-1]):
        _, _, places, predicted = made(asked.name, device, problems, configs, us, chosen, asked.count)
        covered = us[left_out][:, places].nan_to_num(torch.inf).amin(1)
        best = us[left_out].nan_to_num(torch.inf).amin(1)
        ratios = (covered / best)[covered < torch.inf]
        mean, p95 = ratios.log().mean().exp(), ratios.quantile(0.95)
        print(f"best of the portfolio over the best of all: {mean:.4f} on the mean, {p95:.4f} (95%)")
        shares.append(fit.shares_lost(us[:, places], predicted, left_out))
    loss = fit.loss_of(torch.cat(shares))
    print(f"{asked.name}: {loss}")
    everything = torch.arange(len(problems))
    own, constants, _, _ = made(asked.name, device, problems, configs, us, everything, asked.count)
    portfolio = Portfolio(asked.name, tuple(own), tuple(constants), loss)
    if asked.table:
        old = table.read(asked.table)
        table.write(replace(old, portfolios={**old.portfolios, asked.name: portfolio}), asked.table)


if __name__ == "__main__":
    main()
