"""tritile explain: what a problem costs, what bounds it, and how other configs compare."""

import tritile
from tritile.cli import shared
from tritile.cli.shared import app, console
from tritile.families import numerics
from tritile.tune import suites


@app.command()
def explain(
    sizes: shared.Shape,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    config: shared.ConfigText = "",
    target: shared.Target = None,
    as_json: shared.Json = False,
) -> None:
    """Explain a problem's bytes, roofline, tiles, waves and kernel resources, and what bounds its time.

    The kernel is compiled for the GPU that is here, or for a --target; nothing is launched.
    """
    shape = suites.parse_shape(shared.joined(sizes), op, dtype, layout)
    device = shared.device_of(target)
    problem = numerics.unnamed(shape.problem, device)
    with shared.working("compiling"):
        found = tritile.explain(problem, device=device, config=config or None)
    if as_json:
        shared.print_json(found.to_dict())
    else:
        console.print(str(found))
