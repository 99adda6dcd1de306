"""Time many configs at many drawn sizes of one class of problems, on the GPU that is here.

    python tuning/sweep.py --configs FILE --out FILE.jsonl [--seed TEXT] [--seconds 300] [--within 2.2]

FILE lists configs as JSON. A line of the output is a size with the microseconds of each config that ran, its
place in the list of the first line. Of each size those configs are timed that the model predicts to take at
most `within` times its best. Each is timed in a CUDA graph of several launches on operands of their own, after a read
that leaves none of them in the L2 cache: the median of four replays, or one where that is far behind.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from unseen import PRODUCT_FLOPS, log_uniform, sized

POOL = 3 << 29  # bytes of memory that copies of one operand are cut from
LAUNCHES_US = 250.0  # of launches in a graph, at the least
MOST_LAUNCHES = 40
BEHIND = 1.5  # times the fastest, from which one replay is enough


def sizes(text: str, count: int):
    """Products of the class: rows of all operands start on 16 bytes."""
    from tritile.tune.suites import Case

    dice = random.Random(text)
    found = []
    while len(found) < count:
        unit = 64 if dice.random() < 0.75 else 8
        m, n, k = log_uniform(dice, 1, 16384), sized(dice, 32, 32768, unit), sized(dice, 32, 32768, unit)
        if PRODUCT_FLOPS[0] <= 2 * m * n * k <= PRODUCT_FLOPS[1]:
            layout = ("NN", "NT")[len(found) % 2]
            found.append(Case("sweep", "matmul", "bfloat16", layout, m=m, n=n, k=k).problem)
    return found


class Operands:
    """Memory from which calls are posed, each on a part of its own."""

    def __init__(self) -> None:
        self._pools: list[torch.Tensor] = []
        self._flushed = torch.ones(160 << 20, dtype=torch.uint8, device="cuda").view(torch.float32)

    def calls(self, problem, count: int) -> list:
        from tritile.core.views import posed
        from tritile.tune.subject.operands import random_elements

        starts = [0, 0, 0]
        place = 0

        def make(dtype: str, elements: int):
            nonlocal place
            if len(self._pools) <= place:
                self._pools.append(random_elements(dtype, POOL // 2))
            pool, step = self._pools[place], -(-elements // 256) * 256
            if starts[place] + step > len(pool):
                starts[place] = 0
            start, starts[place] = starts[place], starts[place] + step
            place += 1
            return pool[start : start + elements]

        made = []
        for _ in range(count):
            place = 0
            made.append(posed(problem, make))
        return made

    def flush(self) -> None:
        self._flushed.sum()


def compile_config(config, problems, device) -> tuple[int, str]:
    """Compile a config for all of these; how many it refused, and why."""
    from tritile.errors import TuningError
    from tritile.runtime.ahead import compiled_for

    refused, why = 0, ""
    for problem in problems:
        try:
            compiled_for(problem, config, device)
        except TuningError as error:
            refused, why = refused + 1, str(error)
            if refused > 2:
                break
    return refused, why


def wanted(configs, problem, device, within: float) -> list[int]:
    from tritile.families.space import worthwhile
    from tritile.planning import model

    near = {
        config: model.predict_us(config, problem, device) for config in worthwhile(configs, problem, device)
    }
    limit = within * min(near.values())
    return [place for place, config in enumerate(configs) if near.get(config, limit + 1) <= limit]


def variants(configs) -> list:
    """These, in all orders of tiles that matter: by bands of 8, and by rows alone."""
    from dataclasses import replace

    def banded(config, group):
        pairs = tuple((k, group if k == "GROUP_M" else v) for k, v in config.kwargs)
        return replace(config, kwargs=pairs)

    return list(dict.fromkeys(banded(config, group) for config in configs for group in (8, 1)))


def timed(operands: Operands, problem, config, fastest_us: float) -> float:
    from tritile.runtime import launch
    from tritile.tune.measure.timing import Graph
    from tritile.tune.subject.operands import run_of

    calls = operands.calls(problem, 1)
    run = run_of(launch.prepare(calls[0], config))
    guess = fastest_us if fastest_us < 1e9 else 2 * problem.flops / 6e8 + problem.bytes / 4e6 + 6
    count = max(1 if guess > 600 else 2, min(MOST_LAUNCHES, round(LAUNCHES_US / guess)))
    graph = Graph(run, operands.calls(problem, count), operands.flush)
    times = [graph.time_us()]
    if times[0] < BEHIND * fastest_us:
        times += [graph.time_us() for _ in range(3)]
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", default="sweep")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--within", type=float, default=2.2)
    asked = parser.parse_args()
    from tritile.core import device as devices
    from tritile.core.config import Config
    from tritile.tune.measure.pool import CompilePool

    device = devices.current_gpu()
    begun = time.monotonic()
    configs = variants([Config.from_dict(each) for each in json.loads(asked.configs.read_text())])
    problems = sizes(asked.seed, asked.count)
    chosen = [wanted(configs, problem, device, asked.within) for problem in problems]
    users: dict[int, list] = {}
    for problem, places in zip(problems, chosen, strict=True):
        for place in places:
            users.setdefault(place, []).append(problem)
    print(
        f"{sum(map(len, chosen))} to time, {len(users)} configs, {time.monotonic() - begun:.0f} s", flush=True
    )
    with CompilePool() as pool:
        order = sorted(users, key=lambda place: -len(users[place]))
        futures = {p: pool.submit(compile_config, configs[p], users[p], device) for p in order}
        for place, future in futures.items():
            error = future.exception()
            if error is not None or future.result()[0]:
                print(configs[place], error or future.result(), flush=True)
    print(f"compiled: {time.monotonic() - begun:.0f} s", flush=True)
    operands, dice = Operands(), random.Random(asked.seed)
    since = time.monotonic()
    with asked.out.open("w") as file:
        file.write(json.dumps({"device": device.to_dict(), "configs": [c.to_dict() for c in configs]}) + "\n")
        done = 0
        for problem, places in zip(problems, chosen, strict=True):
            if time.monotonic() - since > asked.seconds:
                break
            order, best, us = dice.sample(places, len(places)), float("inf"), {}
            for place in order:
                try:
                    us[place] = round(timed(operands, problem, configs[place], best), 3)
                except Exception as error:
                    print(problem.label, configs[place], str(error)[:200], flush=True)
                    continue
                best = min(best, us[place])
            layout = problem.b_layout
            sizes_of = [problem.m, problem.n, problem.k]
            file.write(json.dumps({"mnk": sizes_of, "b": layout, "us": us}) + "\n")
            file.flush()
            done += 1
    print(f"{done} of {len(problems)} sizes: {time.monotonic() - since:.0f} s of measuring", flush=True)


if __name__ == "__main__":
    main()
