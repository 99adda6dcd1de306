"""docs/stories.md: its snippets run, and the commands and options that it names exist."""

import re
import shlex
import warnings
from pathlib import Path

import pytest
import typer

import tritile
from tritile import cli

PAGE = (Path(tritile.__file__).parents[1] / "docs" / "stories.md").read_text()
STORIES = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^(?:RUN )?tritile (.*)$", PAGE, re.MULTILINE) + re.findall(r"`tritile (.*?)`", PAGE)


def test_stories_are_short():
    assert len(STORIES) == 3
    assert all(len(story.splitlines()) <= 35 for story in STORIES)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_exists(command):
    name, *arguments = shlex.split(command)
    group = typer.main.get_command(cli.app)
    if "--help" in arguments:
        arguments.remove("--help")
    group.commands[name].make_context(name, arguments)  # raises for what it does not take


def test_options_and_variables_in_the_text_exist():
    source = "".join(path.read_text() for path in Path(tritile.__file__).parent.rglob("*.py"))
    known = {
        option
        for command in typer.main.get_command(cli.app).commands.values()
        for parameter in command.params
        for option in parameter.opts
    }
    assert set(re.findall(r"`(--[\w-]+)`", PAGE)) <= known
    assert set(re.findall(r"TRIT[A-Z_]+", PAGE)) <= set(re.findall(r"TRIT[A-Z_]+", source))


def test_the_snippets_run_in_order(capsys):
    names = {}
    with warnings.catch_warnings():
        for snippet in SNIPPETS:
            exec(snippet.replace('"cuda"', '"cpu"'), names)
    assert "predicted" in capsys.readouterr().out
    assert names["y"].shape == (5, 4096)
