"""tritile plan: what calls would run on a GPU, and why."""

from dataclasses import replace
from typing import Annotated, Final

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console
from tritile.errors import InvalidValueError

PRECISIONS: Final = "ieee", "tf32", "fp16x3", "fast"


@app.command(
    epilog=shared.examples(
        "tritile plan 512x8191x4097 --layout NT --target h100",
        "tritile plan 4096x4096x4096 1x4096x4096 --dtype float16",
        "tritile plan 8192x8192 --op transpose --target h200 --json",
    )
)
def plan(
    shapes: shared.Shapes = None,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    precision: Annotated[
        str, typer.Option(help="Of matmul: tf32 or fp16x3 for float32, fast for fp8. Default: ieee.")
    ] = "",
    target: shared.Target = None,
    as_json: shared.Json = False,
) -> None:
    """Print what a call runs, tritile's kernel or torch's, where that comes from, and known times of both.

    It is for the --target, else for the GPU here, else for an H200. Nothing is compiled or launched.
    """
    import tritile

    device = shared.device_of(target, otherwise="h200")
    cases = shared.cases_of(shapes, None, op, dtype, layout)
    if precision:
        if op != "matmul":
            raise InvalidValueError("--precision is for --op matmul")
        if precision not in PRECISIONS:
            raise shared.unknown("--precision", precision, PRECISIONS)
        cases = [replace(case, precision=precision) for case in cases]
    problems = shared.problems_of(cases, device)
    plans = [tritile.plan(problem, device=device) for problem in problems]
    if not as_json:
        return console.print("\n\n".join(map(str, plans)), soft_wrap=True)
    listed = [
        {"problem": each.problem.label, "config": each.config.to_dict(), "source": each.source, "us": each.us}
        | {"other_us": each.other_us, "why": each.why, "workspace": each.workspace}
        | {"candidates": [{"us": us, "config": config.to_dict()} for us, config in each.candidates]}
        for each in plans
    ]
    shared.print_json({"gpu": device.name, "problems": listed})
