"""tritile picture: draw how a kernel cuts a problem into tiles."""

from pathlib import Path
from typing import Annotated, Final

import typer

from tritile.cli.shared import Dtype, Layout, app, check_output, console
from tritile.core.config import Config
from tritile.core.device import TARGETS, Device, target_device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError
from tritile.lab.explain.wanted import config_like
from tritile.planning import plans
from tritile.tune import suites

_OPS: Final = {"matmul": "matmul", "transpose": "permute"}
_NEEDS: Final = {".html": ("jinja2",), ".svg": ("jinja2",), ".png": ("jinja2", "vl_convert")}


def _config(text: str | None, problem: MatmulProblem | PermuteProblem, device: Device) -> Config:
    if text is not None:
        return config_like(text, problem, device)
    plan = plans.plan_for(problem, device, "cached")
    assert plan is not None
    return plan.config


@app.command()
def picture(
    shape: Annotated[str, typer.Argument(help="MxNxK or BxMxNxK; of a transpose MxN or BxMxN.")],
    op: Annotated[str, typer.Option(help="matmul or transpose.")] = "matmul",
    dtype: Dtype = "bfloat16",
    layout: Layout = "NN",
    config: Annotated[
        str | None,
        typer.Option(
            help='Some of its parameters, as "tile BLOCK_M=64". Default: what a call would run with.'
        ),
    ] = None,
    target: Annotated[str, typer.Option(help=f"The GPU: {', '.join(TARGETS)}.")] = next(iter(TARGETS)),
    output: Annotated[
        Path, typer.Option(help="A page to step through (.html), or one step (.svg, .png).")
    ] = Path("tiling.html"),
    tile: Annotated[
        int | None, typer.Option(help="Which tile to show, from 0, as programs take them.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which of its steps, from 1.")] = None,
) -> None:
    """Draw how a kernel cuts a problem into tiles: which program loads which blocks, at which step.

    A page plays by itself unless a tile or a step is named; buttons and keys step through it. It needs no
    network, and drawing needs no GPU.
    """
    if op not in _OPS:
        raise InvalidValueError(f"op {op!r}: wanted one of {', '.join(_OPS)}")
    check_output(output, _NEEDS)
    device = target_device(target)
    problem = suites.parse_shape(shape, _OPS[op], dtype, layout).problem
    assert isinstance(problem, MatmulProblem | PermuteProblem)
    chosen = _config(config, problem, device)
    from tritile.lab.report import tiling

    if output.suffix == ".html":
        made = tiling.page(problem, chosen, device, tile, step).encode()
    else:
        drawn = tiling.svg(problem, chosen, device, tile, step)
        made = tiling.png(drawn) if output.suffix == ".png" else drawn.encode()
    output.write_bytes(made)
    console.print(f"{output}: {problem.label} on {device.name} by {chosen}", highlight=False, soft_wrap=True)
