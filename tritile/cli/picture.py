"""tritile picture: draw how a kernel cuts a problem into tiles."""

from pathlib import Path
from typing import Annotated, Final

import typer

from tritile.cli import shared
from tritile.cli.shared import app, check_output, console
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.gpus import target_device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError
from tritile.lab.explain import config_like
from tritile.planning import plans
from tritile.tune import suites

_OPS: Final = {"matmul": "matmul", "transpose": "permute", "permute": "permute"}
_NEEDS: Final = {".html": ("jinja2",), ".svg": ("jinja2",), ".png": ("jinja2", "vl_convert")}


def _config(text: str, problem: MatmulProblem | PermuteProblem, device: Device) -> Config:
    if text:
        return config_like(text, problem, device)
    plan = plans.plan_for(problem, device, "cached")
    assert plan is not None
    return plan.config


@app.command()
def picture(
    sizes: shared.Shape,
    op: Annotated[str, typer.Option(help="matmul or transpose.")] = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    config: shared.Wanted = "",
    target: shared.Target = None,
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
    network, and drawing needs no GPU: without a --target it is for an h200.
    """
    if op not in _OPS:
        raise InvalidValueError(f"op {op!r}: wanted one of {', '.join(_OPS)}")
    check_output(output, _NEEDS)
    device = target_device(target or "h200")
    problem = suites.parse_shape(shared.joined(sizes), _OPS[op], dtype, layout).problem
    assert isinstance(problem, MatmulProblem | PermuteProblem)
    with shared.working("drawing"):
        chosen = _config(config, problem, device)
        from tritile.lab.report import tiling

        if output.suffix == ".html":
            made: str | bytes = tiling.page(problem, chosen, device, tile, step)
        else:
            made = tiling.svg(problem, chosen, device, tile, step)
            made = tiling.png(made) if output.suffix == ".png" else made
    shared.write(output, made)
    console.print(f"{output}: {tiling.label(problem)} on {device.name} by {chosen}", soft_wrap=True)
