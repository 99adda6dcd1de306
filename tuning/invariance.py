"""What batch-invariant mode costs: its time beside the default's and torch's, over numbers of rows.

    python tuning/invariance.py            # prints tables, appends lines to results/<gpu>/invariance.jsonl
    python tuning/invariance.py --probe    # and tells which ways of summing give the same bits here

Products of bf16 by a weight (N, K), and by the same packed to 4 bits, on cold operands, with the configs that
calls would use now. Kernels are compiled first, in parallel; with that it takes under a minute on an H200.
torch multiplies by the plain weight.

A line has `op` ("invariance"), `weight`, `m`, `n`, `k`, the times `invariant_us`, `default_us` and `torch_us`
(medians), `cost` (the mode's time by the default's), both configs, and `env` as in other results. That of a
probe has `probe` (the way of summing), `config` and `equal`: whether it gives the bits of the mode.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from tritile.core.views import Call
from tritile.errors import TuningError
from tritile.families.common.numerics import Numerics
from tritile.families.numerics import canonical, numerics
from tritile.lab.report.environment import environment
from tritile.ops import linear
from tritile.ops.described import described
from tritile.planning import model, plans
from tritile.runtime import launch
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
    """The problem that `tritile.linear` poses of m contiguous rows and a weight (n, k)."""
    if weight == "int4":
        return QuantizedProblem(m, n, k, "bfloat16", 4, GROUP_SIZE, invariant=invariant)
    dtypes = ("bfloat16", "bfloat16")
    return MatmulProblem(1, m, n, k, *dtypes, b_layout="column", invariant=invariant)


def config_of(problem: Known, gpu: Device) -> Config:
    """The config that a call would use."""
    chosen = plans.plan_for(problem, gpu, "cached")
    assert chosen is not None
    return chosen.config


def compile_all(gpu: Device) -> None:
    """Fill Triton's cache with what will be timed. What does not compile here fails where it is called."""
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
    """Median microseconds of a call in the mode, or out of it."""
    with tritile.batch_invariant(invariant):
        return 1e3 * do_bench(call)[0]


def rows_of(weight: str, n: int, k: int, gpu: Device, env: dict[str, str]) -> Iterator[Row]:
    """A line for each number of rows."""
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
    """The lines of one weight as a table."""
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


def probed() -> Iterator[tuple[str, Call]]:
    """Calls of which several ways of summing are known, by name."""
    m, n, k = 512, 1024, 4096
    x, w = (torch.randn(size, k, device="cuda") for size in (m, n))
    for name, dtype, precision in (
        ("bfloat16", torch.bfloat16, "ieee"),
        ("tf32", torch.float32, "tf32"),
        ("fp8", torch.float8_e4m3fn, "ieee"),
    ):
        out_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        out = torch.empty(m, n, device="cuda", dtype=out_dtype)
        yield name, described(x.to(dtype), w.to(dtype).t(), out, precision)
    half = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    weight = tritile.quantize(w.bfloat16(), bits=4, group_size=GROUP_SIZE)
    yield "int4", linear.described(x.bfloat16(), weight, None, half)


def bits_of(call: Call, config: Config) -> torch.Tensor | None:
    """The result's bits by a config, None where it does not run."""
    try:
        launch.prepare(call, config)(*call.tensors)
    except TuningError:
        return None
    return call.target.view(torch.int16 if call.target.element_size() == 2 else torch.int32).clone()


def probes(gpu: Device, env: dict[str, str]) -> Iterator[Row]:
    """Whether each way of summing, K being in one part, gives the bits of the canonical one."""
    for name, call in probed():
        problem: Any = replace(call.problem, invariant=False)
        first: dict[Numerics, Config] = {}
        for config in model.ranked(problem, gpu):
            how = numerics(config, problem, gpu)
            if how.parts == 1:
                first.setdefault(how, config)
        bits = {how: made for how, config in first.items() if (made := bits_of(call, config)) is not None}
        wanted = bits[canonical(problem, gpu)]
        for how, made in bits.items():
            line: Row = {"op": OP, "weight": name, "probe": how._asdict(), "config": first[how].to_dict()}
            yield line | {"equal": torch.equal(made, wanted), "env": env}


def main() -> int:
    """Measure on the GPU that is here; the exit status is 1 where there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, help="the file that lines are appended to")
    parser.add_argument("--probe", action="store_true", help="compare ways of summing, too")
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
    for line in probes(gpu, env) if given.probe else ():
        console.print(f"{line['weight']}: {'equal' if line['equal'] else 'OTHER'} bits by {line['probe']}")
        lines.append(line)
    path = given.results or HERE / "results" / gpu.slug / f"{OP}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
