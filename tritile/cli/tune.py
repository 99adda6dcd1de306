"""tritile tune: measure configs and remember the best. `calibrating` measures the classes of --calibrate."""

import math
import os
import re
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tritile.cli import calibrating, shared, tune_model
from tritile.cli.shared import app, console, interruptible
from tritile.core import device as devices
from tritile.core.device import Device
from tritile.core.problem import Problem, Tiled
from tritile.errors import InvalidValueError
from tritile.planning import gpu_tables, table
from tritile.planning.classes import MEASURED
from tritile.planning.store import store_of
from tritile.planning.trial import TORCH, Trial
from tritile.tune import now
from tritile.tune.measure.engine import Rules, Tuned, logged, whole
from tritile.tune.measure.workers import Workshop, processes_for
from tritile.tune.subject.problem import is_tuned


def ranks() -> tuple[int, int, int, int]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of torchrun, or 0, 1, 0, 1 without it.

    Raises InvalidValueError where they make no sense.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1, 0, 1
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    texts = {name: os.environ.get(name, "") for name in names}
    rank, size, on_host, of_host = (int(each) if each.isdecimal() else -1 for each in texts.values())
    if not (0 <= rank < size and 0 <= on_host < of_host):
        raise InvalidValueError(
            f"{texts}: wanted the variables that torchrun sets, or no WORLD_SIZE for one process"
        )
    return rank, size, on_host, of_host


def _torch_us(problem: Problem, device: Device) -> float | None:
    found = store_of(device).best(TORCH, problem)
    return None if found is None else found.us


def _summary(done: Sequence[Tuned], device: Device, seconds: float) -> str:
    """One line on what was tuned, how it compares with torch, and whether it is remembered."""
    best = {found.problem: found.best.time for found in done if found.best is not None}
    text = f"{len(best)} problem{'s' * (len(best) != 1)} in {seconds:.0f} s"
    ratios = {each.label: torchs / us for each, us in best.items() if (torchs := _torch_us(each, device))}
    if ratios:
        worst = min(ratios, key=ratios.__getitem__)
        text += f": {statistics.geometric_mean(ratios.values()):.2f}x torch on the mean"
        text += f", worst {ratios[worst]:.2f} ({worst})" if len(ratios) > 1 else ""
        text += f", of {len(ratios)} compared" if len(ratios) < len(best) else ""
    store = store_of(device)
    lost = f"{len(store.unwritten)} trials are lost: {store.path} cannot be written"
    return f"{text}; {lost if store.unwritten else f'remembered in {store.path}'}"


def _tune_here(
    problems: list[Tiled], device: Device, rank: str, rules: Rules, budget: float | None, force: bool,
    jobs: int, as_json: bool,
) -> int:  # fmt: skip
    """Tune on the current GPU; return how many problems are left. `rank` precedes what a rank prints."""
    todo = [problem for problem in problems if force or not is_tuned(problem, device)]
    others = f"{len(todo)} of {len(problems)} problems to tune, the others are remembered"
    console.print(f"{device.name}: {others}")
    index, store, begun = devices.current_index(), store_of(device), time.monotonic()
    remember, done, failures = logged(store.add), list[Tuned](), Counter[str]()

    def keep(digest: str, trial: Trial) -> None:
        remember(digest, trial)
        if trial.failure:
            reason = re.sub(r"\d+", "..", trial.failure.partition(":")[0])  # bytes, registers
            failures[textwrap.shorten(reason, 60, placeholder=" ...")] += 1

    with interruptible(budget) as keep_on, shared.progress(not rank) as bar:
        task = bar.add_task("tuning", total=len(todo))
        with Workshop(index, jobs) as shop:
            for found in now.tune(todo, device, shop, keep, rules, force, keep_on):
                done.append(found)
                label, best, torch_us = found.problem.label, found.best, _torch_us(found.problem, device)
                if best is None:
                    shared.say(f"{rank}{label}: {found.failure}")
                else:
                    torchs = f", torch {torch_us:.1f} us" if torch_us else ""
                    tried = f"({found.trials} configs, {found.seconds:.1f} s)"
                    console.print(f"{rank}{label}: {best.time:.1f} us{torchs}, {best.config} {tried}")
                bar.update(task, advance=1, description=label)
        bar.update(task, description="timing torch")
        for problem in (found.problem for found in done if found.best is not None):
            if isinstance(problem, Tiled) and _torch_us(problem, device) is None and keep_on():
                now.time_torch(problem, device, index or 0)
    left, seconds = sum(not is_tuned(problem, device) for problem in todo), time.monotonic() - begun
    if left > sum(found.best is None for found in done):
        console.print(f"{rank}{left} problems are left: the same command goes on with them")
    if as_json:
        listed = [
            {
                "problem": found.problem.label,
                "us": found.best and found.best.time,
                "torch_us": _torch_us(found.problem, device),
                "tried": found.trials,
                "config": found.best and found.best.config.to_dict(),
                "failure": found.failure,
            }
            for found in done
        ]
        facts = {"gpu": device.name, "seconds": seconds, "left": left, "store": store.path}
        shared.print_json(facts | {"problems": listed})
        return left
    if failures:
        reasons = ", ".join(f"{count} {reason}" for reason, count in failures.most_common(4))
        console.print(f"configs that failed: {reasons}")
    console.print(f"{rank}{_summary(done, device, seconds)}")
    return left


