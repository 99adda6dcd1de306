"""Run the command line: a module for each command, or for few that belong together."""

import os
import sys

from tritile.cli import (  # noqa: F401  # noqa: F401
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
from tritile.cli.shared import SUITES, app, console
from tritile.errors import TritileError

__all__ = ["SUITES", "app", "console", "main", "tune"]


def main() -> None:
    """Run the command line. Print an error of ours, or of a file, as one line on standard error; status 2.

    Where nobody reads the output any more, as behind `| head`, end with status 1 and no message.
    """
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what Python still writes as it ends
        sys.exit(1)
    except (TritileError, OSError) as error:
        print(f"tritile: {error}", file=sys.stderr)
        sys.exit(2)
