"""Time batch-invariant mode beside the default and torch, over numbers of rows.

    python tuning/invariance.py    # prints tables, appends lines to results/<gpu>/invariance.jsonl

Products of bf16 by a weight (N, K), and by the same packed to 4 bits, on cold operands, with the configs that
calls would use now. Kernels are compiled first, in parallel; with that it takes under a minute on an H200.
torch multiplies by the plain weight.

A line has `op` ("invariance"), `weight`, `m`, `n`, `k`, the times `invariant_us`, `default_us` and `torch_us`
(medians), `cost` (the mode's time by the default's), both configs, and `env` as in other results. A line with
`probe` has no times: it tells whether one way of summing gave the bits of the mode.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tritile
from tritile.core import device
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, QuantizedProblem
from tritile.lab.report.environment import environment
from tritile.planning import plans
from tritile.tune.measure.pool import CompilePool
from tritile.tune.subject.problem import ProblemSubject
from tritile.tune.timing import do_bench

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


def timed(call: Callable[[], object], invariant: bool) -> float:
    """Return the median microseconds of a call in the mode, or out of it."""
    with tritile.batch_invariant(invariant):
        return 1e3 * do_bench(call)[0]


def rows_of(weight: str, n: int, k: int, gpu: Device, env: dict[str, str]) -> Iterator[Row]:
    """Yield a line for each number of rows."""
    plain = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    own: Any = tritile.quantize(plain, bits=4, group_size=GROUP_SIZE) if weight == "int4" else plain
    whole = torch.randn(max(ROWS), k, device="cuda", dtype=torch.bfloat16)
    for m in ROWS:
        x = whole[:m]
        line: Row = {"op": OP, "weight": weight, "m": m, "n": n, "k": k}
        for side, invariant in (("invariant", True), ("default", False)):
            line[f"{side}_us"] = timed(lambda x=x: tritile.linear(x, own), invariant)
            config = config_of(problem_of(weight, m, n, k, invariant), gpu)
            line[f"{side}_config"] = config.to_dict()
        line["torch_us"] = timed(lambda x=x: torch.nn.functional.linear(x, plain), False)
        line["cost"] = line["invariant_us"] / line["default_us"]
        yield line | {"env": env}


def table_of(rows: list[Row]) -> Table:
    """Return the lines of one weight as a table."""
    first = rows[0]
    title = f"{first['weight']} weight of {first['n']} x {first['k']}, microseconds"
    table = Table("rows", title=title, title_justify="left")
    for name in ("invariant", "default", "torch", "cost", "torch / invariant"):
        table.add_column(name, justify="right")
    table.add_column("config of the mode")
    for row in rows:
        times = [row[f"{side}_us"] for side in ("invariant", "default", "torch")]
        numbers = [f"{us:.1f}" for us in times] + [f"{row['cost']:.2f}", f"{times[2] / times[0]:.2f}"]
        table.add_row(str(row["m"]), *numbers, str(Config.from_dict(row["invariant_config"])))
    return table


def main() -> int:
    """Measure on the current GPU; the exit status is 1 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, help="the file that lines are appended to")
    given, gpu, console = parser.parse_args(), device.current_gpu(), Console(width=150)
    if gpu is None:
        print("there is no GPU here to measure", file=sys.stderr)
        return 1
    compile_all(gpu)
    env, lines = environment(gpu), []
    for weight, n, k in WEIGHTS:
        rows = list(rows_of(weight, n, k, gpu, env))
        console.print(table_of(rows))
        lines += rows
    path = given.results or HERE / "results" / gpu.slug / f"{OP}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
