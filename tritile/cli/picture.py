"""tritile picture: draw how a kernel cuts a problem into tiles."""

from pathlib import Path
from typing import Annotated

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console


@app.command(
    epilog=shared.examples(
        "tritile picture 300x200x150 --output tiling.svg",
        'tritile picture 300x200x150 --dtype float32 --config "tile BLOCK_M=64 BLOCK_N=64" --tile 19 '
        "--step 5",
    )
)
def picture(
    context: typer.Context,
    sizes: shared.Shape,
    op: shared.SingleOp = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    config: shared.ConfigText = "",
    target: shared.Target = None,
    output: Annotated[Path, typer.Option(help="What to write (.svg).")] = Path("tiling.svg"),
    tile: Annotated[
        int | None, typer.Option(help="Which tile, counted from 0 in the order in which programs take them.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which K iteration, counted from 1.")] = None,
) -> None:
    """Draw one step of a kernel's tiling: the blocks that a tile loads, and the tiles made before.

    Drawing needs no GPU: without a --target it is for an h200.
    """
    shared.refuse_unread(context, op, layout, sizes)
    shared.check_output(output, ".svg")

    from tritile.core.permutation import PermuteProblem
    from tritile.core.problem import MatmulProblem
    from tritile.lab.explain import config_like
    from tritile.lab.picture import DRAWN
    from tritile.lab.picture import picture as draw
    from tritile.planning import model, plans
    from tritile.tune import suites

    device = shared.device_of("h200" if target is None else target)
    problem = suites.parse_shape(shared.joined(sizes), op, dtype, layout).problem
    assert isinstance(problem, MatmulProblem | PermuteProblem)
    with shared.working("drawing"):
        if config:
            chosen = config_like(config, problem, device)
        else:  # a call's; where that has no tiles to draw, the next one
            plan = plans.plan_for(problem, device, "cached")
            assert plan is not None
            ranked = (plan.config, *model.ranked(problem, device))
            chosen = next(each for each in ranked if each.family in DRAWN)
        shared.write(output, draw(problem, chosen, device, tile, step))
    console.print(f"{output}: {problem.label} on {device.name} by {chosen}")
