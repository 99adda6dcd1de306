"""tritile bench: time tritile and torch at some sizes."""

from typing import Annotated

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console, progress, say
from tritile.errors import brief


@app.command(
    epilog=shared.examples(
        "tritile bench 4096x4096x4096 1000x1001x1002 --dtype float16",
        "tritile bench 8192x8190 --op transpose",
    )
)
def bench(
    context: typer.Context,
    shapes: Annotated[
        list[str],
        typer.Argument(
            help="MxNxK or BxMxNxK, like 4096x4096x4096; MxN with --op transpose. A single shape may have "
            "spaces for x."
        ),
    ],
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    as_json: shared.Json = False,
) -> None:
    """Time tritile and torch side by side, with the configs that calls would use."""
    shared.refuse_unread(context, op, layout, shapes)

    import torch

    from tritile.choose import gpu_tables
    from tritile.lab.bench import measured
    from tritile.lab.environment import environment

    cases = shared.as_called(shared.cases_of(shapes, None, op, dtype, layout))
    gpu = shared.gpu_here()
    env = environment(gpu)
    gpu_tables.pinned(gpu)  # a TRITILE_TABLE that cannot be read ends it before anything is measured
    found, failed = [], 0
    with progress() as bar:
        for case in bar.track(cases, description="measuring"):
            try:
                found.append(measured(case, log=say))
            except Exception as error:  # a problem that raises, in torch too, costs itself alone
                failed += 1
                say(f"{case.problem.label}: {brief(error)}")
            torch.cuda.empty_cache()  # torch does not give one case's graph memory to another
    if as_json:
        shared.print_json([one.to_dict() | {"env": env} for one in found])
    else:
        console.print(*found, sep="\n")
    if failed:
        raise typer.Exit(1)
