"""tritile bench: time calls of given sizes, tritile and torch side by side."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tritile.cli import shared
from tritile.cli.shared import app, number, print_table, progress, say
from tritile.errors import brief

if TYPE_CHECKING:
    from tritile.core.problem import Tiled
    from tritile.lab.bench import Measurement


def _row(problem: "Tiled", found: "Measurement") -> dict[str, str | Text]:
    """The row of a problem; the rate of a permutation counts bytes read and written."""
    from tritile.core.permutation import PermuteProblem

    us, torch_us = found.tritile_us, found.torch_us
    ratio = None if torch_us is None else torch_us / us
    if not isinstance(problem, PermuteProblem):
        rate = f"{problem.flops / us / 1e6:.1f} TFLOP/s"
    else:
        gbps = problem.bytes / us / 1e3
        rate = f"{gbps:.0f} GB/s" + (f" ({gbps / found.copy_gbps:.0%} of copy)" if found.copy_gbps else "")
    return {
        "problem": problem.label,
        "us": number(us, ".2f"),
        "torch us": number(torch_us, ".2f"),
        "x torch": number(ratio, ".3f", bad=ratio is not None and ratio < 1),
        "rate": rate,
    }


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

    from tritile.lab.bench import measured
    from tritile.lab.environment import environment
    from tritile.planning import gpu_tables

    cases = shared.as_called(shared.cases_of(shapes, None, op, dtype, layout))
    problems = list(dict.fromkeys(case.problem for case in cases))
    gpu = shared.gpu_here()
    env = environment(gpu)
    gpu_tables.pinned(gpu)  # a TRITILE_TABLE that cannot be read ends it before anything is measured
    found = {}
    with progress() as bar:
        for problem in bar.track(problems, description="measuring"):
            try:
                found[problem] = measured(problem, log=say)
            except Exception as error:  # a problem that raises, in torch too, costs itself alone
                say(f"{problem.label}: {brief(error)}")
    if as_json:
        shared.print_json([{"problem": each.label, **vars(one), "env": env} for each, one in found.items()])
    elif found:
        rows = [_row(problem, one) for problem, one in found.items()]
        print_table(rows, shared.measured_on([{"env": env}]))
    if len(found) < len(problems):
        raise typer.Exit(1)
