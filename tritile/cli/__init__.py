"""The command line: a module for each command, or for few that belong together.

A command's module is imported when the command is used. Help takes neither torch nor Triton: these modules
import them inside their functions.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from tritile.core.distribution import __version__
from tritile.errors import FileError, InvalidValueError, TritileError

# What help says of each command: the first paragraph of its docstring.
COMMANDS: Final = {
    "bench": "Time tritile and torch side by side, with the configs that calls would use.",
    "compile": "Compile what calls launch into Triton's cache, TRITON_CACHE_DIR, for this GPU or a --target.",
    "doctor": "Show versions, GPU, driver and cache, run a kernel, and say what to do about what is missing.",
    "explain": "Explain a problem's bytes, roofline, tiles, waves and kernel resources, and what bounds its "
    "time.",
    "show": "Show what is remembered of this GPU (or --target), and the tables and portfolios that it runs "
    "by.",
    "export": "Write the best remembered configs of this GPU, and its portfolios, as a table to ship, or to "
    "pin.",
    "merge": "Add the trials of other stores to this one; where both have one, the newer stays.",
    "clear": "Forget what was measured on this GPU (or --target): of all problems, or of one kernel.",
    "tune": "Measure configs for problems on this GPU and remember the best.",
    "run": "Run a command in which every kernel under triton.autotune is tuned by tritile, source unchanged.",
}
_MODULES: Final = dict.fromkeys(("show", "export", "merge", "clear"), "remembered")
_LISTING: Final = "tritile.cli.listing"  # set while help lists the commands


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Make an error of ours, or of a file, one line and exit status 2 (wrong usage) or 1, in a `with`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (TritileError, OSError) as error:
        print(f"tritile: {' '.join(str(error).split())}", file=sys.stderr)
        usage = isinstance(error, InvalidValueError) and not isinstance(error, FileError)
        sys.exit(2 if usage else 1)


class Commands(TyperGroup):
    """List all commands, and import the module of one when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, None for an unknown name; for help one that has no more than a summary."""
        if cmd_name not in COMMANDS:
            near = get_close_matches(cmd_name, COMMANDS)
            if near and not ctx.resilient_parsing:  # as a shell completes
                raise InvalidValueError(f"no command {cmd_name!r}: did you mean {' or '.join(near)}?")
            return None
        if ctx.meta.get(_LISTING):
            return TyperCommand(cmd_name, short_help=COMMANDS[cmd_name], callback=None)
        module = import_module(f"tritile.cli.{_MODULES.get(cmd_name, cmd_name)}")
        return typer.main.get_group(module.app).commands[cmd_name]  # of those imported so far

    def format_help(self, ctx: Any, formatter: Any) -> None:
        ctx.meta[_LISTING] = True
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        ctx.meta[_LISTING] = True
        return super().shell_complete(ctx, incomplete)

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Tune and measure kernels, and look after what is remembered.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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

    Where nobody reads the output any more, as behind `| head`, end with status 1 and no message.
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
