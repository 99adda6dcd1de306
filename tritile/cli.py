"""The command line: tritile tune, bench, show, export, merge, doctor."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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
from rich.table import Table as RichTable

from tritile import device as devices
from tritile import launch, table
from tritile.device import Device
from tritile.errors import InvalidValueError, TritileError
from tritile.problem import problem_key
from tritile.report import console as printing
from tritile.report import doctor as diagnosis
from tritile.report import peers
from tritile.report import run as benchmark
from tritile.report.environment import environment
from tritile.settings import cache_dir
from tritile.store import store_of
from tritile.trial import Trial
from tritile.tune import suites, tuner
from tritile.tune.worker import CompilePool

TUNING = Path(__file__).parents[1] / "tuning"
SUITES, RESULTS = TUNING / "suites", TUNING / "results"

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console(markup=False)  # brackets in data are no markup

Shapes = Annotated[list[str] | None, typer.Argument(help="M x N x K, or B x M x N x K, as 4096x4096x4096.")]
Suite = Annotated[list[str] | None, typer.Option("--suite", help="A suite by name; may be repeated.")]
Directory = Annotated[Path, typer.Option("--suites", help="The folder of the suite files.")]
Op = Annotated[str, typer.Option(help="Of explicit shapes: matmul or permute (rows x columns).")]
Dtype = Annotated[str, typer.Option(help="Of explicit shapes: torch's name.")]
Layout = Annotated[str, typer.Option(help="Of explicit shapes: NN, NT, TN or TT.")]
Target = Annotated[
    str | None,
    typer.Option(help=f"A GPU that need not be here: {', '.join(devices.TARGETS)}. Predicts and compiles."),
]


def _cases(
    shapes: list[str] | None, names: list[str] | None, folder: Path, op: str, dtype: str, layout: str
) -> list[suites.Case]:
    given = [suites.parse_shape(text, op, dtype, layout) for text in shapes or []]
    wanted = names or ([] if given else ["quick"])
    if wanted and not folder.is_dir():
        raise InvalidValueError(
            f"there is no folder of suites at {folder}: name one with --suites, or give shapes"
        )
    return given + suites.find(wanted, folder)


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}", justify="left", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _say(text: str) -> None:
    """What went wrong without ending a command. A bar that is shown meanwhile stays below it."""
    console.print(text, style="red", highlight=False)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop after the problem in hand; a second one stops at once. Nothing is lost."""
    stopping = False

    def ask(number: int, frame: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        console.print("stopping after this problem; Ctrl-C again to stop now")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: not stopping
    finally:
        signal.signal(signal.SIGINT, before)


def _tune_here(cases: list[suites.Case], device: Device, budget: float | None, force: bool, jobs: int) -> int:
    problems = list(dict.fromkeys(case.problem for case in cases))
    todo = [problem for problem in problems if force or not tuner.is_tuned(problem, device)]
    console.print(
        f"{device.name}: {len(todo)} of {len(problems)} problems to tune, the others are remembered"
    )
    failed = 0
    with _interruptible() as keep_on, CompilePool(jobs or None) as pool, _progress() as bar:
        task = bar.add_task("tuning", total=len(todo))
        for done in tuner.tune(todo, device, pool, budget, force, keep_on):
            failed += done.best is None
            bar.update(task, advance=1, description=done.problem.label)
            if done.best is None:
                bar.console.print(f"{done.problem.label}: {done.failure}", style="red")
            elif not console.is_terminal:
                console.print(
                    f"{done.problem.label}: {done.best.us:.1f} us, {done.best.config} "
                    f"({done.trials} configs, {done.seconds:.1f} s)",
                    highlight=False,
                )
    left = sum(not tuner.is_tuned(problem, device) for problem in todo)
    if left > failed:
        console.print(f"{left - failed} problems are left: the same command goes on with them")
    console.print(f"remembered in {store_of(device).path}")
    return left


def _tune_target(cases: list[suites.Case], device: Device, output: Path, jobs: int) -> int:
    problems = list(dict.fromkeys(case.problem for case in cases))
    console.print(f"{device.name} is not here: configs are predicted and compiled for it, not timed")
    entries, failed = [], 0
    with CompilePool(jobs or None) as pool, _progress() as bar:
        task = bar.add_task("predicting", total=len(problems))
        for problem in problems:
            config, refused = tuner.predict(problem, device, pool)
            bar.update(task, advance=1, description=problem.label)
            failed += config is None
            note = f" after {len(refused)} refused" if refused else ""
            console.print(f"{problem.label}: {config or 'nothing compiles'}{note}", highlight=False)
            for reason in refused[:2]:
                console.print(f"  refused {reason}", highlight=False, style="dim")
            if config is not None:
                entries.append(table.Entry(problem, config, None))
    kernels = launch.digests()
    table.write(table.Table(device.to_dict(), False, kernels, tuple(entries)), output)
    console.print(f"{len(entries)} predicted configs written to {output}")
    return failed


@app.command()
def tune(
    shapes: Shapes = None,
    suite: Suite = None,
    suites_dir: Directory = SUITES,
    op: Op = "matmul",
    dtype: Dtype = "bfloat16",
    layout: Layout = "NN",
    budget: Annotated[float | None, typer.Option(min=0.001, help="Seconds to spend at the most.")] = None,
    force: Annotated[bool, typer.Option(help="Measure again what is tuned already.")] = False,
    target: Target = None,
    output: Annotated[Path | None, typer.Option(help="With --target: the table to write.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes that compile; 0: one a core, 16 at most.")] = 0,
) -> None:
    """Measure configs for problems on this GPU and remember the best; or predict them for a --target.

    The exit status is 1 where problems are left untuned: out of time, stopped, or no config works.
    """
    cases = _cases(shapes, suite, suites_dir, op, dtype, layout)
    if target is not None:
        device = devices.target_device(target)
        failed = _tune_target(cases, device, output or Path(f"{device.slug}-predicted.json"), jobs)
    else:
        here = devices.current_gpu()
        if here is None:
            raise InvalidValueError(
                f"there is no GPU here to measure: --target {next(iter(devices.TARGETS))} predicts for one"
            )
        failed = _tune_here(cases, here, budget, force, jobs)
    if failed:
        raise typer.Exit(1)


@app.command()
def bench(
    shapes: Shapes = None,
    suite: Suite = None,
    suites_dir: Directory = SUITES,
    op: Op = "matmul",
    dtype: Dtype = "bfloat16",
    layout: Layout = "NN",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Besides torch: {', '.join(peers.PEERS)}; may be repeated. Takes seconds a product."
        ),
    ] = None,
    only: Annotated[str, typer.Option(help='Only cases whose name holds this, as "NT bfloat16".')] = "",
    results: Annotated[
        Path | None, typer.Option(help="Folder: a .jsonl file for each suite is appended to.")
    ] = None,
    quiet: Annotated[bool, typer.Option(help="Print the summary only.")] = False,
    compare: Annotated[
        bool, typer.Option(help="Measure nothing: show results (of files or folders named) beside targets.")
    ] = False,
) -> None:
    """Time tritile against torch and other peers, side by side, with the configs that calls would use."""
    if compare:
        places = [Path(text) for text in shapes or []] or [results or RESULTS]
        printing.print_targets(benchmark.stored(places, _say))
        return
    here = devices.current_gpu()
    if here is None:
        raise InvalidValueError("there is no GPU here to measure")
    names, env = peers.check_names(peer or []), environment(here)
    cases = [c for c in _cases(shapes, suite, suites_dir, op, dtype, layout) if only in c.problem.label]
    if not cases:
        raise InvalidValueError(f"--only {only!r}: no case has that in its name")
    with _progress() as bar:
        task = bar.add_task("measuring", total=len(cases))
        lines, failed = benchmark.run_cases(
            cases, names, env, results, _say, lambda label: bar.update(task, advance=1, description=label)
        )
    if not quiet:
        printing.print_results(lines, console)
    printing.print_summary(lines, console)
    printing.print_host(benchmark.run_host(env, results), console)
    if failed:
        raise typer.Exit(1)


