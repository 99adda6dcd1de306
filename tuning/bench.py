"""Time suites, and sizes that nobody chose, against torch and other baselines.

Each case is timed as `tritile bench` times given sizes, with the config that a call would use.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))

import command
import unseen
from benchmark_results import (
    HOST,
    Result,
    append,
    baselines_of,
    dtype_label,
    host_result,
    of_cases,
    result,
    sizes_label,
    summary,
)
from tritile.choose import gpu_tables
from tritile.cli import shared
from tritile.cli.shared import console, number, print_table, progress, say
from tritile.core import torch_private
from tritile.core.call import Call, GroupedCall, MatmulCall, PermuteCall, QuantizedCall
from tritile.core.device import Device
from tritile.errors import InvalidValueError, brief
from tritile.lab import baselines
from tritile.lab.bench import Baselines, Log, measured
from tritile.lab.environment import environment
from tritile.ops.fused import addmm, baddbmm, linear
from tritile.ops.matmul import matmul
from tritile.ops.permute import permute, transpose
from tritile.ops.scaled import scaled_matmul
from tritile.tune.subject import answers
from tritile.tune.suites import Case

Act = Callable[[], object]
SEARCHING: Final = "max-autotune-no-cudagraphs"  # every side is captured in a graph by the measurement
_SAME: Final = ("suite", "dtype", "layout")  # columns that move to the title where all rows have one value


def in_general(call: Call) -> baselines.Functional:
    """Return a product or permutation as one function, which torch.compile takes."""
    if isinstance(call, PermuteCall):
        contiguous = torch.contiguous_format
        return baselines.Functional(
            lambda c: {"x": answers.permuted(c)[0]}, lambda x: x.clone(memory_format=contiguous)
        )
    if isinstance(call, GroupedCall):
        return baselines.grouped(call)
    assert isinstance(call, MatmulCall)
    return baselines.eager(call) if call.up is None else baselines.merged(call)


def by_inductor(call: Call) -> Baselines:
    """Return a call by torch.compile in its max-autotune mode: products by kernels of cuBLAS and Triton.

    torch makes no CUDA graph of its own. The operands are those of torch's eager side. A gated product has
    both weights in one. Products with packed weights are not taken.
    """
    if isinstance(call, QuantizedCall):
        return {}
    from torch._inductor import select_algorithm  # the compiler takes long to import

    select_algorithm.PRINT_AUTOTUNE = False  # of the candidates of max-autotune
    return {"inductor": baselines.compiled(in_general(call), mode=SEARCHING)}


def _host_calls() -> list[tuple[str, Act, Act]]:
    """Return small calls, whose results are new tensors or go to one: the name, tritile's and torch's."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    a, b, out = (torch.randn(256, 256, **options) for _ in range(3))
    bias, batch = torch.randn(256, **options), torch.randn(4, 256, 256, **options)
    dims, into = (2, 0, 1), torch.empty_like(batch.permute(2, 0, 1)).contiguous()
    found: list[tuple[str, Act, Act]] = [
        ("matmul(a, b)", lambda: matmul(a, b), lambda: torch.matmul(a, b)),
        ("linear(x, w, bias)", lambda: linear(a, b, bias), lambda: F.linear(a, b, bias)),
        ("addmm(c, a, b)", lambda: addmm(bias, a, b), lambda: torch.addmm(bias, a, b)),
        ("baddbmm(c, a, b)", lambda: baddbmm(batch, batch, batch),
         lambda: torch.baddbmm(batch, batch, batch)),
        ("matmul(a, b, out=)", lambda: matmul(a, b, out=out), lambda: torch.matmul(a, b, out=out)),
        ("addmm(c, a, b, out=)", lambda: addmm(bias, a, b, out=out),
         lambda: torch.addmm(bias, a, b, out=out)),
        ("linear(x, w, bias, out=)", lambda: linear(a, b, bias, out=out),
         lambda: torch.addmm(bias, a, b.t(), out=out)),
        ("transpose(x)", lambda: transpose(a), lambda: a.mT.contiguous()),
        ("transpose(x, out=)", lambda: transpose(a, out=out), lambda: out.copy_(a.mT)),
        ("permute(x, dims)", lambda: permute(batch, dims), lambda: batch.permute(dims).contiguous()),
        ("permute(x, dims, out=)", lambda: permute(batch, dims, out=into),
         lambda: into.copy_(batch.permute(dims))),
    ]  # fmt: skip
    if torch.cuda.get_device_capability() >= (8, 9):
        x, one = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda", dtype=torch.float32)
        by_torch = partial(torch_private.scaled_mm, x, x.t(), one, one, out_dtype=torch.bfloat16)
        found.append(("scaled_matmul(a, b, s, s)", partial(scaled_matmul, x, x.t(), one, one), by_torch))
    return found


