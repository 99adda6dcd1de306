"""tritile tune: measure configs, or predict them."""

from pathlib import Path
from typing import Annotated

import typer

from tritile import device as devices
from tritile import launch, table
from tritile.cli.app import (
    SUITES,
    Directory,
    Dtype,
    Layout,
    Op,
    Shapes,
    Suite,
    Target,
    app,
    cases_of,
    console,
    interruptible,
    progress,
)
from tritile.device import Device
from tritile.errors import InvalidValueError
from tritile.store import store_of
from tritile.tune import suites, tuner
from tritile.tune.worker import CompilePool


def _tune_here(cases: list[suites.Case], device: Device, budget: float | None, force: bool, jobs: int) -> int:
    problems = list(dict.fromkeys(case.problem for case in cases))
    todo = [problem for problem in problems if force or not tuner.is_tuned(problem, device)]
    console.print(
        f"{device.name}: {len(todo)} of {len(problems)} problems to tune, the others are remembered"
    )
    failed = 0
    with interruptible() as keep_on, CompilePool(jobs or None) as pool, progress() as bar:
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
    with CompilePool(jobs or None) as pool, progress() as bar:
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
    cases = cases_of(shapes, suite, suites_dir, op, dtype, layout)
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
