"""tritile ladder: tutorial kernels from a naive one up to the library's own, each with what it adds."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.text import Text

from tritile.cli import shared
from tritile.cli.shared import app, console, number, print_table, progress, unknown
from tritile.errors import InvalidValueError

if TYPE_CHECKING:
    from tritile.lab.ladder.results import Reading

OPS: Final = ("matmul", "transpose")  # of `LADDERS`


def _row(reading: "Reading", times: list[float], n: int, timed: bool) -> dict[str, str | Text]:
    """The row of a rung; `times` has those of its ladder, from the first rung up."""
    from tritile.lab.ladder.rungs import ITEMSIZE
    from tritile.lab.traffic import bytes_text

    product, us = reading.op == "matmul", reading.us
    cells: dict[str, object] = {}
    if timed:
        work = 2 * n**3 / 1e6 if product else 2 * n**2 * ITEMSIZE[reading.dtype] / 1e3
        cells["ms"] = us and f"{us / 1e3:,.4g}"
        cells["TFLOP/s" if product else "GB/s"] = us and f"{work / us:,.4g}"
        cells |= {"x first": us and f"{times[0] / us:,.3g}", "of best": us and f"{min(times) / us:.1%}"}
    cells["requested"] = bytes_text(reading.requested) if reading.requested else None
    if not timed:  # with times there is no room for them in a narrow terminal: see --json
        cells |= {name: getattr(reading, name) for name in ("registers", "spills", "shared")}
    idea = reading.idea + (f" ({reading.note})" if reading.note else "")
    numbers = {name: number("-" if cell is None else cell) for name, cell in cells.items()}
    return {"rung": reading.name, "what is new": idea, **numbers}


@app.command(
    epilog=shared.examples(
        "tritile ladder", "tritile ladder 4096 --op transpose", "tritile ladder --target h200"
    )
)
def ladder(
    n: Annotated[int, typer.Argument(help="Rows and columns.")] = 8192,
    op: Annotated[str, typer.Option(help=f"One of {', '.join(OPS)}. Default: both.")] = "",
    target: shared.Target = None,
    as_json: shared.Json = False,
) -> None:
    """Climb from a naive matmul and a naive transpose to tritile's own, one idea a step.

    On a GPU every rung is checked, timed and compared. Without one, or for a --target, its requests to memory
    are counted by formula, and it is compiled for that GPU; without either, for an h200.
    """
    from tritile.core import device as devices
    from tritile.lab.environment import environment
    from tritile.lab.ladder import results
    from tritile.lab.ladder.rungs import LADDERS

    if op and op not in OPS:
        raise unknown("--op", op, OPS)
    if not 1 <= n <= results.LARGEST:
        raise InvalidValueError(f"n = {n}: expected 1 to {results.LARGEST:,}")
    ops = [op] if op else list(LADDERS)
    here = devices.current_gpu() if target is None else None
    device = shared.device_of(target, otherwise="h200")
    rungs = [rung for each in ops for rung in LADDERS[each]]
    with progress() as bar:
        task = bar.add_task("ladder", total=len(rungs))
        if here:
            found = results.timed(
                rungs, n, device, lambda name: bar.update(task, advance=1, description=name)
            )
        else:
            own = bar.track([rung for rung in rungs if not rung.is_baseline], task_id=task)
            found = [results.described(rung, n, rung.config(n, device), device) for rung in own]
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
            print_table(rows, title, styles=styles)
            console.print()
        console.print("requested: bytes of global memory; of a transpose, of whole 32-byte sectors")
    if any(reading.failed for reading in found):
        raise typer.Exit(1)
