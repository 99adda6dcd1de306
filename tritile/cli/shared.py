"""Hold what the commands share: options, the console, progress and stopping."""

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, Tiled
from tritile.core.settings import is_batch_invariant
from tritile.errors import InvalidValueError, UnsupportedError
from tritile.families import numerics
from tritile.tune import suites

SUITES = suites.SHIPPED
_CHECKOUT = Path(__file__).parents[2]

app = typer.Typer()  # takes the commands of the modules that are imported
console = Console(markup=False)  # brackets in data are no markup

Shapes = Annotated[list[str] | None, typer.Argument(help="M x N x K, or B x M x N x K, as 4096x4096x4096.")]
Suite = Annotated[list[str] | None, typer.Option("--suite", help="A suite by name; may be repeated.")]
Directory = Annotated[Path, typer.Option("--suites", help="The folder of the suite files.")]
Op = Annotated[
    str,
    typer.Option(
        help="Of explicit shapes: matmul, grouped (groups x M x N x K), permute (rows x columns) or "
        "linear_quantized (layout int4/128)."
    ),
]
Dtype = Annotated[str, typer.Option(help="Of explicit shapes: torch's name.")]
Only = Annotated[str, typer.Option(help='Only cases whose name holds this, as "NT bfloat16".')]
Layout = Annotated[str, typer.Option(help="Of explicit shapes: NN, NT, TN or TT.")]
Target = Annotated[
    str | None,
    typer.Option(help=f"A GPU that need not be here: {', '.join(devices.TARGETS)}. Predicts and compiles."),
]
Jobs = Annotated[int, typer.Option(min=0, help="Processes that compile; 0: one a core, 16 at most.")]
BatchInvariant = Annotated[
    bool | None,
    typer.Option(
        "--batch-invariant/--any-batch",
        help="For calls inside tritile.batch_invariant(). Default: as TRITILE_BATCH_INVARIANT says.",
    ),
]


def kept(folder: str) -> Path | None:
    """Return a folder of `tuning` in this checkout, None where tritile is installed without one."""
    there = _CHECKOUT / "tuning" / folder
    return there if (_CHECKOUT / "pyproject.toml").is_file() and there.is_dir() else None


def cases_of(
    shapes: list[str] | None, names: list[str] | None, folder: Path, op: str, dtype: str, layout: str,
    only: str = "",
) -> list[suites.Case]:  # fmt: skip
    """Return the cases of explicit shapes and of suites whose names hold `only`; by default, suite "quick".

    Raises InvalidValueError where there is no folder of suites, or no such case.
    """
    given = [suites.parse_shape(text, op, dtype, layout) for text in shapes or []]
    wanted = names or ([] if given else ["quick"])
    if wanted and not folder.is_dir():
        raise InvalidValueError(
            f"there is no folder of suites at {folder}: name one with --suites, or give shapes"
        )
    cases = [case for case in given + suites.find(wanted, folder) if only in case.problem.label]
    if only and not cases:
        raise InvalidValueError(f"--only {only!r}: no case has that in its name")
    return cases


def as_called(
    cases: Iterable[suites.Case], device: Device | None, invariant: bool | None = None
) -> list[suites.Case]:
    """Return the cases, those of float32 in "ieee" as a call makes them where no precision is named."""
    if device is None or (is_batch_invariant() if invariant is None else invariant):
        return list(cases)
    found = []
    for case in cases:
        if case.op == "matmul" and case.precision == "ieee":
            problem = numerics.unnamed(case.problem, device)
            if isinstance(problem, MatmulProblem):
                case = replace(case, precision=problem.precision)
        found.append(case)
    return found


def problems_of(cases: Iterable[suites.Case], invariant: bool | None) -> list[Tiled]:
    """Return the problems of cases, each once: of batch-invariant calls, if so asked or set for the process.

    Leave out products that no batch-invariant call can ask for, and say so.
    """
    problems = dict.fromkeys(case.problem for case in cases)
    if not (is_batch_invariant() if invariant is None else invariant):
        return list(problems)
    refused = [problem for problem in problems if numerics.by_data(problem)]
    for problem in refused:
        console.print(f"{problem.label}: left out, as no batch-invariant call has its precision")
    return [numerics.in_one_way(problem) for problem in problems if problem not in refused]


def progress() -> Progress:
    """Return a bar of how many are done, of how many, and how long; shown only on a terminal."""
    columns = (
        TextColumn("{task.description}", justify="left", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def say(text: str) -> None:
    """Print what went wrong without ending a command, above a bar that is shown meanwhile."""
    console.print(text, style="red", highlight=False)


@contextmanager
def interruptible(budget_s: float | None = None) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether to go on: False after so many seconds, or Ctrl-C.

    A second Ctrl-C stops at once.
    """
    stopping, end = False, math.inf if budget_s is None else time.monotonic() + budget_s

    def ask(number: int, frame: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        console.print("stopping after this problem; Ctrl-C again to stop now")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: not stopping and time.monotonic() < end
    finally:
        signal.signal(signal.SIGINT, before)


def device_of(target: str | None) -> Device:
    """Return the GPU that is named, else the current one. Raises InvalidValueError where there is none."""
    return devices.target_device(target) if target else gpu_here("name one with --target nvidia-h200")


def gpu_here(advice: str = "nothing can be measured") -> Device:
    """Return the current GPU. Raises InvalidValueError where there is none."""
    device = devices.current_gpu()
    if device is None:
        raise InvalidValueError(f"there is no GPU here: {advice}")
    return device


PICTURES = dict.fromkeys((".svg", ".png", ".html"), ("altair", "vl_convert", "jinja2"))  # what each needs


def check_output(path: Path | None, needs: Mapping[str, Sequence[str]]) -> None:
    """Raise before any work where a file cannot be written; `needs` has packages by suffix.

    Raises InvalidValueError for another suffix and where there is no folder; UnsupportedError where a package
    is missing.
    """
    if path is None:
        return
    if path.suffix not in needs:
        raise InvalidValueError(f"{path}: wanted a name that ends in {' or '.join(needs)}")
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidValueError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    missing = [name for name in needs[path.suffix] if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"{path.suffix} needs {', '.join(missing)}: pip install 'tritile[report]'")
