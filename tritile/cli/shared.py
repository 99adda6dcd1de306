"""What the commands share: options, tables, progress, stopping, and checks of what they read and write.

Modules of commands import torch, Triton and what needs them inside their functions, so that help and shell
completion do not wait for them.
"""

import json
import math
import os
import pkgutil
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from tritile.core.settings import is_batch_invariant
from tritile.errors import FileError, InvalidValueError, TritileError, did_you_mean

if TYPE_CHECKING:
    from tritile.choose.predictor import Predictor
    from tritile.core.device import Device
    from tritile.core.problem import Tiled
    from tritile.tune.suites import Case

console = Console(markup=False, highlight=False, soft_wrap=True)  # brackets in data are no markup
_UNFOLDED: Final = 1 << 16  # columns: more than any table has
notes = Console(markup=False, highlight=False, soft_wrap=True, stderr=True)  # progress and failures

# Copied for help and completion, as the modules that define these import torch; a test compares both.
GPUS: Final = (
    "h200", "h100", "a100", "b200", "l40s", "4090", "mi300x", "5090", "pro-6000", "gb10", "b300", "h20",
    "h800", "h200-nvl", "gh200", "l4", "a10", "mi325x", "mi350",
)  # fmt: skip
OPS: Final = ("matmul", "grouped", "transpose", "linear_quantized")
SINGLE_OPS: Final = ("matmul", "transpose")  # whose tiles are explained
SUITES: Final = tuple(sorted(path.stem for path in (Path(__file__).parents[1] / "suites").glob("*.toml")))

_DTYPES: Final = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn",
}  # fmt: skip


def examples(*lines: str) -> str:
    """Return example commands as the end of a command's help."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def completes(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what a shell completes a value to."""
    known = list(names)
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


def unknown(what: str, value: str, choices: Collection[str]) -> InvalidValueError:
    """Return the error for a value that is not a choice: it names a similar choice, or all."""
    hint = did_you_mean(value, choices) or f": expected one of {', '.join(choices)}"
    return InvalidValueError(f"{what} {value!r}{hint}")


def typed(context: typer.Context) -> dict[str, str]:
    """Return the options on the command line, by parameter name, as they are typed: "--any-rows"."""
    found = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE":
            long = (each for each in parameter.opts if each.startswith("--"))
            found[str(parameter.name)] = next(long, str(parameter.name).upper())
    return found


def refuse_together(named: Mapping[str, str], one: str, others: Iterable[str], why: str) -> None:
    """Raise InvalidValueError if both `one` and one of `others` are on the command line."""
    for other in others if one in named else ():
        if other in named:
            raise InvalidValueError(f"{named[one]} does not go with {named[other]}: {why}")


def refuse_unread(
    context: typer.Context, op: str, layout: str, shapes: Sequence[str] | None, *others: str
) -> None:
    """Raise InvalidValueError for an option of shapes on the command line that has no effect.

    `others` are parameters that would apply to the cases of suites too.
    """
    options = typed(context)
    for name in ("op", "dtype", "layout", *others):
        if name in others or not shapes:
            refuse_together(options, name, ("suite",), "each case of a suite has its own")
        if name in options and not shapes:
            raise InvalidValueError(f"{options[name]} is for shapes: name one, such as 4096x4096x4096")
    if "layout" in options and op == "permute":
        raise InvalidValueError("--layout does not go with --op transpose: its rows are contiguous")
    if "layout" in options and op == "linear_quantized" and layout.isalpha():
        raise InvalidValueError(f"--layout {layout!r}: linear_quantized takes one such as int4/128")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Make an error of ours, of usage or of a file one line and exit status 2 (usage) or 1, in a `with`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except _UsageError as error:
        message, context = " ".join(error.format_message().split()), getattr(error, "ctx", None)
        of = f"; `{context.command_path} --help` lists what it takes" if context is not None else ""
        print(f"tritile: {message[:1].lower()}{message[1:].rstrip('.')}{of}", file=sys.stderr)
        sys.exit(2)
    except (TritileError, OSError) as error:
        print(f"tritile: {' '.join(str(error).split())}", file=sys.stderr)
        usage = isinstance(error, InvalidValueError) and not isinstance(error, FileError)
        sys.exit(2 if usage else 1)


_UsageError: Final[Any] = typer.BadParameter.__base__  # of click, which typer holds a copy of


