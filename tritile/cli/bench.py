"""tritile bench: time tritile beside its baselines."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tritile.cli import shared
from tritile.cli.shared import app, console, progress, say
from tritile.core import device as devices
from tritile.errors import FileError, InvalidValueError
from tritile.lab.report import bench as benchmark
from tritile.lab.report import console as printing
from tritile.lab.report import drawn
from tritile.lab.report.environment import environment
from tritile.lab.report.results import stored
from tritile.tune.suites import Case


class Baseline(StrEnum):
    """Name what may be timed besides torch."""

    INDUCTOR = "inductor"


Suite = Annotated[
    list[str] | None,
    typer.Option(
        help=f"A suite by name; may be repeated. {drawn.SUITE}: {drawn.PRODUCTS} products and "
        f"{drawn.PERMUTATIONS} permutations of sizes drawn by a hash of the code, with nothing remembered."
    ),
]
Peer = Annotated[
    list[Baseline] | None, typer.Option(help="A baseline besides torch. Takes seconds a product.")
]
Draw = Annotated[
    list[int] | None,
    typer.Option(min=1, help=f"Of suite {drawn.SUITE}: which draw, counted from 1; may be repeated."),
]
Searched = Annotated[
    int,
    typer.Option(
        min=0,
        help=f"Of suite {drawn.SUITE}: how many aligned products of a draw are also timed beside baseline "
        "inductor.",
    ),
]


def _measured(
    plain: list[Case], draws: dict[str, list[Case]], inductor: bool, searched: int, output: Path | None
) -> benchmark.Run:  # fmt: skip
    """Measure cases of suites, then drawn cases by seed."""
    here = shared.gpu_here()
    env = environment(here)
    with progress() as bar:
        task = bar.add_task("measuring", total=len(plain) + sum(map(len, draws.values())))
        run = benchmark.Run(output, say, lambda label: bar.update(task, advance=1, description=label))
        run.cases(plain, env, inductor)
        for seed, cases in draws.items():
            run.drawn(cases, searched, here, env | {"seed": seed}, inductor)
    return run


def _compare(places: list[Path], as_json: bool) -> None:
    """Summarise the newest results in files and folders."""
    with shared.working("reading"):
        lines = stored(places, say)
    if not lines:
        raise FileError(f"no result in {', '.join(map(str, places))}")
    if as_json:
        shared.print_json(printing.newest(lines))
    else:
        printing.print_comparison(lines, console)


@app.command()
def bench(
    shapes: shared.Shapes = None,
    suite: Suite = None,
    suites_dir: shared.Directory = shared.SUITES,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    peer: Peer = None,
    only: shared.Only = "",
    draw: Draw = None,
    searched: Searched = drawn.SEARCHED,
    output: Annotated[
        Path | None, typer.Option(help="Folder: a .jsonl file for each suite is appended to.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Measure nothing: summarise the results in the files or folders named.")
    ] = False,
    as_json: shared.Json = False,
) -> None:
    """Time tritile against torch and other baselines, side by side, with the configs that calls would use."""
    if compare:
        here = shared.kept("results")
        places = [Path(text) for text in shapes or []] or ([here] if here else [])
        if not places:
            raise InvalidValueError("there are no results here: name files (.jsonl) or folders of results")
        return _compare(places, as_json)
    shared.check_folder(output)
    draws = drawn.draws(draw or [1], only) if drawn.SUITE in (suite or []) else {}
    named = [name for name in suite or [] if name != drawn.SUITE]
    plain = []
    if named or shapes or not draws:
        cases = shared.cases_of(shapes, named, suites_dir, op, dtype, layout, only)
        plain = shared.as_called(cases, devices.current_gpu())
    run = _measured(plain, draws, bool(peer), searched, output)
    with shared.working("timing the host"):
        host = benchmark.run_host(environment(), output)
    if as_json:
        shared.print_json([*run.lines, *host])
    else:
        printing.print_results(run.lines, console)
        printing.print_summary(run.lines, console)
        printing.print_host(host, console)
    if run.failed:
        raise typer.Exit(1)
