"""Show, export and merge what is remembered: `tritile show`, `export` and `merge`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable

from tritile.cli.shared import Target, app, console, device_of
from tritile.core.device import Device
from tritile.core.problem import problem_key
from tritile.errors import InvalidValueError
from tritile.families import registry as families
from tritile.lab.report import cover
from tritile.planning import gpu_tables, table
from tritile.planning.export import completed, from_store
from tritile.planning.store import store_of
from tritile.planning.trial import Trial, rank


@app.command()
def show(
    target: Target = None,
    trials: Annotated[bool, typer.Option(help="Every trial, not only the best of each problem.")] = False,
) -> None:
    """Show what is remembered of this GPU (or --target) and counts today: each problem's best config."""
    device = device_of(target)
    names = ("problem", "us", "spread", "regs", "spills", "shared", "error", "config", "measured")
    grid = RichTable(*names)
    rows = _current(device)
    if not trials:
        best: dict[str, Trial] = {}
        for trial in sorted(rows, key=rank):
            best.setdefault(problem_key(trial.problem), trial)
        rows = list(best.values())
    for trial in rows:
        numbers = (trial.spread, trial.registers, trial.spills, trial.shared, trial.error)
        shown = ("" if v is None else f"{v:.2g}" if isinstance(v, float) else str(v) for v in numbers)
        us = f"{trial.us:.1f}" if trial.us else (trial.failure or "")
        grid.add_row(trial.problem.label, us, *shown, str(trial.config), trial.measured_utc)
    console.print(grid)
    console.print(f"{len(rows)} rows from {store_of(device).path}")


def _current(device: Device) -> list[Trial]:
    """Return the trials of this GPU, these versions and, for tritile's own kernels, this source."""
    found = []
    for facts, trial in store_of(device).everything():
        own = families.FAMILIES.get(trial.problem.op, {}).get(trial.config.family)
        same = all(value == getattr(device, name) for name, value in facts.items() if name != "kernel")
        if same and not trial.of_torch and (own is None or facts["kernel"] == own.digest):
            found.append(trial)
    return found


@app.command()
def export(
    output: Annotated[Path | None, typer.Argument(help="The table to write; default <gpu>.json.")] = None,
    target: Target = None,
    replace: Annotated[bool, typer.Option(help="Replace a table that knows more, or another GPU's.")] = False,
    within: Annotated[
        float | None,
        typer.Option(min=0, help="As few configs as can be, each slower by this share at most: 0.02 is 2%."),
    ] = None,
) -> None:
    """Write the best remembered configs of this GPU, and its portfolios, as a table to ship, or to pin.

    `TRITILE_TABLE` names a table that goes before everything that was measured on a machine.

    A table that lies there already keeps its entries for problems that are not remembered. One that
    would lose entries, or is of another GPU, is replaced only with --replace. With --within, the fewest
    configs that serve all problems take the place of each problem's best.
    """
    device = device_of(target)
    kernels = families.digests()
    made = from_store(store_of(device), device, kernels)
    own = gpu_tables.calibrated(device)
    if own is not None:
        portfolios, leads = own.current_portfolios(), own.current_leads()
        made = dataclasses.replace(made, portfolios=portfolios, leads=leads)
    path = output or Path(f"{device.slug}.json")
    if path.exists() and not replace:
        old = table.read(path)
        made = completed(made, old)
        if old.device["name"] != device.name or len(made.entries) < len(old.entries):
            raise InvalidValueError(
                f"{path} holds {len(old.entries)} entries of {old.device['name']}; {len(made.entries)} of "
                f"{device.name} would stand in their place: --replace writes them"
            )
    if not made.entries and not made.portfolios:
        raise InvalidValueError(f"nothing is remembered of {device.name}: tune it first")
    if within is not None:
        made = _covered(made, device, within)
    table.write(made, path)
    console.print(f"{len(made.entries)} entries and {len(made.portfolios)} portfolios written to {path}")


def _covered(made: table.Table, device: Device, within: float) -> table.Table:
    """Return the table with few configs, by the trials that count today, and say what that loses."""
    found = cover.covered(made.entries, _current(device), within)
    console.print(
        f"{found.after} configs for {found.before}: {found.worst:.2%} slower at the worst, {found.mean:.2%} "
        "on the mean",
        highlight=False,
    )
    loss = table.Loss(within, found.worst, found.mean, found.after)
    return dataclasses.replace(made, entries=found.entries, loss=loss)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Stores of the same GPU model, from other machines.")],
    target: Target = None,
) -> None:
    """Add the trials of other stores to this one; where both have one, the newer stays."""
    store = store_of(device_of(target))
    for path in files:
        console.print(f"{path}: {store.merge(path)} trials added to {store.path}")