class _Commands(TyperGroup):
    """All commands; an unknown one, and every error of tritile's, is reported in one line."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing:  # as a shell completes
            raise unknown("no command", cmd_name, self.commands)
        if command is not None:  # else the list of commands cuts its first sentence short
            command.short_help = " ".join(str(command.help).partition("\n\n")[0].split())
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        if not args:
            return super().parse_args(ctx, args)  # which shows the help
        with nullcontext() if ctx.resilient_parsing else one_line_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    help="Tune and measure kernels, and look after what is remembered.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def counted(count: int, noun: str) -> str:
    """Format a count: 1 trial, 2 trials."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _op_name(op: str) -> str:
    if op not in (*OPS, "permute"):
        raise unknown("--op", op, OPS)
    return "permute" if op == "transpose" else op


def _single_op_name(op: str) -> str:
    if op not in (*SINGLE_OPS, "permute"):
        raise unknown("--op", op, SINGLE_OPS)
    return _op_name(op)


def _dtype_name(dtype: str) -> str:
    name = dtype.strip().lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


def _json(context: typer.Context, on: bool) -> bool:
    """With --json, send everything but the JSON to standard error."""
    if on:
        console.stderr = True
        context.call_on_close(lambda: setattr(console, "stderr", False))
    return on


Shapes = Annotated[
    list[str] | None,
    typer.Argument(
        help="MxNxK or BxMxNxK, like 4096x4096x4096; MxN with --op transpose. A single shape may have spaces "
        "for x."
    ),
]
Shape = Annotated[
    list[str],
    typer.Argument(help="MxNxK or BxMxNxK; MxN or BxMxN with --op transpose. Spaces may stand for x."),
]
Suite = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        help=f"A suite ({', '.join(SUITES)}) or a .toml file of one. May be repeated.",
        autocompletion=completes(SUITES),
    ),
]
Op = Annotated[
    str,
    typer.Option(
        help="For shapes: matmul, grouped (groups x M x N x K), transpose (rows x columns) or "
        "linear_quantized (layout int4/128).",
        callback=_op_name,
        autocompletion=completes(OPS),
    ),
]
SingleOp = Annotated[
    str,
    typer.Option(
        help="matmul, or transpose (rows x columns).",
        callback=_single_op_name,
        autocompletion=completes(SINGLE_OPS),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="For shapes: a dtype by torch's name, or short like bf16.",
        callback=_dtype_name,
        autocompletion=completes([*_DTYPES, *dict.fromkeys(_DTYPES.values())]),
    ),
]
Only = Annotated[str, typer.Option(help='Only cases whose name contains this, like "NT bfloat16".')]
Layout = Annotated[
    str,
    typer.Option(
        help="For shapes: NN, NT, TN or TT.",
        callback=lambda layout: layout.upper() if layout.isalpha() else layout,
        autocompletion=completes(("NN", "NT", "TN", "TT")),
    ),
]
ConfigText = Annotated[
    str,
    typer.Option(
        "--config",
        help='Parameters of a config, like "tile BLOCK_M=64". Default: the config that a call would use, or '
        "the fastest of tritile's where a call runs torch's kernel.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help=f"A GPU, installed or not: {', '.join(GPUS)}; or a name like nvidia-h200, sm_90, gfx942.",
        autocompletion=completes(GPUS),
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", callback=_json, is_eager=True, help="Print one JSON value, and nothing else."),
]


def print_json(value: object) -> None:
    """Print a value as JSON on standard output, with null for numbers that are not finite."""
    finite = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
    print(json.dumps(finite, indent=1))


def number(value: object, form: str = "", bad: bool = False) -> Text:
    """Return a right-aligned cell; empty for None, red if `bad`."""
    text = "" if value is None else format(value, form)
    return Text(text, style="bold red" if bad else "", justify="right")


def print_table(
    rows: Sequence[Mapping[str, str | Text]],
    title: str = "",
    same: Iterable[str] = (),
    styles: Sequence[str] = (),
    to: Console = console,
) -> None:
    """Print one or more rows of cells by column; `styles` are the rows' styles.

    Columns in `same` move to the title if their value is the same in all rows.
    """
    in_title = {name: str(rows[0][name]) for name in same if len({str(row[name]) for row in rows}) == 1}
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = [name for name in rows[0] if name not in in_title]
    for name in names:
        made.add_column(name, justify=getattr(rows[0][name], "justify", "left"), overflow="fold")
    for row, style in zip_longest(rows, styles):
        made.add_row(*(Text(c) if isinstance(c := row[name], str) else c for name in names), style=style)
    heading = ", ".join(filter(None, (title, *in_title.values())))
    if heading:
        print_folded(Text(heading, style="bold"), to)
    print_folded(made, to)


def print_folded(what: Text | Table, to: Console = console) -> None:
    """Print text or a table, folded to the width of a terminal, in full to a pipe or file."""
    wide = Console(file=to.file, width=_UNFOLDED, markup=False, highlight=False, color_system=None)
    (to if to.is_terminal else wide).print(what, soft_wrap=False)


def classes_of(made: "Predictor") -> dict[str, dict[str, Any]]:
    """Return the number of configs and the loss of each class of a predictor, for JSON."""
    return {name: {"configs": len(own.columns), **own.loss._asdict()} for name, own in made.classes.items()}


def measured_on(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the GPUs and versions of results."""
    names = ("gpu", "torch", "triton")
    found = [" / ".join(dict.fromkeys(line["env"][name] for line in results)) for name in names]
    return f"{found[0] or 'no GPU'}, torch {found[1]}, triton {found[2]}"


def joined(sizes: Sequence[str]) -> str:
    """Join the words of a shape: 64 32 16 and 64 x 32 x 16 are 64x32x16."""
    return re.sub(r" *[xX] *| +", "x", " ".join(sizes).strip())


def cases_of(
    shapes: list[str] | None, names: list[str] | None, op: str, dtype: str, layout: str, only: str = ""
) -> "list[Case]":
    """Return the cases of shapes and suites, by default of suite "quick", with `only` in their names.

    Raises InvalidValueError if there is none.
    """
    from tritile.tune import suites

    texts = shapes or []
    if texts and all(text.isdecimal() or text in "xX" for text in texts):
        texts = [" ".join(texts)]  # one shape, written with spaces
    cases = [suites.parse_shape(joined([text]), op, dtype, layout) for text in texts]
    for name in dict.fromkeys(names or ([] if cases else ["quick"])):
        if name.endswith(".toml"):
            if not Path(name).exists():
                raise FileError(f"--suite {name}: no such file")
            cases += suites.load(Path(name))
        elif name not in SUITES:
            raise unknown("--suite", name, SUITES)
        else:
            cases += suites.find([name], suites.SHIPPED)
    cases = [case for case in cases if only in case.problem.label]
    if only and not cases:
        raise InvalidValueError(f"--only {only!r}: no case has that in its name")
    return cases


def as_called(cases: "Iterable[Case]") -> "list[Case]":
    """Return the cases; float32 in "ieee" gets the precision of a call that does not name one."""
    from tritile.families import numerics

    found = list(cases)
    for i, case in enumerate(found):
        problem = case.problem
        if numerics.with_default_precision(problem) is not problem:
            found[i] = replace(case, precision=numerics.BY_DATA)
    return found


def problems_of(cases: "Iterable[Case]", device: "Device") -> "list[Tiled]":
    """Return the problems of calls, each once; batch-invariant ones if that is set for the process.

    Then products that batch-invariant calls cannot have are left out, with a message.
    """
    from tritile.families import numerics

    problems = dict.fromkeys(case.problem for case in as_called(cases))
    if not is_batch_invariant():
        return list(problems)
    refused = [problem for problem in problems if numerics.by_data(problem)]
    for problem in refused:
        say(f"{problem.label}: left out, as no batch-invariant call has its precision")
    return [numerics.as_invariant(problem) for problem in problems if problem not in refused]


_LINE_S: Final = 10.0  # between lines of progress where there is no terminal, as in a build of an image


class _Progress(Progress):
    """A bar on a terminal, else a line now and then."""

    def __init__(self, *columns: Any, lines: bool, **how: Any) -> None:
        super().__init__(*columns, **how)
        self._lines, self._begun = lines, time.monotonic()
        self._last = self._begun

    def update(self, task_id: Any, **how: Any) -> None:
        super().update(task_id, **how)
        now = time.monotonic()
        if self._lines and now - self._last >= _LINE_S:
            self._last = now
            task = next(each for each in self.tasks if each.id == task_id)
            of = "" if task.total is None else f" of {task.total:.0f}"
            notes.print(f"{task.description}: {task.completed:.0f}{of} after {now - self._begun:.0f} s")


def progress(shown: bool = True) -> Progress:
    """Return progress on standard error, with counts and time: a bar, or lines where there is no terminal."""
    columns = (
        TextColumn("{task.description}", justify="left", markup=False),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    on_terminal = notes.is_terminal
    lines = shown and not on_terminal
    return _Progress(*columns, console=notes, disable=not (shown and on_terminal), lines=lines)


@contextmanager
def working(on: str) -> Iterator[None]:
    """Show on a terminal that something takes a while, without a count."""
    with progress() as bar:
        bar.add_task(on, total=None)
        yield


def say(text: str) -> None:
    """Print a failure that does not end the command on standard error, above any progress bar."""
    notes.print(text, style="red")


@contextmanager
def interruptible(budget_s: float | None = None) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns False after `budget_s` seconds, or Ctrl-C; a second one interrupts."""
    stopping, end = False, math.inf if budget_s is None else time.monotonic() + budget_s

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        say("stopping after this problem; Ctrl-C again to stop now")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: not stopping and time.monotonic() < end
    finally:
        signal.signal(signal.SIGINT, before)


def device_of(target: str | None, otherwise: str | None = None) -> "Device":
    """Return the GPU named `target`, else the current one, else the one named `otherwise`.

    Raises InvalidValueError for an unknown name, and if there is no GPU.
    """
    from tritile.core import device as devices

    if target is None and (otherwise is None or devices.current_gpu() is not None):
        return gpu_here("name one, as --target h200")
    if target is None:
        assert otherwise is not None
        notes.print(f"there is no GPU here: this is for an {otherwise.upper()}; --target names another")
        target = otherwise
    if devices.target_key(target) is None:
        hint = did_you_mean(target, (*GPUS, *devices.SHORT.values()))
        names = ", ".join(f"{short} ({full})" for short, full in devices.SHORT.items())
        expected = f"expected one of {names}; for others see the page 'Add my GPU'"
        raise InvalidValueError(f"--target {target!r}{hint}: {expected}")
    return devices.target_device(target)


def gpu_here(advice: str = "nothing can be measured") -> "Device":
    """Return the current GPU. Raises InvalidValueError without one."""
    from tritile.core import device as devices

    device = devices.current_gpu()
    if device is None:
        raise InvalidValueError(f"there is no GPU here: {advice}")
    return device


def import_from_here() -> None:
    """Let modules of the current folder be imported, as `python -m` does."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def object_named(where: str, name: str) -> Any:
    """Return what "module:name" names; modules of the current folder count. Raises InvalidValueError."""
    module, colon, rest = name.partition(":")
    if not (module and colon and rest):
        raise InvalidValueError(f"{where} {name!r}: expected module:name, like train:step")
    if module.endswith(".py"):
        raise InvalidValueError(f"{where} {name}: expected a module, not a file: {module[:-3]}:{rest}")
    import_from_here()
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidValueError(f"{where} {name}: {error}") from error


def function_named(where: str, name: str) -> Callable[..., Any]:
    """Return the function that "module:name" names. Raises InvalidValueError if it is none."""
    function = object_named(where, name)
    if not callable(function):
        raise InvalidValueError(f"{where} {name}: {type(function).__name__} is not a function")
    return cast(Callable[..., Any], function)


def check_output(path: Path | None, *suffixes: str, folder: bool = False, option: str = "--output") -> None:
    """Raise InvalidValueError, naming the option, if a path cannot be written to; before any work.

    `suffixes` are those that a file may have. `write` makes missing folders.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise InvalidValueError(f"{option} {path}: expected a name that ends in {' or '.join(suffixes)}")
    if folder and path.suffix in (".json", ".jsonl") and not path.is_dir():
        raise InvalidValueError(f"{option} {path}: expected a folder, in which files are written")
    if path.is_dir() and not folder:
        raise InvalidValueError(f"{option} {path} cannot be written: it is a folder")
    place = path.absolute() if folder else path.absolute().parent
    there = next(each for each in (place, *place.parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise InvalidValueError(
            f"{option} {path} cannot be written: {there} is not a folder that is writable"
        )


def write(path: Path, data: str) -> None:
    """Write a file atomically, and make its folders. Raises OSError."""
    from tritile.tuner.store.files import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)
