"""Measure configs and remember the best: `tritile tune`. `calibrating` has what --calibrate asks for."""

import math
import os
import re
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
from tritile.planning.store import Store, store_of
from tritile.planning.trial import TORCH, Trial
from tritile.tune import now
from tritile.tune.measure.pool import processes_for
from tritile.tune.measure.tasks import Rules, Tuned, logged, whole
from tritile.tune.measure.workshop import Workshop
from tritile.tune.subject import is_tuned


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


def _remembered(store: Store) -> str:
    """Say where trials are, or how many could not be written."""
    lost = f"{store.lost} trials are lost: {store.path} cannot be written"
    return lost if store.lost else f"remembered in {store.path}"


def _torch_us(problem: Problem, device: Device) -> float | None:
    found = store_of(device).best(TORCH, problem)
    return None if found is None else found.us


def _print_tuned(found: Tuned, device: Device, ranks: _Ranks) -> None:
    if found.best is None:
        return shared.say(f"{ranks}{found.problem.label}: {found.failure}")
    torch_us = _torch_us(found.problem, device)
    torchs = f", torch {torch_us:.1f} us" if torch_us else ""
    console.print(
        f"{ranks}{found.problem.label}: {found.best.time:.1f} us{torchs}, {found.best.config} "
        f"({found.trials} configs, {found.seconds:.1f} s)",
        soft_wrap=True,
    )


def _summary(done: Sequence[Tuned], device: Device, seconds: float) -> str:
    """Return one line on what was tuned, and how it compares with torch."""
    best = {found.problem: found.best.time for found in done if found.best is not None}
    text = f"{len(best)} problem{'s' * (len(best) != 1)} in {seconds:.0f} s"
    ratios = {each.label: torchs / us for each, us in best.items() if (torchs := _torch_us(each, device))}
    if ratios:
        worst = min(ratios, key=ratios.__getitem__)
        text += f": {statistics.geometric_mean(ratios.values()):.2f}x torch on the mean"
        text += f", worst {ratios[worst]:.2f} ({worst})" if len(ratios) > 1 else ""
        text += f", of {len(ratios)} compared" if len(ratios) < len(best) else ""
    return text


def _tune_here(
    problems: list[Tiled], device: Device, ranks: _Ranks, rules: Rules, budget: float | None, force: bool,
    jobs: int, as_json: bool,
) -> int:  # fmt: skip
    """Tune on the current GPU; return how many problems are left."""
    todo = [problem for problem in problems if force or not is_tuned(problem, device)]
    console.print(
        f"{device.name}: {len(todo)} of {len(problems)} problems to tune, the others are remembered",
        soft_wrap=True,
    )
    index, store, begun = devices.current_index(), store_of(device), time.monotonic()
    remember, done, failures = logged(store.add), list[Tuned](), Counter[str]()

    def keep(digest: str, trial: Trial) -> None:
        remember(digest, trial)
        if trial.failure:
            reason = re.sub(r"\d+", "..", trial.failure.partition(":")[0])  # bytes, registers
            failures[textwrap.shorten(reason, 60, placeholder=" ...")] += 1

    with interruptible(budget) as keep_on, shared.progress(ranks.size == 1) as bar:
        task = bar.add_task("tuning", total=len(todo))
        with Workshop(index, jobs or processes_for(ranks.of_host)) as shop:
            for found in now.tune(todo, device, shop, keep, rules, force, keep_on):
                done.append(found)
                _print_tuned(found, device, ranks)
                bar.update(task, advance=1, description=found.problem.label)
        bar.update(task, description="timing torch")
        for problem in (found.problem for found in done if found.best is not None):
            if isinstance(problem, Tiled) and _torch_us(problem, device) is None and keep_on():
                now.time_torch(problem, device, index or 0)
    left = sum(not is_tuned(problem, device) for problem in todo)
    stopped = left - sum(found.best is None for found in done)
    if stopped > 0:
        console.print(f"{ranks}{stopped} problems are left: the same command goes on with them")
    where, seconds = _remembered(store), time.monotonic() - begun
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
        told = {"gpu": device.name, "seconds": seconds, "left": left, "store": store.path}
        shared.print_json(told | {"problems": listed})
        return left
    if failures:
        reasons = ", ".join(f"{count} {reason}" for reason, count in failures.most_common(4))
        console.print(f"configs that failed: {reasons}", soft_wrap=True)
    console.print(f"{ranks}{_summary(done, device, seconds)}; {where}", soft_wrap=True)
    return left


@app.command()
def tune(
    shapes: shared.Shapes = None,
    suite: shared.Suite = None,
    suites_dir: shared.Directory = shared.SUITES,
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
    jobs: shared.Jobs = 0,
    as_json: shared.Json = False,
) -> None:
    """Measure configs for problems on this GPU and remember the best.

    Started by torchrun, rank i of n takes every n-th problem, on its own GPU. Ranks of one host remember in
    its one store; `tritile merge` joins those of several hosts.

    The exit status is 1 where problems are left untuned: out of time, stopped, or no config works. That of a
    rank is 0 then, as torchrun would stop the other ranks.
    """
    ranks = _Ranks.from_environment()
    if ranks.size > 1 and (model or calibrate or as_json):
        raise InvalidValueError(
            "--model, --calibrate and --json are for one process, not for ranks of torchrun"
        )
    shared.check_output(output)
    if model:
        return tune_model.tune_model(model, as_json)
    if calibrate:
        shared.check_folder(sweeps)
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
    cases = shared.cases_of(shapes, suite, suites_dir, op, dtype, layout, only)
    if ranks.size > 1:
        devices.use(ranks.on_host)
    device = shared.gpu_here()
    problems = shared.problems_of(cases, device)
    problems = problems[ranks.rank :: ranks.size]
    left = _tune_here(problems, device, ranks, rules, budget, force, jobs, as_json)
    if left and ranks.size == 1:
        raise typer.Exit(1)
