"""tritile run: adopt the kernels of a command, and of every Python process that it starts."""

import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

import tritile
from tritile.cli import shared
from tritile.cli.shared import app
from tritile.core.settings import EFFORTS, MODES, is_batch_invariant, unknown_variables
from tritile.errors import InvalidValueError, did_you_mean
from tritile.tuner.adoption_options import of_environment

_SITE = Path(tritile.__file__).parent / "tuner" / "startup"


def environment(adopting: dict[str, str], before: dict[str, str]) -> dict[str, str]:
    """Return the variables to add to a command's environment: `adopting`, and PYTHONPATH.

    Raises InvalidValueError if a process could not read `adopting`.
    """
    adopting = {name: value for name, value in adopting.items() if value}
    table = of_environment(before | adopting).table
    if table is not None and not Path(table).is_file():
        raise InvalidValueError(f"there is no table {table}: tritile export --kernel writes one")
    paths = before["PYTHONPATH"].split(os.pathsep) if before.get("PYTHONPATH") else []
    rest = [path for path in paths if path != str(_SITE)]  # an empty path is the current folder
    return adopting | {"PYTHONPATH": os.pathsep.join([str(_SITE), *rest])}


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog=shared.examples(
        "tritile run python serve.py",
        "tritile run --mode strict pytest tests",
        "tritile run --bucket '*causal_conv1d*:NB=next_power_of_2' torchrun --nproc-per-node 8 train.py",
        "tritile run --print-env",
    ),
)
def run(
    context: typer.Context,
    command: Annotated[list[str] | None, typer.Argument(help="The command and its arguments.")] = None,
    kernels: Annotated[
        str, typer.Option(help="Patterns of kernels' names, with commas. Default: all, or those of --file.")
    ] = "",
    mode: Annotated[
        str,
        typer.Option(
            help="tune, spread, cached, strict or off. Default: as TRITILE_MODE says.",
            autocompletion=shared.completes(MODES),
        ),
    ] = "",
    effort: Annotated[
        str,
        typer.Option(
            help="quick or full. Default: within TRITILE_TUNE_BUDGET.",
            autocompletion=shared.completes(EFFORTS),
        ),
    ] = "",
    bucket: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN:ARGUMENT=FUNCTION, with a function of Triton's or module:name."),
    ] = None,
    table: Annotated[str, typer.Option(help="A table that tritile export --kernel wrote.")] = "",
    file: Annotated[str, typer.Option(help="A TOML file with the arguments of tritile.adopt.")] = "",
    report: Annotated[
        bool, typer.Option("--report", help="At its end each process prints what it adopted, to stderr.")
    ] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Make torch's own products batch-invariant, too."),
    ] = False,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Print what it sets, for a shell or a Dockerfile.")
    ] = False,
) -> None:
    """Run a command in which every kernel under triton.autotune is tuned by tritile, source unchanged.

    So do the processes that the command starts: workers, torchrun's ranks, engines of servers. Exceptions are
    a Python with -I, -E or -S, a process whose environment is cleared, and one where another sitecustomize.py
    comes earlier on PYTHONPATH and does not run this one.
    """
    adopting = {
        "TRITILE_ADOPT": kernels or "1", "TRITILE_ADOPT_MODE": mode, "TRITILE_ADOPT_EFFORT": effort,
        "TRITILE_ADOPT_BUCKETS": ";".join(bucket or []),
        "TRITILE_ADOPT_TABLE": table and str(Path(table).absolute()),
        "TRITILE_ADOPT_FILE": file and str(Path(file).absolute()),
        "TRITILE_ADOPT_REPORT": "1" if report else "",
        "TRITILE_BATCH_INVARIANT": "torch" if batch_invariant else "",
    }  # fmt: skip
    if print_env and command:
        raise InvalidValueError(f"--print-env runs nothing: leave out {shlex.join(command)}")
    if not batch_invariant:
        is_batch_invariant()  # raises for a wrong variable, which no process of the command would tell
    shared.import_from_here()  # functions of buckets
    for name, value, choices in (("--mode", mode, MODES), ("--effort", effort, EFFORTS)):
        if value and value not in choices:
            raise shared.unknown(name, value, choices)
    for text in unknown_variables(os.environ):
        shared.say(text)
    sets = environment(adopting, dict(os.environ))
    if print_env:
        for name, value in sets.items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        return
    if not command:
        raise InvalidValueError("there is no command: expected tritile run COMMAND, or --print-env")
    program = shutil.which(command[0])
    if program is None and command[0].startswith("-"):
        options = (each for parameter in context.command.params for each in parameter.opts)
        raise InvalidValueError(f"no such option {command[0]}{did_you_mean(command[0], options)}")
    if program is None:
        hint = f": expected `python {command[0]}`" if command[0].endswith(".py") else ""
        raise InvalidValueError(f"command {command[0]!r} is not found{hint}")
    os.execve(program, command, os.environ | sets)
