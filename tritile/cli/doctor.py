"""Show what is here, and what is missing: `tritile doctor`."""

import typer
from rich.table import Table as RichTable

from tritile.cli.shared import app, console
from tritile.core.settings import cache_dir
from tritile.lab.report import doctor as diagnosis


@app.command()
def doctor() -> None:
    """Show versions, GPU, driver and cache, run a kernel, and say what to do about what is missing."""
    findings = diagnosis.examine(cache_dir())
    grid = RichTable("what", "found", "to do", show_lines=False)
    for finding in findings:
        grid.add_row(finding.name, finding.found, finding.advice, style=None if finding.good else "red")
    console.print(grid)
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)
