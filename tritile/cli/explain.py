"""tritile explain: explain what a problem costs, what bounds it, and why other configs are slower."""

from typing import Annotated

import typer

import tritile
from tritile.cli.shared import Dtype, Layout, Op, Target, app, console, device_of
from tritile.families import numerics
from tritile.tune import suites

Sizes = Annotated[list[str], typer.Argument(help="M N K, or rows and columns, apart or as 4096x4096x4096.")]
Wanted = Annotated[
    str,
    typer.Option("--config", help='Some of its parameters, as "tile BLOCK_M=64". Default: what a call runs.'),
]


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
    shape = suites.parse_shape("x".join(sizes), "permute" if op == "transpose" else op, dtype, layout)
    device = device_of(target)
    problem = numerics.unnamed(shape.problem, device)
    found = tritile.explain(problem, device=device, config=config or None)
    console.print(str(found), highlight=False, soft_wrap=True)
