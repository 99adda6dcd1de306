"""tritile picture: how a kernel cuts a problem into tiles, to look at."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from tritile import plans
from tritile.cli.app import Dtype, Layout, app, console
from tritile.config import Config
from tritile.device import TARGETS, Device, target_device
from tritile.errors import InvalidValueError
from tritile.explain.wanted import config_like
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.tune import suites

_OPS: Final = {"matmul": "matmul", "transpose": "permute"}


def _page(*args: object) -> bytes:
    from tritile.report.tiling import page

    return page(*args).encode()  # type: ignore[arg-type]


def _svg(*args: object) -> bytes:
    from tritile.report.tiling import svg

    return svg(*args).encode()  # type: ignore[arg-type]


def _png(*args: object) -> bytes:
    from tritile.report.tiling import png, svg

    return png(svg(*args))  # type: ignore[arg-type]


_WRITERS: Final[dict[str, Callable[..., bytes]]] = {".html": _page, ".svg": _svg, ".png": _png}


def _config(text: str | None, problem: MatmulProblem | PermuteProblem, device: Device) -> Config:
    if text is not None:
        return config_like(text, problem, device)
    plan = plans.plan_for(problem, device, "cached")
    assert plan is not None
    return plan.config


def _checked(output: Path, op: str) -> None:
    if op not in _OPS:
        raise InvalidValueError(f"op {op!r}: wanted one of {', '.join(_OPS)}")
    if output.suffix not in _WRITERS:
        raise InvalidValueError(f"--output {output}: wanted a name that ends in {', '.join(_WRITERS)}")
    if not output.parent.is_dir():
        raise InvalidValueError(f"--output {output}: there is no folder {output.parent}; make it first")


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

    A page plays by itself, unless a tile or a step is named, and is stepped through by buttons or keys. It needs
    no network and no GPU.
    """
    _checked(output, op)
    device = target_device(target)
    problem = suites.parse_shape(shape, _OPS[op], dtype, layout).problem
    assert isinstance(problem, MatmulProblem | PermuteProblem)
    chosen = _config(config, problem, device)
    output.write_bytes(_WRITERS[output.suffix](problem, chosen, device, tile, step))
    console.print(f"{output}: {problem.label} on {device.name} by {chosen}", highlight=False, soft_wrap=True)
