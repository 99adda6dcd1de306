"""tritile ladder: tutorial kernels from a naive one up to the library's own, each with what it adds."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from tritile.cli import shared
from tritile.cli.shared import PICTURES, app, check_output, console, progress
from tritile.core import device as devices
from tritile.core import gpus
from tritile.errors import InvalidValueError
from tritile.lab.explain.texts import kib_text
from tritile.lab.ladder import climbing
from tritile.lab.ladder.climbing import Climb
from tritile.lab.ladder.running import Reading
from tritile.lab.ladder.steps import LADDERS
from tritile.lab.report import columns
from tritile.lab.report.columns import number, whole
from tritile.lab.report.environment import environment

_OPS = (*LADDERS, "both")
_ROOMY = 110  # columns of a terminal from which on registers, shared memory and errors are shown too
_ABOUT_TIMES = "asked: bytes of global memory, by formula; of best: share of the fastest step's speed"
_ABOUT_COUNTS = (
    "asked: bytes of global memory, by formula; counted: the same, as kernels ran in the interpreter; "
    "touched: bytes of the 32-byte sectors that each access of a program lies in. Steps in bfloat16 are "
    "interpreted in float16. With a GPU, steps are timed."
)


def _climbed(n: int | None, ops: list[str], target: str | None) -> Climb:
    """Climb on the GPU that is here; without one, or for a target, in the interpreter."""
    steps = [step for op in ops for step in LADDERS[op]]
    here = None if target else devices.current_gpu()
    device = here or gpus.target_device(target or "h200")
    n = n if n is not None else climbing.TIMED_N if here else climbing.COUNTED_N
    climbing.check_size(n, here)
    climb = climbing.timed_climb if here else climbing.counted_climb
    with progress() as bar:
        task = bar.add_task("climbing", total=len(steps))
        readings = climb(steps, n, device, lambda name: bar.update(task, advance=1, description=name))
    return Climb(n, device.name, here is not None, environment(here), tuple(readings))


def _row(reading: Reading, climb: Climb) -> dict[str, Any]:
    """Return a step's cells by the names of columns: what is new, then its figures."""
    times, share = climb.gains(reading.op).get(reading.name, (None, None))
    timed = {
        "time": climbing.time_text(reading.us),
        climbing.unit(reading.op): climbing.rate_text(climb.rate(reading)),
        "x first": climbing.rate_text(times),
        "of best": climbing.share_text(share),
        "asked": climbing.size_text(reading.asked),
    }
    counted = {
        "asked": climbing.size_text(reading.asked),
        "counted": climbing.size_text(reading.bytes_counted),
        "touched": climbing.size_text(reading.touched),
    }
    details = {
        "registers": reading.registers,
        "spills": reading.spills,
        "shared": None if reading.shared is None else kib_text(reading.shared),
        "error": None if reading.error is None else f"{reading.error:.1e}",
    }
    if console.width < _ROOMY:
        details = {}
    figures = (timed if climb.timed else counted) | details
    note = f" ({reading.note})" if reading.note else ""
    cells = {name: number("-" if value is None else value) for name, value in figures.items()}
    return {"step": whole(reading.name), "what is new": reading.new + note, **cells}


def _print(climb: Climb) -> None:
    for op in climb.ops:
        where = "on" if climb.timed else "in Triton's interpreter; compiled for"
        title = f"{op}, {climb.n} x {climb.n}, {where} {climb.device}"
        rows = [_row(reading, climb) for reading in climb.of(op)]
        styles = ["red" if each.failed else "dim" if each.yardstick else "" for each in climb.of(op)]
        console.print(columns.table(rows, title, styles=styles))
        console.print()
    console.print(_ABOUT_TIMES if climb.timed else _ABOUT_COUNTS)


@app.command()
def ladder(
    n: Annotated[
        int | None, typer.Argument(help="Rows and columns. Default: 8192 on a GPU, 96 in the interpreter.")
    ] = None,
    op: Annotated[str, typer.Option(help=f"{', '.join(_OPS)}.")] = "both",
    target: shared.Target = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(help="Keep the result (.json), or draw it (.svg, .png, .html); may be repeated."),
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: show the result that --output kept.")
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Climb from a naive matmul and a naive transpose to tritile's own, one idea a step.

    On a GPU every step is checked, timed and compared. Without one, or for a --target, it is interpreted, its
    memory traffic counted, and compiled for a GPU elsewhere.
    """
    if op not in _OPS:
        raise InvalidValueError(f"op {op!r}: wanted one of {', '.join(_OPS)}")
    if saved and (n is not None or target):
        raise InvalidValueError("--from shows a result that is there: leave out N and --target")
    for path in output or ():
        check_output(path, {".json": (), **PICTURES})
    ops = list(LADDERS) if op == "both" else [op]
    climb = climbing.read(saved).only(ops) if saved else _climbed(n, ops, target)
    if as_json:
        shared.print_json(dataclasses.asdict(climb))
    else:
        _print(climb)
    for path in output or ():
        _write(climb, path)
    if any(reading.failed for reading in climb.readings):
        raise typer.Exit(1)


def _write(climb: Climb, path: Path) -> None:
    """Keep a climb as JSON, or draw it, as the file's suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        return climb.save(path)
    from tritile.lab.report import ladder_picture  # needs the extra `report`

    with shared.working("drawing"):
        ladder_picture.draw(climb, path)
