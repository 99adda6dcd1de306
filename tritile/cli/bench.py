"""tritile bench: time tritile beside its baselines."""

from pathlib import Path
from typing import Annotated

import typer

from tritile.cli.app import (
    RESULTS,
    SUITES,
    Directory,
    Dtype,
    Layout,
    Only,
    Op,
    Shapes,
    Suite,
    app,
    as_called,
    cases_of,
    console,
    progress,
    say,
)
from tritile.core import device as devices
from tritile.errors import InvalidValueError
from tritile.lab.report import baselines
from tritile.lab.report import console as printing
from tritile.lab.report import run as benchmark
from tritile.lab.report.environment import environment


@app.command()
def bench(
    shapes: Shapes = None,
    suite: Suite = None,
    suites_dir: Directory = SUITES,
    op: Op = "matmul",
    dtype: Dtype = "bfloat16",
    layout: Layout = "NN",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A baseline besides torch: {', '.join(baselines.ON_REQUEST)}; may be repeated. "
            "Takes seconds a product."
        ),
    ] = None,
    only: Only = "",
    results: Annotated[
        Path | None, typer.Option(help="Folder: a .jsonl file for each suite is appended to.")
    ] = None,
    quiet: Annotated[bool, typer.Option(help="Print the summary only.")] = False,
    compare: Annotated[
        bool, typer.Option(help="Measure nothing: summarise the results in the files or folders named.")
    ] = False,
) -> None:
    """Time tritile against torch and other baselines, side by side, with the configs that calls would use."""
    if compare:
        places = [Path(text) for text in shapes or []] or [results or RESULTS]
        printing.print_comparison(benchmark.stored(places, say))
        return
    here = devices.current_gpu()
    if here is None:
        raise InvalidValueError("there is no GPU here to measure")
    names, env = baselines.check_names(peer or []), environment(here)
    cases = as_called(cases_of(shapes, suite, suites_dir, op, dtype, layout, only), here)
    with progress() as bar:
        task = bar.add_task("measuring", total=len(cases))
        lines, failed = benchmark.run_cases(
            cases, names, env, results, say, lambda label: bar.update(task, advance=1, description=label)
        )
    if not quiet:
        printing.print_results(lines, console)
    printing.print_summary(lines, console)
    printing.print_host(benchmark.run_host(env, results), console)
    if failed:
        raise typer.Exit(1)
