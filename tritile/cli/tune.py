"""Measure configs and remember the best: `tritile tune`.

`calibrating` has what the option --calibrate asks for, `tune_modes` what --model and --target do.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tritile.cli import calibrating, shared, tune_modes
from tritile.cli.shared import app, console, interruptible
from tritile.cli.watching import Watch
from tritile.core import device as devices
from tritile.core import gpus
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError, TritileError
from tritile.planning import gpu_tables, plans
from tritile.planning.classes import MEASURED
from tritile.planning.store import Store, store_of
from tritile.planning.trial import Trial
from tritile.tune import now, tuner
from tritile.tune.calibrate.predict import CONFIGS
from tritile.tune.measure.child import ForkServer
from tritile.tune.measure.pool import processes_for
from tritile.tune.measure.tasks import Rules, keeper, logged, whole
from tritile.tune.measure.workshop import Workshop
from tritile.tune.search import STRATEGIES
from tritile.tune.shards import Place, Shards, part
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


def _told(watch: Watch, device: Device, wish: _Wish, left: int, who: str = "") -> None:
    """Print how a search ended: one line, or JSON; `who` names one rank of many."""
    where = _remembered(store_of(device))
    if wish.as_json:
        told = {"gpu": device.name, "seconds": watch.seconds, "left": left, "store": store_of(device).path}
        shared.print_json(told | {"problems": watch.to_list()})
        return
    if watch.failures:
        console.print(f"configs that failed: {watch.reasons}", soft_wrap=True)
    console.print(f"{who}{watch.summary()}; {where}", soft_wrap=True)


def _tune_here(problems: list[Tiled], device: Device, wish: _Wish) -> int:
    """Tune on the current GPU; return how many problems are left."""
    todo, failed = _todo(problems, device, wish.force), 0
    index, remember = devices.current_index(), keeper(store_of(device), wish.log)
    watch = Watch(len(todo), device, wish.budget)

    def keep(digest: str, trial: Trial) -> None:
        remember(digest, trial)
        watch.tried(trial)

    with interruptible(wish.budget) as keep_on:
        with Workshop(index, wish.jobs, fork_server=wish.fork_server) as shop, watch.shown():
            for done in tuner.tune(todo, device, shop, keep, wish.rules, wish.force, keep_on):
                failed += done.best is None
                watch.done(done)
        with shared.working("timing torch"):
            watch.know_torch(lambda problem: now.beside_torch(problem, device, index or 0), keep_on)
    left = sum(not is_tuned(problem, device) for problem in todo)
    if left > failed:
        console.print(f"{left - failed} problems are left: the same command goes on with them")
    _told(watch, device, wish, left)
    return left


def _race_here(problems: list[Tiled], device: Device, wish: _Wish) -> int:
    """Race the likeliest configs of each problem, as mode "tune" does at a call; return how many are left."""
    todo = [problem for problem in problems if wish.force or not plans.trials(problem, device)]
    console.print(f"{device.name}: {len(todo)} of {len(problems)} problems to race")
    failed, gpu, configs = 0, devices.current_index() or 0, dict[str, Any]()
    with interruptible() as keep_on:
        for done, problem in enumerate(todo):
            if not keep_on():
                failed += len(todo) - done
                break
            try:
                config = now.tuned_now(problem, device, gpu)
                configs[problem.label] = config.to_dict()
                console.print(f"{problem.label}: {config}", soft_wrap=True)
            except TritileError as error:
                failed += 1
                shared.say(f"{problem.label}: {error}")
    console.print(_remembered(store_of(device)), soft_wrap=True)
    if wish.as_json:
        shared.print_json({"gpu": device.name, "left": failed, "configs": configs})
    return failed


def _seconds(problem: Tiled) -> float:
    """Return roughly how long a launch takes on a large GPU, to sort problems by."""
    return getattr(problem, "flops", 0) / 5e14 + problem.bytes / 3e12


def _largest_first(problems: list[Tiled], ranks: int) -> list[Tiled]:
    """Return problems so that each rank's part begins with its largest: small ones even out the end."""
    parts = (part(len(problems), rank, ranks) for rank in range(ranks))
    return [p for one in parts for p in sorted((problems[i] for i in one), key=_seconds, reverse=True)]


