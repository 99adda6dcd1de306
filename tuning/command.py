"""Command lines of scripts, which take arguments and report errors as tritile's own commands do."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from tritile.cli import main as run
from tritile.cli import shared

__all__ = ["app_of", "run"]


class Command(TyperCommand):
    """A command whose errors of usage, of tritile's or of files are one line and an exit status."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with shared.one_line_errors():
            return super().parse_args(ctx, args)

    def main(self, *args: Any, **words: Any) -> Any:
        with shared.one_line_errors():
            return super().main(*args, **words)


def app_of(function: Callable[..., None], *examples: str) -> typer.Typer:
    """Return a function as the command of a script, with examples at the end of its help."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(cls=Command, epilog=shared.examples(*examples))(function)
    return app
