"""tritile ladder: tutorial kernels from a naive one up to the library's own, each with what it adds."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from tritile.cli.shared import PICTURES, app, check_output, progress
from tritile.core import device as devices
from tritile.errors import InvalidValueError
from tritile.lab.ladder import climbing
from tritile.lab.ladder.climbing import Climb
from tritile.lab.ladder.running import Reading
from tritile.lab.ladder.steps import LADDERS
from tritile.lab.report.environment import environment

_OPS = (*LADDERS, "both")
_PIPED_WIDTH = 170  # columns; to a file or a pipe nothing is gained by folding at 80
_COUNTED = ("asked", "counted", "touched", "registers", "spills", "shared", "error")
_ABOUT_TIMES = "asked: bytes of global memory, by formula; of best: share of the fastest step's speed"
_ABOUT_COUNTS = (
    "asked: bytes of global memory, by formula; counted: the same, as kernels ran in the interpreter; "
    "touched: bytes\nof the 32-byte sectors that each access of a program lies in. Steps in bfloat16 are "
    "interpreted in float16. With a GPU, steps are timed."
)


def _climbed(n: int | None, ops: list[str], target: str | None) -> Climb:
    """Climb on the GPU that is here; without one, or for a target, in the interpreter."""
    steps = [step for op in ops for step in LADDERS[op]]
    here = None if target else devices.current_gpu()
    device = here or devices.target_device(target or "nvidia-h200")
    n = n if n is not None else climbing.TIMED_N if here else climbing.COUNTED_N
    climbing.check_size(n, here)
    climb = climbing.timed_climb if here else climbing.counted_climb
    with progress() as bar:
        task = bar.add_task("climbing", total=len(steps))
        readings = climb(steps, n, device, lambda name: bar.update(task, advance=1, description=name))
    return Climb(n, device.name, here is not None, environment(here), tuple(readings))


def _number(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def _cells(reading: Reading, climb: Climb) -> dict[str, str]:
    """Write the figures of a step, by the names of columns."""
    times, share = climb.gains(reading.op).get(reading.name, (None, None))
    return {
        "time": climbing.time_text(reading.us),
        climbing.unit(reading.op): climbing.rate_text(climb.rate(reading)),
        "x first": climbing.rate_text(times),
        "of best": climbing.share_text(share),
        "asked": climbing.size_text(reading.asked),
        "counted": climbing.size_text(reading.bytes_counted),
        "touched": climbing.size_text(reading.touched),
        "registers": _number(reading.registers),
        "spills": _number(reading.spills),
        "shared": _number(reading.shared, ","),
        "error": _number(reading.error, ".1e"),
    }


def _table(op: str, climb: Climb) -> RichTable:
    where = f"on {climb.device}" if climb.timed else f"in Triton's interpreter; compiled for {climb.device}"
    grid = RichTable(title=f"{op}, {climb.n} x {climb.n}, {where}", title_justify="left")
    grid.add_column("step", no_wrap=True)
    grid.add_column("what is new")
    timed = ("time", climbing.unit(op), "x first", "of best", "asked", "registers", "shared", "error")
    names = timed if climb.timed else _COUNTED
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for reading in climb.of(op):
        cells, note = _cells(reading, climb), f"\n({reading.note})" if reading.note else ""
        style = "red" if reading.failed else "dim" if reading.yardstick else None
        grid.add_row(reading.name, reading.new + note, *(cells[name] for name in names), style=style)
    return grid


@app.command()
def ladder(
    n: Annotated[
        int | None, typer.Argument(help="Rows and columns. Default: 8192 on a GPU, 96 in the interpreter.")
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
    check_output(output, {".json": ()})
    check_output(plot, PICTURES)
    ops = list(LADDERS) if op == "both" else [op]
    climb = climbing.read(saved).only(ops) if saved else _climbed(n, ops, target)
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False, highlight=False)
    for each in climb.ops:
        console.print(_table(each, climb))
    console.print(_ABOUT_TIMES if climb.timed else _ABOUT_COUNTS)
    if output:
        climb.save(output)
    if plot:
        from tritile.lab.report import ladder_picture  # needs the extra `report`

        ladder_picture.draw(climb, plot)
    if any(reading.failed for reading in climb.readings):
        raise typer.Exit(1)
