"""tritile ladder: tutorial kernels from a naive one up to the library's own, each with what it adds."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from tritile.cli.app import app, progress
from tritile.core import device as devices
from tritile.errors import InvalidValueError
from tritile.lab.ladder import climbing, counts, race
from tritile.lab.ladder.climbing import Climb
from tritile.lab.ladder.reading import Reading
from tritile.lab.ladder.steps import LADDERS
from tritile.lab.report.environment import environment

_OPS = (*LADDERS, "both")
_PIPED_WIDTH = 170  # columns; to a file or a pipe nothing is gained by folding at 80


def _check_written(path: Path | None, suffixes: tuple[str, ...]) -> None:
    """Raise InvalidValueError where the file cannot be written, or a picture cannot be drawn."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise InvalidValueError(f"{path}: wanted a name that ends in {' or '.join(suffixes)}")
    writable = os.access(path if path.exists() else path.parent, os.W_OK)
    if path.is_dir() or not path.parent.is_dir() or not writable:
        raise InvalidValueError(f"{path} cannot be written: wanted a file in a folder that exists")
    if suffixes == climbing.PICTURES and not all(
        map(importlib.util.find_spec, ("altair", "vl_convert", "jinja2"))
    ):
        raise InvalidValueError("a picture needs more packages: pip install 'tritile[report]'")


def _climbed(n: int | None, ops: list[str], target: str | None) -> Climb:
    """Climb on the GPU that is here; without one, or for a target, in the interpreter."""
    steps = [step for op in ops for step in LADDERS[op]]
    here = None if target else devices.current_gpu()
    device = here or devices.target_device(target or "nvidia-h200")
    n = n if n is not None else race.DEFAULT_N if here else counts.DEFAULT_N
    race.check_size(n, here) if here else counts.check_size(n)
    climb = race.timed_climb if here else counts.counted_climb
    with progress() as bar:
        task = bar.add_task("climbing", total=len(steps))
        readings = climb(steps, n, device, lambda name: bar.update(task, advance=1, description=name))
    return Climb(n, device.name, here is not None, environment(here), tuple(readings))


def _what(reading: Reading) -> str:
    return reading.new + (f"\n({reading.note})" if reading.note else "")


def _number(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def _timed_table(op: str, climb: Climb) -> RichTable:
    grid = RichTable(title=f"{op}, {climb.n} x {climb.n}, on {climb.device}", title_justify="left")
    grid.add_column("step", no_wrap=True)
    grid.add_column("what is new")
    for name in ("time", climbing.unit(op), "x first", "of best", "asked", "registers", "shared", "error"):
        grid.add_column(name, justify="right", no_wrap=True)
    gained = climbing.gains(climb.of(op))
    for reading in climb.of(op):
        times, share = gained.get(reading.name, (None, None))
        rate = climbing.rate(reading, climb.n)
        grid.add_row(
            reading.name, _what(reading), climbing.time_text(reading.us), climbing.rate_text(rate),
            climbing.rate_text(times), climbing.share_text(share),
            climbing.size_text(reading.asked), _number(reading.registers),
            _number(reading.shared, ","), _number(reading.error, ".1e"),
            style=_style(reading),
        )  # fmt: skip
    return grid


def _counted_table(op: str, climb: Climb) -> RichTable:
    title = f"{op}, {climb.n} x {climb.n}, in Triton's interpreter; compiled for {climb.device}"
    grid = RichTable(title=title, title_justify="left")
    grid.add_column("step", no_wrap=True)
    grid.add_column("what is new")
    for name in ("asked", "counted", "touched", "registers", "spills", "shared", "error"):
        grid.add_column(name, justify="right", no_wrap=True)
    for reading in climb.of(op):
        sizes = (reading.asked, reading.bytes_counted, reading.touched)
        grid.add_row(
            reading.name, _what(reading), *map(climbing.size_text, sizes), _number(reading.registers),
            _number(reading.spills), _number(reading.shared, ","),
            _number(reading.error, ".1e"), style=_style(reading),
        )  # fmt: skip
    return grid


def _style(reading: Reading) -> str | None:
    return "red" if reading.failed else "dim" if reading.yardstick else None


def _print(climb: Climb) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False, highlight=False)
    for op in climb.ops:
        console.print(_timed_table(op, climb) if climb.timed else _counted_table(op, climb))
    if climb.timed:
        console.print("asked: bytes of global memory, by formula; of best: share of the fastest step's speed")
        return
    console.print(
        "asked: bytes of global memory, by formula; counted: the same, as kernels ran in the interpreter; "
        "touched: bytes\nof the 32-byte sectors that each access of a program lies in. Steps in bfloat16 "
        "are interpreted in float16. With a GPU, steps are timed."
    )


@app.command()
def ladder(
    n: Annotated[
        int | None,
        typer.Argument(help="Rows and columns. Default: 8192 on a GPU, 96 in the interpreter."),
    ] = None,
    op: Annotated[str, typer.Option(help=f"{', '.join(_OPS)}.")] = "both",
    target: Annotated[
        str | None,
        typer.Option(
            help=f"Time nothing: count in the interpreter, and compile for {', '.join(devices.TARGETS)}."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A .json file to keep the result in.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture: .svg, .png or .html.")] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: show the result that --output kept.")
    ] = None,
) -> None:
    """Climb from a naive matmul and a naive transpose to tritile's own, one idea a step.

    On a GPU every step is checked, timed and compared; without one it is interpreted, its memory traffic
    counted, and compiled for a GPU elsewhere.
    """
    if op not in _OPS:
        raise InvalidValueError(f"op {op!r}: wanted one of {', '.join(_OPS)}")
    if saved and (n is not None or target or output):
        raise InvalidValueError("--from shows a result that is there: leave out N, --target and --output")
    _check_written(output, (".json",))
    _check_written(plot, climbing.PICTURES)
    ops = list(LADDERS) if op == "both" else [op]
    climb = climbing.read(saved).only(ops) if saved else _climbed(n, ops, target)
    _print(climb)
    if output:
        climbing.save(climb, output)
    if plot:
        from tritile.lab.report import ladder_picture  # needs the extra `report`

        ladder_picture.draw(climb, plot)
    if any(reading.failed for reading in climb.readings):
        raise typer.Exit(1)
