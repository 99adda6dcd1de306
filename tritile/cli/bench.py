"""tritile bench: time tritile against its baselines."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from tritile.cli import shared
from tritile.cli.shared import app, console, number, print_table, progress, say
from tritile.errors import InvalidValueError

if TYPE_CHECKING:
    from tritile.lab.results import Result

# Of `lab.drawn`: the suite, how many products are of each half, permutations, and products that are searched.
DRAWN: Final = "unseen"
PRODUCTS, PERMUTATIONS, SEARCHED = 100, 100, 20

_SAME = ("suite", "dtype", "layout")  # columns that move to the title where all rows have one value


def _ratio(value: float | None) -> Text:
    """A ratio, red below 1, where tritile is behind."""
    return number(value, ".3f", bad=value is not None and value < 1)


def _rate(line: "Result") -> str:
    """The rate of a result; that of a permutation counts bytes read and written."""
    if line["op"] != "permute":
        return f"{line['tflops']:.1f} TFLOP/s"
    copy = line.get("copy_gbps")
    return f"{line['gbps']:.0f} GB/s" + (f" ({line['gbps'] / copy:.0%} of copy)" if copy else "")


def print_results(results: "Iterable[Result]", to: Console = console) -> None:
    """Print the last result of each case, one a row."""
    from tritile.lab.results import baselines_of, dtype_label, of_cases, sizes_label

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


def print_summary(results: "Iterable[Result]", to: Console = console, baseline: str = "torch") -> None:
    """Print counts, the ratio of summed times, geometric means and worst ratios against a baseline."""
    from tritile.lab.results import of_cases, summary

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


@app.command(
    epilog=shared.examples(
        "tritile bench 4096x4096x4096 1000x1001x1002 --dtype float16",
        "tritile bench --suite llm --suite ragged --output results",
        f"tritile bench --suite {DRAWN} --draw 2",
    )
)
def bench(
    context: typer.Context,
    shapes: shared.Shapes = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A suite ({', '.join(shared.SUITES)}) or a .toml file of one. May be repeated. {DRAWN}: "
            f"{2 * PRODUCTS} products, half of them of 20 us and more, and {PERMUTATIONS} permutations of "
            "sizes drawn by a hash of the code, timed with nothing remembered."
        ),
    ] = None,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    inductor: Annotated[
        bool,
        typer.Option(
            "--inductor",
            help="Time torch.compile's max-autotune too, which takes seconds for each product. In suite "
            f"{DRAWN} it is timed at {2 * SEARCHED} products.",
        ),
    ] = False,
    only: shared.Only = "",
    draw: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"With --suite {DRAWN}: which draw, counted from 1. May be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="A folder: results are appended to a .jsonl file for each suite.")
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Time tritile against torch and other baselines, side by side, with the configs that calls would use."""
    shared.refuse_unread(context, op, layout, shapes)
    shared.check_output(output, folder=True)
    named = [name for name in suite or [] if name != DRAWN]
    if draw and len(named) == len(suite or []):
        raise InvalidValueError(f"--draw is for --suite {DRAWN}: add that, or leave --draw away")

    from tritile.lab import bench as benchmark
    from tritile.lab import drawn
    from tritile.lab.environment import environment
    from tritile.lab.results import baselines_of
    from tritile.planning import gpu_tables

    draws = drawn.draws(draw or [1], only) if len(named) < len(suite or []) else []
    cases = [] if draws and not (named or shapes) else shared.cases_of(shapes, named, op, dtype, layout, only)
    plain = shared.as_called(cases)
    gpu, env = shared.gpu_here(), environment()
    gpu_tables.pinned(gpu)  # a TRITILE_TABLE that cannot be read ends it before anything is measured
    with progress() as bar:
        task = bar.add_task("measuring", total=len(plain) + sum(len(cases) for _, cases in draws))
        run = benchmark.Run(output, say, lambda label: bar.update(task, advance=1, description=label))
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