def host_us(*calls: Act, batches: int = 200, size: int = 20) -> list[float]:
    """Return the microseconds that each call keeps the host busy: medians of batches, by turns.

    The GPU is waited for before each batch, so that no launch waits for room in the queue.
    """
    for call in calls:
        for _ in range(20):
            call()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(batches):
        for call, times in zip(calls, found, strict=True):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(size):
                call()
            times.append((time.perf_counter() - started) / size * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(times) for times in found]


@dataclass
class Run:
    """A benchmark: its results, and how many cases failed.

    Each result is appended at once to its suite's file in `folder`, if given. `log` gets what went wrong,
    `done` the name of each finished case.
    """

    folder: Path | None
    log: Log
    done: Log
    lines: list[Result] = field(default_factory=list)
    failed: int = 0

    def cases(self, cases: Iterable[Case], env: Mapping[str, str], inductor: bool = False) -> None:
        """Measure every case. Raises OSError if a file cannot be written."""
        for case in cases:
            try:
                self.lines.append(
                    result(case, measured(case, by_inductor if inductor else None, self.log), env)
                )
                if self.folder is not None:
                    append(self.folder / f"{case.suite}.jsonl", self.lines[-1:])
            except OSError:
                raise
            except Exception as error:  # a case that raises, in torch too, costs itself alone
                self.failed += 1
                self.log(f"{case.problem.label}: {brief(error)}")
            torch.cuda.empty_cache()  # torch does not give one case's graph memory to another
            self.done(case.problem.label)

    def drawn(self, cases: Sequence[Case], device: Device, env: Mapping[str, str], inductor: bool) -> None:
        """Measure drawn cases with nothing remembered and every kernel compiled before.

        With `inductor`, some products are compared with torch.compile's max-autotune.
        """
        first = unseen.searched(cases) if inductor else []
        with unseen.nothing_remembered():
            unseen.compile_all(cases, device)
            self.cases(first, env, True)
            self.cases([case for case in cases if case not in first], env, False)

    def host(self, env: Mapping[str, str]) -> list[Result]:
        """Time how long small calls keep the host busy."""
        lines = []
        for name, *sides in _host_calls():
            ours, theirs = host_us(*sides)
            lines.append(host_result(name, ours, theirs, env))
        if self.folder is not None:
            append(self.folder / f"{HOST}.jsonl", lines)
        return lines


def _ratio(value: float | None) -> Text:
    """A ratio, red below 1, where tritile is behind."""
    return number(value, ".3f", bad=value is not None and value < 1)


def _rate(line: Result) -> str:
    """The rate of a result; that of a permutation counts bytes read and written."""
    if line["op"] != "permute":
        return f"{line['tflops']:.1f} TFLOP/s"
    copy = line.get("copy_gbps")
    return f"{line['gbps']:.0f} GB/s" + (f" ({line['gbps'] / copy:.0%} of copy)" if copy else "")