@app.command()
def show(
    target: Target = None,
    trials: Annotated[bool, typer.Option(help="Every trial, not only the best of each problem.")] = False,
) -> None:
    """What is remembered of this GPU (or of --target) and counts today: the best config of each problem."""
    device = _device(target)
    names = ("problem", "us", "spread", "regs", "spills", "shared", "error", "config", "measured")
    grid = RichTable(*names)
    rows = [trial for facts, trial in store_of(device).everything() if _current(facts, trial, device)]
    if not trials:
        best: dict[str, Trial] = {}
        for trial in sorted(rows, key=lambda t: (t.failure is not None, t.error is None, t.us or 0)):
            best.setdefault(problem_key(trial.problem), trial)
        rows = list(best.values())
    for trial in rows:
        numbers = (trial.spread, trial.registers, trial.spills, trial.shared, trial.error)
        shown = ("" if v is None else f"{v:.2g}" if isinstance(v, float) else str(v) for v in numbers)
        us = f"{trial.us:.1f}" if trial.us else (trial.failure or "")
        grid.add_row(trial.problem.label, us, *shown, str(trial.config), trial.measured_utc)
    console.print(grid)
    console.print(f"{len(rows)} rows from {store_of(device).path}")


def _current(facts: dict[str, Any], trial: Trial, device: Device) -> bool:
    """Whether a trial counts today: of this GPU, these versions and, for our own kernels, this source."""
    own = launch.KERNELS.get(trial.problem.op, {}).get(trial.config.family)
    same = all(value == getattr(device, name) for name, value in facts.items() if name != "kernel")
    return same and (own is None or facts["kernel"] == own.digest)


