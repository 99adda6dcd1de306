"""tritile ladder: tutorial kernels from a naive one up to the library's own, each with what it adds."""

import dataclasses
from typing import Annotated

import typer
from rich.text import Text

from tritile.cli import shared
from tritile.cli.shared import app, console, number, progress
from tritile.core import device as devices
from tritile.core.device import Device
from tritile.errors import InvalidValueError
from tritile.lab.environment import environment
from tritile.lab.ladder import results
from tritile.lab.ladder.results import Reading
from tritile.lab.ladder.rungs import ITEMSIZE, LADDERS
from tritile.lab.traffic import bytes_text


def _readings(n: int, ops: list[str], here: Device | None, device: Device) -> list[Reading]:
    """Time rungs on the GPU that is here; without one, or for a target, compile them."""
    rungs = [rung for op in ops for rung in LADDERS[op]]
    with progress() as bar:
        task = bar.add_task("ladder", total=len(rungs))
        if here:
            return results.timed(rungs, n, here, lambda name: bar.update(task, advance=1, description=name))
        found = []
        for reading in results.compiled(rungs, n, device):
            found.append(reading)
            bar.update(task, advance=1, description=reading.name)
        return found


def _row(reading: Reading, times: list[float], n: int, timed: bool) -> dict[str, str | Text]:
    """Return the row of a rung; `times` has those of its ladder, from the first rung up."""
    product = reading.op == "matmul"
    cells: dict[str, str] = {}
    if timed:
        cells = dict.fromkeys(("ms", "TFLOP/s" if product else "GB/s", "x first", "of best"), "-")
        if reading.us:
            work = 2 * n**3 / 1e6 if product else 2 * n**2 * ITEMSIZE[reading.dtype] / 1e3
            texts = (
                f"{reading.us / 1e3:,.4g}", f"{work / reading.us:,.4g}", f"{times[0] / reading.us:,.3g}",
                f"{min(times) / reading.us:.1%}",
            )  # fmt: skip
            cells = dict(zip(cells, texts, strict=True))
    cells["requested"] = bytes_text(reading.requested) if reading.requested else "-"
    if not timed:  # with times there is no room for them in a narrow terminal: see --json
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
    results.check_size(n)
    ops = [op] if op else list(LADDERS)
    here = None if target else devices.current_gpu()
    device = here or devices.target_device(target or "h200")
    found = _readings(n, ops, here, device)
    if as_json:
        facts = {"n": n, "device": device.name, "timed": here is not None, "env": environment(here)}
        shared.print_json(facts | {"readings": [dataclasses.asdict(each) for each in found]})
    else:
        for name in ops:
            readings = [reading for reading in found if reading.op == name]
            times = [reading.us for reading in readings if reading.us]
            rows = [_row(reading, times, n, here is not None) for reading in readings]
            styles = ["red" if each.failed else "dim" if each.baseline else "" for each in readings]
            title = f"{name}, {n} x {n}, {'on' if here else 'compiled for'} {device.name}"
            console.print(shared.table(rows, title, styles=styles))
            console.print()
        console.print("requested: bytes of global memory; of a transpose, of whole 32-byte sectors")
    if any(reading.failed for reading in found):
        raise typer.Exit(1)
