"""Show what is here and what is missing: `tritile doctor`."""

import dataclasses
import functools
import textwrap

import typer

from tritile.cli.shared import Json, app, console, print_json, working
from tritile.core.settings import cache_dir
from tritile.lab import doctor as diagnosis

_WIDTH = 20  # of the names


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, GPU, driver and cache, run a kernel, and say what to do about what is missing."""
    with working("examining"):
        findings = diagnosis.examine(cache_dir())
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            _tell(finding)
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


def _tell(finding: diagnosis.Finding) -> None:
    """Print a finding in lines of the console's width, what to do about it below it."""
    room = max(20, console.width - _WIDTH - 1)
    wrap = functools.partial(textwrap.wrap, width=room, break_long_words=False, break_on_hyphens=False)
    lines = [*(wrap(finding.found) or [""]), *(wrap(f"-> {finding.advice}") if finding.advice else [])]
    for name, line in zip((finding.name, *[""] * len(lines)), lines, strict=False):
        console.print(f"{name:{_WIDTH}} {line}", style=None if finding.good else "red", soft_wrap=True)