def _tune_shared(problems: list[Tiled], device: Device, wish: _Wish, place: Place) -> int:
    """Do this rank's part of tuning on many GPUs; return how many problems failed or are left."""
    todo = _largest_first(_todo(problems, device, wish.force), place.size)
    store, failed = store_of(device), 0
    jobs = wish.jobs or processes_for(place.local_size)
    with (
        interruptible(wish.budget) as keep_on,
        Workshop(devices.current_index(), jobs, fork_server=wish.fork_server) as shop,
        Shards(place, todo, store) as shards,
    ):
        remember, watch = logged(shards.keep, wish.log), Watch(len(todo), device, wish.budget)

        def keep(digest: str, trial: Trial) -> None:
            remember(digest, trial)
            watch.tried(trial)

        def going() -> bool:
            return keep_on() and not shards.stopping

        claims = cast(Iterator[Tiled | None], shards.claims())  # each is one of `todo`
        for done in tuner.tune(claims, device, shop, keep, wish.rules, wish.force, going):
            shards.finished(done.problem)
            failed += done.best is None
            watch.done(done, f"rank {place.rank}: ")
        left = shards.left
    if place.rank == 0:
        console.print(f"{left} problems are left")
        _told(watch, device, wish, left, "rank 0: ")
    return failed + left


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
        "May be repeated. Calls of any size then run with the config predicted to be the fastest. With "
        "--target: predicts and compiles them for that GPU, and measures nothing."
    ),
]
Sizes = Annotated[int, typer.Option(min=8, help="With --calibrate: how many sizes.")]
Configs = Annotated[
    int | None,
    typer.Option(
        min=8,
        help=f"With --calibrate: how many configs to time, default {calibrating.TIMED}; with --target as "
        f"well, how many to keep, default {CONFIGS}.",
    ),
]
Sweeps = Annotated[
    Path | None, typer.Option(help="With --calibrate: a folder for every time that was measured.")
]
Model = Annotated[
    str | None,
    typer.Option(
        help="module:function. Measure tritile and torch at the linear layers that this function, a step of "
        "a model, calls; then time the step with tritile.nn.convert and without."
    ),
]
Output = Annotated[Path | None, typer.Option(help="With --target or --calibrate: the table to write.")]


def _rules(strategy: str, verify: str) -> Rules:
    """Return the rules that the options ask for. Strategy "exhaustive" has no limit of time."""
    rules = Rules(strategy, verify_all=_among("verify", verify, VERIFY) == "all")
    return whole(replace(rules, problem_s=math.inf)) if strategy == "exhaustive" else rules


def _tuned(problems: list[Tiled], wish: _Wish, search: bool) -> int:
    """Tune on the current GPU, alone or as one rank of many; return how many problems are left."""
    place = Place.from_environment()
    if place is not None:
        devices.use(place.local_rank)
    device = shared.gpu_here("--target h200 predicts for one")
    if search:
        if place is None:
            return _tune_here(problems, device, wish)
        return _tune_shared(problems, device, wish, place)
    if place is not None or wish.budget is not None or wish.log is not None:
        raise InvalidValueError("--no-search is for one process, and takes neither --budget nor --log")
    return _race_here(problems, device, wish)


def _calibrate(
    names: list[str],
    target: str | None,
    sizes: int,
    configs: int | None,
    budget: float | None,
    output: Path | None,
    sweeps: Path | None,
    as_json: bool,
) -> None:
    """Measure portfolios of classes on the current GPU, or predict those of a target."""
    shared.check_output(output)
    shared.check_folder(sweeps)
    calibrating.classes_of(names)
    if target is not None and sweeps is not None:
        raise InvalidValueError("--sweeps keeps what was measured: leave out --target")
    device, seconds = shared.device_of(target), budget or math.inf
    calibrating.calibrate(names, device, sizes, configs, seconds, output, sweeps, target is None)
    if as_json:
        path = output or calibrating.default_path(device, target is None)
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
    model: Model = None,
    target: shared.Target = None,
    output: Output = None,
    batch_invariant: shared.BatchInvariant = None,
    jobs: shared.Jobs = 0,
    as_json: shared.Json = False,
) -> None:
    """Measure configs for problems on this GPU and remember the best; or predict them for a --target.

    Started by torchrun, ranks share the problems, each on its own GPU, and rank 0 remembers.

    The exit status is 1 where problems are left untuned: out of time, stopped, or no config works.
    """
    fork_server = ForkServer(forked=True)  # before a GPU is in use
    context.call_on_close(fork_server.close)
    _among("strategy", strategy, tuple(STRATEGIES))
    if model is not None:
        return tune_modes.tune_model(model, as_json)
    if calibrate:
        return _calibrate(calibrate, target, sizes, configs, budget, output, sweeps, as_json)
    if output is not None and target is None:
        raise InvalidValueError("--output is for --target and --calibrate; what is measured is remembered")
    shared.check_output(output)
    shared.check_output(log)
    wish = _Wish(budget, force, jobs or None, _rules(strategy, verify), log, fork_server, as_json)
    cases = shared.cases_of(shapes, suite, suites_dir, op, dtype, layout, only)
    goal = None if target is None else gpus.target_device(target)
    cases = shared.as_called(cases, goal or devices.current_gpu(), batch_invariant)
    problems = shared.problems_of(cases, batch_invariant)
    if goal is not None:
        output = output or gpu_tables.predicted_path(goal)
        failed = tune_modes.predict(problems, goal, output, jobs, fork_server, as_json)
    else:
        failed = _tuned(problems, wish, search)
    if failed:
        raise typer.Exit(1)
