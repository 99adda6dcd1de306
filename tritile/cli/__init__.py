"""The command line: a module for each command, or for few that belong together.

Help and completion take neither torch nor Triton: these modules import them inside their functions.
"""

import os
import sys
import warnings
from typing import Annotated, Any

import typer

from tritile.cli import bench, check, compile, doctor, explain, fleet, plan, remembered, run, tune  # noqa: F401
from tritile.cli.shared import app
from tritile.core.distribution import __version__


def _show_version(shown: bool) -> None:
    if shown:
        print(f"tritile {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _print_warning(message: Warning | str, category: type[Warning], *rest: Any) -> None:
    print(f"tritile: {category.__name__}: {' '.join(str(message).split())}", file=sys.stderr)


def main(app: typer.Typer = app) -> None:
    """Run a command line, by default tritile's; a warning is one line on standard error.

    If the reader closes the pipe, as `| head` does, end with status 1 and no message.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning  # type: ignore[assignment]
            try:
                app()
            finally:
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what Python still writes as it ends
        sys.exit(1)