def _device(target: str | None) -> Device:
    device = devices.target_device(target) if target else devices.current_gpu()
    if device is None:
        raise InvalidValueError(f"there is no GPU here: name one with --target {next(iter(devices.TARGETS))}")
    return device


@app.command()
def export(
    output: Annotated[Path | None, typer.Argument(help="The table to write; default <gpu>.json.")] = None,
    target: Target = None,
    replace: Annotated[bool, typer.Option(help="Replace a table that knows more, or another GPU's.")] = False,
) -> None:
    """Write the best remembered configs of this GPU as a table that can be shipped.

    A table that lies there already keeps its entries for problems that are not remembered. One that
    would lose entries, or is of another GPU, is replaced only with --replace.
    """
    device = _device(target)
    kernels = launch.digests()
    made = table.from_store(store_of(device), device, kernels)
    path = output or Path(f"{device.slug}.json")
    if path.exists() and not replace:
        old = table.read(path)
        made = table.completed(made, old)
        if old.device["name"] != device.name or len(made.entries) < len(old.entries):
            raise InvalidValueError(
                f"{path} holds {len(old.entries)} entries of {old.device['name']}; {len(made.entries)} of "
                f"{device.name} would stand in their place: --replace writes them"
            )
    if not made.entries:
        raise InvalidValueError(f"nothing is remembered of {device.name}: tune it first")
    table.write(made, path)
    console.print(f"{len(made.entries)} entries written to {path}")


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Stores of the same GPU model, from other machines.")],
    target: Target = None,
) -> None:
    """Add the trials of other stores to this one; where both have one, the newer stays."""
    store = store_of(_device(target))
    for path in files:
        console.print(f"{path}: {store.merge(path)} trials added to {store.path}")


@app.command()
def doctor() -> None:
    """Versions, GPU, driver, cache, whether a kernel runs, and what to do about what is missing."""
    findings = diagnosis.examine(cache_dir())
    grid = RichTable("what", "found", "to do", show_lines=False)
    for finding in findings:
        grid.add_row(finding.name, finding.found, finding.advice, style=None if finding.good else "red")
    console.print(grid)
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line. An error of ours, or of a file, is one line on standard error, and status 2."""
    try:
        app()
    except (TritileError, OSError) as error:
        print(f"tritile: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