def print_results(results: Iterable[Result], to: Console = console) -> None:
    """Print the last result of each case, one a row."""
    lines = of_cases(results)
    if not lines:
        return to.print("no results")
    ratios = ("torch", *baselines_of(lines))
    rows: list[dict[str, str | Text]] = [
        {"problem": sizes_label(line), "suite": line["suite"], "layout": line["layout"] or ""}
        | {"dtype": dtype_label(line), "us": number(line["tritile_us"], ".2f")}
        | {"torch us": number(line["torch_us"], ".2f")}
        | {f"x {name}": _ratio(line.get(f"ratio_{name}")) for name in ratios}
        | {"rate": _rate(line)}
        for line in lines
    ]
    print_table(rows, shared.measured_on(lines), _SAME, to=to)


def print_summary(results: Iterable[Result], to: Console = console, baseline: str = "torch") -> None:
    """Print counts, the ratio of summed times, geometric means and worst ratios against a baseline."""
    lines = list(results)
    rows: list[dict[str, str | Text]] = [
        {"suite": row.suite, "dtype": row.dtype, "layout": row.layout}
        | {"cases": number(row.count), "by time": _ratio(row.by_time), "mean": _ratio(row.geomean)}
        | {"under 1": number(row.behind)}
        | {"worst": _ratio(row.worst), "at": row.worst_label}
        for row in summary(lines, baseline)
    ]
    if not rows:
        return to.print("no results")
    print_table(rows, f"{shared.measured_on(of_cases(lines))}, against {baseline}", _SAME, to=to)


def main(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A suite ({', '.join(shared.SUITES)}) or a .toml file of one. May be repeated. "
            f"{unseen.SUITE}: {2 * unseen.PRODUCTS} products, half of them of 20 us and more, and "
            f"{unseen.PERMUTATIONS} permutations of sizes drawn by a hash of the code, timed with nothing "
            "remembered."
        ),
    ] = None,
    inductor: Annotated[
        bool,
        typer.Option(
            "--inductor",
            help="Time torch.compile's max-autotune too, which takes seconds for each product. In suite "
            f"{unseen.SUITE} it is timed at {4 * unseen.SEARCHED} products.",
        ),
    ] = False,
    only: shared.Only = "",
    draw: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"With --suite {unseen.SUITE}: which draw, from 1. May be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder: results are appended to a .jsonl file for each suite.")
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Time suites against torch and other baselines, side by side, with the configs that calls would use."""
    shared.check_output(output, folder=True)
    suites = suite or ["quick"]
    named = [name for name in suites if name != unseen.SUITE]
    is_drawn = len(named) < len(suites)
    if draw and not is_drawn:
        raise InvalidValueError(f"--draw is for --suite {unseen.SUITE}: add that, or leave --draw away")
    draws = unseen.draws(draw or [1], only) if is_drawn else []
    cases = shared.cases_of(None, named, "matmul", "bfloat16", "NN", only) if named else []
    plain = shared.as_called(cases)
    gpu, env = shared.gpu_here(), environment()
    gpu_tables.pinned(gpu)  # a TRITILE_TABLE that cannot be read ends it before anything is measured
    with progress() as bar:
        task = bar.add_task("measuring", total=len(plain) + sum(len(cases) for _, cases in draws))
        run = Run(output, say, lambda label: bar.update(task, advance=1, description=label))
        run.cases(plain, env, inductor)
        for how, cases in draws:
            run.drawn(cases, gpu, env | how, inductor)
    with shared.working("timing the host"):
        host = run.host(environment())
    if as_json:
        shared.print_json([*run.lines, *host])
    else:
        print_results(run.lines)
        for baseline in ("torch", *baselines_of(run.lines)):
            print_summary(run.lines, baseline=baseline)
        costs = [
            {"host cost of": line["call"]}
            | {f"{side} us": number(line[f"{side}_us"], ".1f") for side in ("tritile", "torch")}
            for line in host
        ]
        if costs:
            print_table(costs)
    if run.failed:
        raise typer.Exit(1)


app = command.app_of(
    main,
    "python tuning/bench.py --suite llm --suite ragged --output results",
    f"python tuning/bench.py --suite {unseen.SUITE} --draw 2",
)

if __name__ == "__main__":
    command.run(app)
