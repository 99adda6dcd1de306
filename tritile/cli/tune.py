"""Measure configs and remember the best: `tritile tune`.

`calibrating` has what the option --calibrate asks for.
"""

import contextlib
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tritile.cli import calibrating, shared
from tritile.cli.shared import app, console, interruptible
from tritile.cli.watching import Watch
from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError, TritileError
from tritile.planning import gpu_tables, plans
from tritile.planning.classes import MEASURED
from tritile.planning.store import Store, store_of
from tritile.planning.trial import Trial
from tritile.tune import now, tuner
from tritile.tune.measure.child import ForkServer
from tritile.tune.measure.pool import processes_for
from tritile.tune.measure.tasks import Rules, keeper, whole
from tritile.tune.measure.workshop import Workshop
from tritile.tune.search import STRATEGIES
from tritile.tune.subject import is_tuned

VERIFY = ("winner", "all")


@dataclass(frozen=True)
class _Wish:
    """Hold what the options ask for."""

    budget: float | None
    force: bool
    jobs: int | None
    rules: Rules
    log: Path | None
    fork_server: ForkServer
    as_json: bool = False


@dataclass(frozen=True)
class _Ranks:
    """Hold the place of this process among those that torchrun started: by itself 0 of 1.

    Rank i takes every n-th problem of the list. Ranks need not know of each other: those of one host write to
    its one store.
    """

    rank: int = 0
    size: int = 1
    on_host: int = 0
    of_host: int = 1

    @classmethod
    def from_environment(cls) -> "_Ranks":
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises InvalidValueError for nonsense."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        given = {name: os.environ.get(name, "") for name in names}
        numbers = [int(text) if text.isdecimal() else -1 for text in given.values()]
        rank, size, on_host, of_host = numbers
        if not (0 <= rank < size and 0 <= on_host < of_host):
            raise InvalidValueError(
                f"{given}: wanted the variables that torchrun sets, or no WORLD_SIZE for one process"
            )
        return cls(rank, size, on_host, of_host)

    def __str__(self) -> str:
        return f"rank {self.rank}: " if self.size > 1 else ""


def _todo(problems: list[Tiled], device: Device, force: bool) -> list[Tiled]:
    todo = [problem for problem in problems if force or not is_tuned(problem, device)]
    console.print(
        f"{device.name}: {len(todo)} of {len(problems)} problems to tune, the others are remembered",
        soft_wrap=True,
    )
    return todo


def _remembered(store: Store) -> str:
    """Write trials that are not written yet; say where they are, or how many are lost."""
    lost = store.flush()
    return (
        f"{lost} trials are lost: {store.path} cannot be written" if lost else f"remembered in {store.path}"
    )


def _told(watch: Watch, device: Device, wish: _Wish, left: int, ranks: _Ranks) -> None:
    """Print how a search ended: one line, or JSON."""
    where = _remembered(store_of(device))
    if wish.as_json:
        told = {"gpu": device.name, "seconds": watch.seconds, "left": left, "store": store_of(device).path}
        shared.print_json(told | {"problems": watch.to_list()})
        return
    if watch.failures:
        console.print(f"configs that failed: {watch.reasons}", soft_wrap=True)
    console.print(f"{ranks}{watch.summary()}; {where}", soft_wrap=True)


def _tune_here(problems: list[Tiled], device: Device, wish: _Wish, ranks: _Ranks) -> int:
    """Tune on the current GPU; return how many problems are left."""
    jobs = wish.jobs or processes_for(ranks.of_host)
    todo, failed = _todo(problems, device, wish.force), 0
    index, remember = devices.current_index(), keeper(store_of(device), wish.log)
    watch = Watch(len(todo), device, wish.budget)

    def keep(digest: str, trial: Trial) -> None:
        remember(digest, trial)
        watch.tried(trial)

    with interruptible(wish.budget) as keep_on:
        shown = watch.shown() if ranks.size == 1 else contextlib.nullcontext()
        with Workshop(index, jobs, fork_server=wish.fork_server) as shop, shown:
            for done in tuner.tune(todo, device, shop, keep, wish.rules, wish.force, keep_on):
                failed += done.best is None
                watch.done(done, str(ranks))
        with shared.working("timing torch"):
            watch.know_torch(lambda problem: now.beside_torch(problem, device, index or 0), keep_on)
    left = sum(not is_tuned(problem, device) for problem in todo)
    if left > failed:
        console.print(f"{ranks}{left - failed} problems are left: the same command goes on with them")
    _told(watch, device, wish, left, ranks)
    return left


def _race_here(problems: list[Tiled], device: Device, wish: _Wish, ranks: _Ranks) -> int:
    """Race the likeliest configs of each problem, as mode "tune" does at a call; return how many are left."""
    todo = [problem for problem in problems if wish.force or not plans.trials(problem, device)]
    console.print(f"{ranks}{device.name}: {len(todo)} of {len(problems)} problems to race")
    failed, gpu, configs = 0, devices.current_index() or 0, dict[str, Any]()
    with interruptible() as keep_on:
        for done, problem in enumerate(todo):
            if not keep_on():
                failed += len(todo) - done
                break
            try:
                config = now.tuned_now(problem, device, gpu)
                configs[problem.label] = config.to_dict()
                console.print(f"{ranks}{problem.label}: {config}", soft_wrap=True)
            except TritileError as error:
                failed += 1
                shared.say(f"{ranks}{problem.label}: {error}")
    console.print(_remembered(store_of(device)), soft_wrap=True)
    if wish.as_json:
        shared.print_json({"gpu": device.name, "left": failed, "configs": configs})
    return failed


