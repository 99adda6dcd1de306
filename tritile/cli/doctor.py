"""Show what is here and what is missing, and build what is built ahead: `tritile doctor` and `build`."""

import typer
from rich.table import Table as RichTable

from tritile.cli.shared import app, console
from tritile.core.settings import cache_dir
from tritile.in_torch import building
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


@app.command("build")
def build() -> None:
    """Build the library in C++ that tritile.use_in_torch uses, into the cache (TRITILE_CACHE_DIR).

    Run it in a container's image, for example: else the first process there builds it, which takes 10
    seconds.
    """
    console.print(f"the library is in {building.build()}", highlight=False, soft_wrap=True)
