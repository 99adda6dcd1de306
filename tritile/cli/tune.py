"""tritile tune: its options, and which of them go together.

`tuning` measures problems, `calibrating` classes, `tune_model` a step of a model.
"""

import math
from pathlib import Path
from typing import Annotated

import typer

from tritile.cli import shared
from tritile.cli.shared import app
from tritile.core.settings import cache_dir
from tritile.errors import InvalidValueError


@app.command(
    epilog=shared.examples(
        "tritile tune 4096x4096x4096 1000x1001x1002 --dtype float16",
        "tritile tune --suite llm --budget 600",
        "tritile tune --suite llm --target h200",
        "tritile tune --calibrate bf16_nn",
        "tritile tune --model train:step",
    )
)
def tune(
    context: typer.Context,
    shapes: shared.Shapes = None,
    suite: shared.Suite = None,
    op: shared.Op = "matmul",
    dtype: shared.Dtype = "bfloat16",
    layout: shared.Layout = "NN",
    only: shared.Only = "",
    target: shared.Target = None,
    budget: Annotated[
        float | None, typer.Option(min=0.001, help="Stop after so many seconds; with --calibrate, per class.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Measure again what is remembered.")] = False,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Measure every config, not only the likely ones.")
    ] = False,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure the configs of a class of problems at drawn sizes; calls of any size then run the "
            "config predicted to be fastest. One that `tritile show --target h200` lists, or all. May be "
            "repeated."
        ),
    ] = None,
    sizes: Annotated[int, typer.Option(min=8, help="With --calibrate: how many sizes.")] = 200,
    configs: Annotated[int, typer.Option(min=8, help="With --calibrate: how many configs to time.")] = 96,
    sweeps: Annotated[
        Path | None,
        typer.Option(help="With --calibrate: the folder of all times."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="module:function. Measure tritile and torch at the linear layers that this function, a step "
            "of a model, calls; then time the step with tritile.nn.convert and without."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="With --calibrate: the folder of predictors.")] = None,
    as_json: shared.Json = False,
) -> None:
    """Measure configs for problems on this GPU and remember the best.

    Without shapes and suites it tunes suite quick. For a --target that is not here nothing is measured: it
    prints what calls would run there, and the predicted times.

    Started by torchrun, each of n ranks takes every n-th problem, on its own GPU. The ranks of a host share a
    store. If `TRITILE_SHARED` names a folder, hosts share trials; `tritile merge` joins stores without.

    The exit status is 1 if problems are left untuned: out of time, stopped, or no config works. A rank exits
    with 0 even then, as torchrun would stop the other ranks.
    """
    options = shared.typed(context)
    problems = ("shapes", "suite", "op", "dtype", "layout", "only", "force", "exhaustive", "target")
    measuring = ("budget", "force", "exhaustive")
    shared.refuse_together(
        options, "model", (*problems, "budget", "calibrate"), "it measures what its step calls"
    )
    shared.refuse_together(options, "calibrate", problems, "it measures sizes of its own, on this GPU")
    shared.refuse_together(options, "target", measuring, "nothing is measured for a GPU that is not here")
    shared.refuse_unread(context, op, layout, shapes)
    for name in ("sizes", "configs", "sweeps", "output"):
        if name in options and not calibrate:
            raise InvalidValueError(
                f"{options[name]} is for --calibrate: what is measured is remembered without"
            )
    shared.check_output(output, folder=True)
    shared.check_output(sweeps, folder=True, option="--sweeps")

    from tritile.choose import gpu_tables
    from tritile.cli import calibrating, tune_model, tuning
    from tritile.core import device as devices
    from tritile.tuner.measure.engine import Rules, exhaustive_rules
    from tritile.tuner.measure.workers import processes_for

    rank, size, on_host, of_host = tuning.ranks()
    if size > 1 and (model or calibrate or as_json):
        raise InvalidValueError(
            "--model, --calibrate and --json are for one process, not for torchrun's ranks"
        )
    if model:
        return tune_model.tune_model(model, as_json)
    if calibrate:
        names = calibrating.classes_of(calibrate)
        device = shared.gpu_here()
        folder, kept = output or cache_dir(), sweeps or gpu_tables.sweeps_path(device)
        made = calibrating.calibrate(names, device, sizes, configs, budget or math.inf, folder, kept)
        if as_json:
            classes = {name: facts for each in made for name, facts in shared.classes_of(each).items()}
            shared.print_json({"gpu": device.name, "folder": folder, "classes": classes})
        return
    rules = exhaustive_rules(Rules(problem_s=math.inf)) if exhaustive else Rules()
    cases = shared.cases_of(shapes, suite, op, dtype, layout, only)
    if target is not None:
        there, here = shared.device_of(target), devices.current_gpu()
        if here is None or here.name != there.name:
            return tuning.tune_elsewhere(tuning.measurable(shared.problems_of(cases, there)), there, as_json)
    if size > 1:
        devices.use(on_host)
    device = shared.gpu_here(
        "nothing was measured. --target h200, for example, shows what calls run on an H200, and their times"
    )
    mine = tuning.measurable(shared.problems_of(cases, device))[rank::size]
    prefix, jobs = f"rank {rank}: " if size > 1 else "", processes_for(of_host)
    left = tuning.tune_here(mine, device, prefix, rules, budget, force, jobs, as_json)
    if left and size == 1:
        raise typer.Exit(1)