@app.command()
def tune(
    shapes: shared.Shapes = None,
    suite: shared.Suite = None,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    only: shared.Only = "",
    budget: Annotated[float | None, typer.Option(min=0.001, help="Seconds to spend at the most.")] = None,
    force: Annotated[bool, typer.Option(help="Measure again what is tuned already.")] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every config, not only the likely ones.")
    ] = False,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure the configs of a class of problems at drawn sizes: "
            f"{', '.join(MEASURED)}, or all. May be repeated. Calls of any size then run with the config "
            "predicted to be the fastest."
        ),
    ] = None,
    sizes: Annotated[int, typer.Option(min=8, help="With --calibrate: how many sizes.")] = 200,
    configs: Annotated[int, typer.Option(min=8, help="With --calibrate: how many configs to time.")] = 96,
    sweeps: Annotated[
        Path | None, typer.Option(help="With --calibrate: a folder for every time that was measured.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="module:function. Measure tritile and torch at the linear layers that this function, a step "
            "of a model, calls; then time the step with tritile.nn.convert and without."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="With --calibrate: the table to write.")] = None,
    as_json: shared.Json = False,
) -> None:
    """Measure configs for problems on this GPU and remember the best.

    Started by torchrun, rank i of n takes every n-th problem, on its own GPU. Ranks of one host remember in
    its one store; `tritile merge` joins those of several hosts.

    The exit status is 1 where problems are left untuned: out of time, stopped, or no config works. That of a
    rank is 0 then, as torchrun would stop the other ranks.
    """
    rank, size, on_host, of_host = ranks()
    if size > 1 and (model or calibrate or as_json):
        raise InvalidValueError(
            "--model, --calibrate and --json are for one process, not for ranks of torchrun"
        )
    shared.check_output(output)
    if model:
        return tune_model.tune_model(model, as_json)
    if calibrate:
        shared.check_output(sweeps, folder=True)
        names = calibrating.classes_of(calibrate)
        device = shared.gpu_here()
        path = output or gpu_tables.calibrated_path(device)
        calibrating.calibrate(names, device, sizes, configs, budget or math.inf, path, sweeps)
        if as_json:
            classes = shared.portfolios(table.read(path)) if path.exists() else {}
            shared.print_json({"gpu": device.name, "table": path, "classes": classes})
        return
    if output is not None:
        raise InvalidValueError("--output is for --calibrate; what is measured is remembered")
    rules = whole(Rules(problem_s=math.inf)) if exhaustive else Rules()
    cases = shared.cases_of(shapes, suite, op, dtype, layout, only)
    if size > 1:
        devices.use(on_host)
    device = shared.gpu_here()
    problems = shared.problems_of(cases, device)[rank::size]
    prefix, jobs = f"rank {rank}: " if size > 1 else "", processes_for(of_host)
    left = _tune_here(problems, device, prefix, rules, budget, force, jobs, as_json)
    if left and size == 1:
        raise typer.Exit(1)
