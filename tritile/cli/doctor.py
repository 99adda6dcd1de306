"""tritile doctor: print what `findings` finds on this machine."""

import typer
from rich.table import Column, Table
from rich.text import Text

from tritile.cli import shared
from tritile.cli.shared import Json, app, console


@app.command(epilog=shared.examples("tritile doctor", "tritile doctor --json"))
def doctor(as_json: Json = False) -> None:
    """Show versions, GPU, driver and cache, run a kernel, and say what to do about what is missing."""
    from tritile.cli.findings import findings

    with shared.working("examining"):
        found = findings()
    if as_json:
        shared.print_json([finding._asdict() for finding in found])
    else:
        lines = Table.grid(Column(width=20), Column(overflow="fold"), padding=(0, 1))
        for finding in found:
            advice = f"\n-> {finding.advice}" if finding.advice else ""
            lines.add_row(finding.name, Text(finding.found + advice), style="" if finding.good else "red")
        shared.print_folded(lines, console)
    if not all(finding.good for finding in found):
        raise typer.Exit(1)
