"""Run the command line as tests do: in this process."""

from typing import Any

import typer
from typer.testing import CliRunner, Result

from tritile import cli
from tritile.errors import TritileError


def run(*arguments: object, **words: object) -> Result:
    """Return what a command printed, its exit status, and the exception that ended it, if any."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], **words)


def refused(*arguments: object) -> str:
    """Return the one line with which a command ends with status 2, as `main` prints errors of ours."""
    found = run(*arguments)
    assert isinstance(found.exception, TritileError | OSError), found.output
    text = str(found.exception)
    assert "\n" not in text
    return text


def commands() -> dict[str, Any]:
    """Return all commands by name."""
    group = typer.main.get_command(cli.app)
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}
