"""Measure how good and how quick searches are: python tuning/searches.py [--output tuning/results/GPU]

Products and permutations of drawn sizes, by the seed of suite "unseen" (unseen.py), are searched twice
with nothing remembered and nothing compiled. Then every config of their space is timed, and torch beside the
fastest. Sizes whose space would take long are left out. A line of each is appended to `searches.jsonl`:

- `seconds`, `tried`: of each search, and how many configs it timed; of the whole space `whole_s`, `space`;
- `regrets`: by how much the winner of each search is slower than the fastest config; `predicted_regret`: that
  of the config by which a call is made where nothing is measured. Times are those of the whole space. A
  search goes beyond it, by steps from config to config: what it found there counts by its own time;
- `best_us`, `torch_us`: of the fastest config, and of torch, null where it has no single call for this.
"""

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import unseen
from tritile.choose import pick
from tritile.core.config import Config
from tritile.core.device import Device, current_gpu
from tritile.core.problem import Tiled
from tritile.lab.environment import environment
from tritile.tune import now
from tritile.tuner.measure.engine import OnTrial, Rules, Tuned, exhaustive_rules
from tritile.tuner.measure.workers import PoolRunner
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import store_of
from unseen import environ

SEARCHES = 2
OPERATIONS, BYTES = 2e11, 1e9  # the most of a product and of a permutation: some 300 microseconds


def problems(seed: str) -> Iterator[Tiled]:
    """Yield the drawn problems that do not take long: two products, then a permutation, and so on."""
    cases = unseen.draw(seed)
    products = (case.problem for case in cases if case.op == "matmul" and case.problem.flops < OPERATIONS)
    moved = (case.problem for case in cases if case.op == "permute" and case.problem.bytes < BYTES)
    yield from itertools.chain.from_iterable(zip(products, products, moved, strict=False))


def searched(problem: Tiled, device: Device, rules: Rules, on_trial: OnTrial) -> tuple[Tuned, float]:
    """Return the outcome of a search with nothing compiled, and its seconds, in which processes start."""
    with tempfile.TemporaryDirectory() as folder, environ(TRITON_CACHE_DIR=folder):
        begun = time.monotonic()
        with PoolRunner(0) as runner:
            (found,) = now.tune([problem], device, runner, on_trial, rules, force=True)
            return found, time.monotonic() - begun


def measured(problem: Tiled, device: Device) -> dict[str, Any] | None:
    """Return the line of a problem, without its surroundings; None where a search found no config."""
    store, times = store_of(device), dict[Config, float]()

    def on_trial(digest: str, trial: Trial) -> None:
        store.add(digest, trial)
        times[trial.config] = trial.time

    predicted = pick.plan_for(problem, device, "cached")
    assert predicted is not None
    searches = [searched(problem, device, Rules(), on_trial) for _ in range(SEARCHES)]
    if any(found.best is None for found, _ in searches):
        return None
    now.time_torch(problem, device, 0)
    torch = store.best(TORCH, problem)
    every, seconds = searched(problem, device, exhaustive_rules(Rules(problem_s=math.inf)), on_trial)
    best = min(times.values())

    def slower(config: Config) -> float | None:
        us = times.get(config, math.inf)
        return round(us / best - 1, 4) if us < math.inf else None

    return {
        "op": "searches",
        "problem": problem.label,
        "seconds": [round(each, 2) for _, each in searches],
        "tried": [found.trials for found, _ in searches],
        "whole_s": round(seconds, 1),
        "space": every.trials,
        "regrets": [slower(found.best.config) for found, _ in searches if found.best],
        "predicted_regret": slower(predicted.config),
        "best_us": best,
        "torch_us": torch and torch.us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=9, help="problems")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    device = current_gpu()
    assert device is not None
    seed = unseen.seed_of()
    for problem in itertools.islice(problems(seed), given.count):
        with unseen.nothing_remembered():
            line = measured(problem, device)
        if line is None:
            print(f"{problem.label}: no config works")
            continue
        text = json.dumps(line | {"env": environment() | {"seed": seed}})
        print(text, flush=True)
        if given.output is not None:
            given.output.mkdir(parents=True, exist_ok=True)
            with (given.output / "searches.jsonl").open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
