"""Run command lines as tests do, in this process: those of tritile and, as "ladder.py", of tuning/."""

from importlib import import_module
from typing import Any

import typer
from typer.testing import CliRunner, Result

from tritile import cli

SCRIPTS = ("bench", "ladder", "picture", "report")  # of tuning/


def run(*arguments: object, **words: object) -> Result:
    """Return what a command printed, its exit status, and the exception that ended it, if any."""
    app = cli.app
    if arguments and str(arguments[0]).endswith(".py"):
        app, arguments = import_module(str(arguments[0])[:-3]).app, arguments[1:]
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **words)


def refused(*arguments: object, status: int = 2, **words: object) -> str:
    """Return the one line with which a command ends: with status 2 for wrong usage, 1 for a failure."""
    found = run(*arguments, **words)
    assert found.exit_code == status, found.output
    assert isinstance(found.exception, SystemExit), found.exception
    assert found.stdout == ""
    *_, line = found.stderr.splitlines()
    assert line.startswith("tritile: "), found.stderr
    return line.removeprefix("tritile: ")


def scripts() -> dict[str, Any]:
    """Return the commands of scripts by name."""
    return {f"{name}.py": typer.main.get_command(import_module(name).app) for name in SCRIPTS}


def commands() -> dict[str, Any]:
    """Return all commands by name."""
    group = typer.main.get_command(cli.app)
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}
