"""tritile explain: what a problem costs, what bounds it, and why other configs lose."""

from typing import Annotated

import typer
from rich.table import Table as RichTable

import tritile
from tritile.cli.app import Dtype, Layout, Op, Target, app, console
from tritile.core import device as devices
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError
from tritile.lab.explain import Explanation
from tritile.lab.explain.telling import rows
from tritile.tune import suites

Sizes = Annotated[list[str], typer.Argument(help="M N K, or rows and columns, apart or as 4096x4096x4096.")]
Wanted = Annotated[
    str, typer.Option("--config", help='Parameters it has, as "tile BLOCK_M=64". Default: what a call runs.')
]


def problem_of(sizes: list[str], op: str, dtype: str, layout: str) -> Tiled:
    """The problem of sizes given apart or joined by x; op "transpose" is a permute."""
    op = "permute" if op == "transpose" else op
    return suites.parse_shape("x".join(sizes), op, dtype, layout).problem


def device_of(target: str | None) -> devices.Device:
    """The GPU that is named, else the one that is here. Raises InvalidValueError where there is none."""
    here = devices.target_device(target) if target else devices.current_gpu()
    if here is None:
        names = ", ".join(devices.TARGETS)
        raise InvalidValueError(f"there is no GPU here: name one with --target, of {names}")
    return here


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
    """Bytes with and without tiling, roofline, tiles and waves, what the kernel takes, and what bounds it.

    The kernel is really compiled, for the GPU that is here or for a --target. On a GPU it is measured too,
    and the next best configs beside it.
    """
    problem = problem_of(sizes, op, dtype, layout)
    show(tritile.explain(problem, device=device_of(target), config=config or None))
