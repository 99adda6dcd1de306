"""tritile explain: explain what a problem costs, what bounds it, and why other configs are slower."""

from typing import Annotated

import typer
from rich.table import Table as RichTable

import tritile
from tritile.cli.shared import Dtype, Layout, Op, Target, app, console, device_of
from tritile.core.problem import Tiled
from tritile.families import numerics
from tritile.lab.explain import Explanation
from tritile.lab.explain.texts import rows
from tritile.tune import suites

Sizes = Annotated[list[str], typer.Argument(help="M N K, or rows and columns, apart or as 4096x4096x4096.")]
Wanted = Annotated[
    str,
    typer.Option("--config", help='Some of its parameters, as "tile BLOCK_M=64". Default: what a call runs.'),
]


def problem_of(sizes: list[str], op: str, dtype: str, layout: str) -> Tiled:
    """Return the problem of sizes given apart or joined by x; op "transpose" is a permute."""
    op = "permute" if op == "transpose" else op
    return suites.parse_shape("x".join(sizes), op, dtype, layout).problem


def show(found: Explanation) -> None:
    """Print an explanation."""
    title = f"{found.problem.label} on {found.device.name}\n{found.config} ({found.source})"
    grid = RichTable("", "", "", title=title, show_header=False, title_justify="left")
    for name, figure, note in rows(found):
        grid.add_row(name, figure, note)
    console.print(grid)
    others = RichTable("other configs", "predicted us", "measured us", "beside it")
    for other in found.others:
        measured = "" if other.measured_us is None else f"{other.measured_us:.1f}"
        others.add_row(str(other.config), f"{other.predicted_us:.1f}", measured, other.why)
    console.print(others)


@app.command()
def explain(
    sizes: Sizes,
    op: Op = "matmul",
    dtype: Dtype = "bfloat16",
    layout: Layout = "NN",
    config: Wanted = "",
    target: Target = None,
) -> None:
    """Explain a problem's bytes, roofline, tiles, waves and kernel resources, and what bounds its time.

    The kernel is compiled for the GPU that is here, or for a --target. On a GPU it is also measured, beside
    the next best configs.
    """
    problem = problem_of(sizes, op, dtype, layout)
    device = device_of(target)
    problem = numerics.unnamed(problem, device)
    show(tritile.explain(problem, device=device, config=config or None))