def _among(name: str, value: str, wanted: tuple[str, ...]) -> str:
    if value not in wanted:
        raise InvalidValueError(f"--{name} {value!r}: wanted one of {', '.join(wanted)}")
    return value


Budget = Annotated[float | None, typer.Option(min=0.001, help="Seconds to spend at the most.")]
Force = Annotated[bool, typer.Option(help="Measure again what is tuned already.")]
Search = Annotated[
    bool, typer.Option(help="Search for seconds; or race the likeliest few, as mode tune does at a call.")
]
Strategy = Annotated[str, typer.Option(help=f"How to search: {', '.join(STRATEGIES)}.")]
Verify = Annotated[str, typer.Option(help="Whose answers to check: winner or all.")]
Log = Annotated[Path | None, typer.Option(help="Append every trial to this file, a JSON line each.")]
Calibrate = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Measure the configs of a class of problems at drawn sizes: {', '.join(MEASURED)}, or all. "
        "May be repeated. Calls of any size then run with the config predicted to be the fastest."
    ),
]
Sizes = Annotated[int, typer.Option(min=8, help="With --calibrate: how many sizes.")]
Configs = Annotated[
    int | None,
    typer.Option(min=8, help=f"With --calibrate: how many configs to time, default {calibrating.TIMED}."),
]
Sweeps = Annotated[
    Path | None, typer.Option(help="With --calibrate: a folder for every time that was measured.")
]
Output = Annotated[Path | None, typer.Option(help="With --calibrate: the table to write.")]


def _rules(strategy: str, verify: str) -> Rules:
    """Return the rules that the options ask for. Strategy "exhaustive" has no limit of time."""
    rules = Rules(strategy, verify_all=_among("verify", verify, VERIFY) == "all")
    return whole(replace(rules, problem_s=math.inf)) if strategy == "exhaustive" else rules


def _calibrate(
    names: list[str],
    sizes: int,
    configs: int | None,
    budget: float | None,
    output: Path | None,
    sweeps: Path | None,
    as_json: bool,
) -> None:
    """Measure portfolios of classes on the current GPU."""
    shared.check_output(output)
    shared.check_folder(sweeps)
    calibrating.classes_of(names)
    device = shared.gpu_here()
    calibrating.calibrate(names, device, sizes, configs, budget or math.inf, output, sweeps)
    if as_json:
        path = output or gpu_tables.calibrated_path(device)
        shared.print_json({"gpu": device.name, "table": path} | calibrating.found(path))


@app.command()
def tune(
    context: typer.Context,
    shapes: shared.Shapes = None,
    suite: shared.Suite = None,
    suites_dir: shared.Directory = shared.SUITES,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    only: shared.Only = "",
    budget: Budget = None,
    force: Force = False,
    search: Search = True,
    strategy: Strategy = Rules.strategy,
    verify: Verify = "winner",
    log: Log = None,
    calibrate: Calibrate = None,
    sizes: Sizes = 200,
    configs: Configs = None,
    sweeps: Sweeps = None,
    output: Output = None,
    batch_invariant: shared.BatchInvariant = None,
    jobs: shared.Jobs = 0,
    as_json: shared.Json = False,
) -> None:
    """Measure configs for problems on this GPU and remember the best.

    Started by torchrun, rank i of n takes every n-th problem, on its own GPU. Ranks of one host remember in
    its one store; `tritile merge` joins those of several hosts.

    The exit status is 1 where problems are left untuned: out of time, stopped, or no config works. That of a
    rank is 0 then, as torchrun would stop the other ranks.
    """
    fork_server = ForkServer(forked=True)  # before a GPU is in use
    context.call_on_close(fork_server.close)
    _among("strategy", strategy, tuple(STRATEGIES))
    ranks = _Ranks.from_environment()
    if ranks.size > 1 and (calibrate or as_json):
        raise InvalidValueError("--calibrate and --json are for one process, not for ranks of torchrun")
    if calibrate:
        return _calibrate(calibrate, sizes, configs, budget, output, sweeps, as_json)
    if output is not None:
        raise InvalidValueError("--output is for --calibrate; what is measured is remembered")
    shared.check_output(log)
    wish = _Wish(budget, force, jobs or None, _rules(strategy, verify), log, fork_server, as_json)
    cases = shared.cases_of(shapes, suite, suites_dir, op, dtype, layout, only)
    if not search and (budget is not None or log is not None):
        raise InvalidValueError("--no-search takes neither --budget nor --log")
    if ranks.size > 1:
        devices.use(ranks.on_host)
    device = shared.gpu_here()
    problems = shared.problems_of(shared.as_called(cases, device, batch_invariant), batch_invariant)
    problems = problems[ranks.rank :: ranks.size]
    left = (_tune_here if search else _race_here)(problems, device, wish, ranks)
    if left and ranks.size == 1:
        raise typer.Exit(1)
