"""The command line: a module for each group of commands."""

import sys

from tritile.cli import (
    accuracy,
    bench,
    compile,
    doctor,
    explain,
    ladder,
    picture,
    remembered,
    replay,
    report,
    tune,
)
from tritile.cli.app import SUITES, app, console
from tritile.errors import TritileError

__all__ = [
    "SUITES",
    "accuracy",
    "app",
    "bench",
    "compile",
    "console",
    "doctor",
    "explain",
    "ladder",
    "main",
    "picture",
    "remembered",
    "replay",
    "report",
    "tune",
]


def main() -> None:
    """Run the command line. An error of ours, or of a file, is one line on standard error, and status 2."""
    try:
        app()
    except (TritileError, OSError) as error:
        print(f"tritile: {error}", file=sys.stderr)
        sys.exit(2)
