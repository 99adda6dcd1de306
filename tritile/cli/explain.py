"""tritile explain: what a problem costs, what bounds it, and how other configs compare."""

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console


@app.command(
    epilog=shared.examples(
        "tritile explain 4096x4096x4096",
        "tritile explain 8192x8192 --op transpose --dtype float16 --target h200",
        'tritile explain 8192 8192 8192 --config "tile BLOCK_M=64" --target b200',
    )
)
def explain(
    context: typer.Context,
    sizes: shared.Shape,
    op: shared.SingleOp = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    config: shared.ConfigText = "",
    target: shared.Target = None,
    as_json: shared.Json = False,
) -> None:
    """Explain a problem's bytes, roofline, tiles, waves and kernel resources, and what bounds its time.

    The kernel is compiled for the --target, else for the GPU here, else for an H200; nothing is launched.
    """
    shared.refuse_unread(context, op, layout, sizes)

    import tritile
    from tritile.families import numerics
    from tritile.tune import suites

    shape = suites.parse_shape(shared.joined(sizes), op, dtype, layout)
    device = shared.device_of(target, otherwise="h200")
    problem = numerics.with_default_precision(shape.problem)
    with shared.working("compiling"):
        found = tritile.explain(problem, device=device, config=config or None)
    if as_json:
        shared.print_json(found.to_dict())
    else:
        console.print(str(found))
