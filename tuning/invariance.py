"""Time batch-invariant mode beside the default and torch, over numbers of rows.

    python tuning/invariance.py    # prints and appends lines to results/<gpu>/invariance.jsonl

Products of bf16 by a weight (N, K), and by one packed to 4 bits, timed as `tritile bench` does, with the
configs that calls would use now. Kernels are compiled first, in parallel; with that it takes a minute on an
H200. torch multiplies by the plain weight.

A line has `op` ("invariance"), `weight`, `m`, `n`, `k`, the times `invariant_us`, `default_us` and `torch_us`
(medians of `samples` times, each the mean over `launches` launches), the spread of each side's times, `cost`
(the mode's time by the default's), both configs, and `env` as in other results. A line with `probe` has no
times: it tells whether one way of summing gave the bits of the mode.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritile.core import device
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, QuantizedProblem
from tritile.lab.report import baselines, torch_ways
from tritile.lab.report.environment import environment
from tritile.planning import plans
from tritile.runtime import launch
from tritile.tune.measure import timing
from tritile.tune.measure.pool import CompilePool
from tritile.tune.subject import answers, operands, torch_calls
from tritile.tune.subject.problem import ProblemSubject

HERE = Path(__file__).parent
OP = "invariance"
ROWS = (1, 2, 3, 4, 8, 16, 17, 32, 64, 65, 128, 129, 256, 257, 512, 1000, 1024, 2048, 4096)
WEIGHTS = (("bfloat16", 4096, 4096), ("bfloat16", 14336, 4096), ("int4", 4096, 4096))
GROUP_SIZE = 128
Row = dict[str, Any]
Known = MatmulProblem | QuantizedProblem


def problem_of(weight: str, m: int, n: int, k: int, invariant: bool) -> Known:
    """Return the problem that `tritile.linear` poses for m contiguous rows and a weight (n, k)."""
    if weight == "int4":
        return QuantizedProblem(m, n, k, "bfloat16", 4, GROUP_SIZE, invariant=invariant)
    dtypes = ("bfloat16", "bfloat16")
    return MatmulProblem(1, m, n, k, *dtypes, b_layout="column", invariant=invariant)


def config_of(problem: Known, gpu: Device) -> Config:
    """Return the config that a call would use."""
    chosen = plans.plan_for(problem, gpu, "cached")
    assert chosen is not None
    return chosen.config


def compile_all(gpu: Device) -> None:
    """Fill Triton's cache with what will be timed. A kernel that does not compile fails when it is called."""
    pairs = {}
    for weight, n, k in WEIGHTS:
        for m in ROWS:
            for invariant in (False, True):
                problem = problem_of(weight, m, n, k, invariant)
                pairs[problem, config_of(problem, gpu)] = None
    with CompilePool() as pool:
        for future in [pool.submit(ProblemSubject(pair[0], gpu).compile, pair[1]) for pair in pairs]:
            future.exception()


def row_of(weight: str, m: int, n: int, k: int, gpu: Device) -> Row:
    """Return the line of a number of rows, without `env`. Raises TuningError for a wrong answer."""
    calls = operands.copies_of(problem_of(weight, m, n, k, False), gpu)
    line: Row = {"op": OP, "weight": weight, "m": m, "n": n, "k": k}
    graphs = {}
    for side, invariant in (("invariant", True), ("default", False)):
        config = config_of(problem_of(weight, m, n, k, invariant), gpu)
        run = operands.run_of(launch.prepare(replace(calls[0], invariant=invariant), config))
        answers.check(run, calls[0])
        graphs[side], line[f"{side}_config"] = timing.Graph(run, calls), config.to_dict()
    plain = torch_ways.by_wide_weight if weight == "int4" else torch_calls.multiply
    graphs["torch"] = baselines.graph_of(plain, calls)
    samples = timing.interleaved(list(graphs.values()), budget_ms=50.0 * len(graphs))
    for side, times in zip(graphs, samples, strict=True):
        found = timing.timing_of(times)
        line |= {f"{side}_us": found.us, f"{side}_spread": found.spread}
    cost = line["invariant_us"] / line["default_us"]
    return line | {"cost": cost, "samples": len(samples[0]), "launches": len(calls)}


def line_of(row: Row) -> str:
    """Put a line into words."""
    times = "invariant {invariant_us:.1f} us, default {default_us:.1f}, torch {torch_us:.1f}; ".format(**row)
    config = Config.from_dict(row["invariant_config"])
    return "{weight} {n}x{k}, {m} rows: ".format(**row) + times + f"cost {row['cost']:.2f}, {config}"


def main() -> int:
    """Measure on the current GPU; the exit status is 1 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, help="the file that lines are appended to")
    given, gpu = parser.parse_args(), device.current_gpu()
    if gpu is None:
        print("there is no GPU here to measure", file=sys.stderr)
        return 1
    compile_all(gpu)
    env, lines = environment(gpu), []
    for weight, n, k in WEIGHTS:
        rows = [row_of(weight, m, n, k, gpu) | {"env": env} for m in ROWS]
        for row in rows:
            print(line_of(row))
        lines += rows
    path = given.results or HERE / "results" / gpu.slug / f"{OP}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
