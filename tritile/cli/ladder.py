"""tritile ladder: tutorial kernels from a naive one up to the library's own, each with what it adds."""

import dataclasses
from typing import Annotated

import typer
from rich.text import Text

from tritile.cli import shared
from tritile.cli.shared import app, console, number, progress
from tritile.core import device as devices
from tritile.errors import InvalidValueError
from tritile.lab.environment import environment
from tritile.lab.ladder import results
from tritile.lab.ladder.results import Ladders, Reading, unit
from tritile.lab.ladder.rungs import LADDERS
from tritile.lab.traffic import bytes_text


def _measured(n: int, ops: list[str], target: str | None) -> Ladders:
    """Time rungs on the GPU that is here; without one, or for a target, compile them."""
    results.check_size(n)
    rungs = [rung for op in ops for rung in LADDERS[op]]
    here = None if target else devices.current_gpu()
    device = here or devices.target_device(target or "h200")
    with progress() as bar:
        task = bar.add_task("ladder", total=len(rungs))
        if here:
            found = results.timed(rungs, n, here, lambda name: bar.update(task, advance=1, description=name))
        else:
            found = []
            for reading in results.compiled(rungs, n, device):
                found.append(reading)
                bar.update(task, advance=1, description=reading.name)
    return Ladders(n, device.name, here is not None, environment(here), tuple(found))


def _row(reading: Reading, ladders: Ladders) -> dict[str, str | Text]:
    cells: dict[str, str] = {}
    if ladders.timed:
        rate, gains = ladders.rate(reading), ladders.gains(reading)
        cells = dict.fromkeys(("ms", unit(reading.op), "x first", "of best"), "-")
        if reading.us and rate and gains:
            texts = f"{reading.us / 1e3:,.4g}", f"{rate:,.4g}", f"{gains[0]:,.3g}", f"{gains[1]:.1%}"
            cells = dict(zip(cells, texts, strict=True))
    cells["requested"] = bytes_text(reading.requested) if reading.requested else "-"
    if not ladders.timed:  # with times there is no room for them in a narrow terminal: see --json
        for name in ("registers", "spills", "shared"):
            value = getattr(reading, name)
            cells[name] = "-" if value is None else str(value)
    idea = reading.idea + (f" ({reading.note})" if reading.note else "")
    return {"rung": reading.name, "what is new": idea, **{k: number(v) for k, v in cells.items()}}


@app.command()
def ladder(
    n: Annotated[int, typer.Argument(help="Rows and columns.")] = 8192,
    op: Annotated[str, typer.Option(help=f"{', '.join(LADDERS)}. Default: both.")] = "",
    target: shared.Target = None,
    as_json: shared.Json = False,
) -> None:
    """Climb from a naive matmul and a naive transpose to tritile's own, one idea a step.

    On a GPU every rung is checked, timed and compared. Without one, or for a --target, its requests to memory
    are counted by formula, and it is compiled for that GPU.
    """
    if op and op not in LADDERS:
        raise InvalidValueError(f"op {op!r}: wanted one of {', '.join(LADDERS)}")
    found = _measured(n, [op] if op else list(LADDERS), target)
    if as_json:
        shared.print_json(dataclasses.asdict(found))
    else:
        for name, readings in found.by_op.items():
            how = "on" if found.timed else "compiled for"
            rows = [_row(reading, found) for reading in readings]
            styles = ["red" if each.failed else "dim" if each.baseline else "" for each in readings]
            console.print(
                shared.table(rows, f"{name}, {found.n} x {found.n}, {how} {found.device}", styles=styles)
            )
            console.print()
        console.print("requested: bytes of global memory; of a transpose, of whole 32-byte sectors")
    if any(reading.failed for reading in found.readings):
        raise typer.Exit(1)
