"""Do what `tritile tune` does besides a search on this GPU: --model and --target."""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tritile.cli import calibrating
from tritile.cli.shared import console, gpu_here, print_json, progress, working
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.core.settings import mode
from tritile.errors import InvalidValueError
from tritile.families import registry as families
from tritile.nn import convert
from tritile.nn.exchanged import assign, is_linear, original_of
from tritile.planning import table
from tritile.planning.export import completed
from tritile.tune import tuner
from tritile.tune.measure.child import ForkServer
from tritile.tune.measure.pool import CompilePool

ROUNDS = 9  # of both sides, after the run that measures


def _module_of(name: str) -> tuple[str, str]:
    """Return the module and the function that `module:function` names, of the current folder or installed.

    Raises InvalidValueError where there is no such module. Imports the packages that it lies in, not itself.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise InvalidValueError(f"--model {name!r}: wanted module:function")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found, why = importlib.util.find_spec(module), ""
    except (ImportError, ValueError) as error:  # of a package that it lies in, too
        found, why = None, f": {error}"
    if found is None:
        raise InvalidValueError(f"--model {name}: there is no module {module} here{why}")
    return module, function


def step_of(name: str) -> Callable[[], Any]:
    """Return the function that `module:function` names, of a module in the current folder or installed.

    Raises InvalidValueError where there is none.
    """
    module, function = _module_of(name)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidValueError(f"--model {name}: {error}") from error
    if not callable(found):
        raise InvalidValueError(f"--model {name}: {type(found).__name__} is not a function")
    step: Callable[[], Any] = found
    return step


def _seconds(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _layers_of(step: Callable[[], Any]) -> torch.nn.ModuleList:
    """Return the linear layers that a step calls, of whatever models."""
    found: dict[torch.nn.Module, None] = {}
    handle = register_module_forward_pre_hook(lambda layer, args: found.setdefault(layer))
    try:
        step()
    finally:
        handle.remove()
    return torch.nn.ModuleList(layer for layer in found if is_linear(original_of(layer)))


def tune_model(name: str, as_json: bool = False) -> None:
    """Measure the linear layers that a step of a model calls; time the step with those that win exchanged.

    The step runs twice to record and measure, then in turns without and with exchanged layers.
    """
    _module_of(name)  # a name that is wrong is told first
    gpu_here()
    step = step_of(name)
    with working("measuring"):
        layers = _layers_of(step)  # the first call, which also loads what the model needs
        with mode("tune"):
            conversion = convert(layers, forward=step)
        exchanged = [layers.get_submodule(each) for each in conversion.exchanged]
        times: dict[bool, list[float]] = {False: [], True: []}
        step()  # compiles what the exchanged layers launch
        for number in range(ROUNDS):
            for side in (number % 2 == 0, number % 2 == 1):
                for layer in exchanged:
                    assign(layer, side)
                times[side].append(_seconds(step))
    console.print(conversion)
    alone, taken = statistics.median(times[False]), statistics.median(times[True])
    if as_json:
        return print_json({"model": name, "torch_ms": 1e3 * alone, "tritile_ms": 1e3 * taken})
    console.print(
        f"{name}: {1e3 * alone:.2f} ms, with tritile {1e3 * taken:.2f} ms: {alone / taken:.3f} times as fast"
    )


def predict(
    problems: list[Tiled], device: Device, output: Path, jobs: int, fork_server: ForkServer, as_json: bool
) -> int:
    """Write predicted configs that compile into a table of such; return how many problems have none.

    What the table knows of other problems stays. Raises InvalidValueError for a table of another kind.
    """
    old = calibrating.begun_at(output, device, measured=False)
    console.print(f"{device.name} is not here: configs are predicted and compiled for it, not timed")
    entries, failed, told = [], 0, []
    with CompilePool(jobs or None, fork_server) as pool, progress() as bar:
        task = bar.add_task("predicting", total=len(problems))
        for problem in problems:
            config, refused = tuner.predict(problem, device, pool)
            bar.update(task, advance=1, description=problem.label)
            failed += config is None
            note = f" after {len(refused)} refused" if refused else ""
            told.append({"problem": problem.label, "config": config and config.to_dict(), "refused": refused})
            console.print(f"{problem.label}: {config or 'nothing compiles'}{note}", soft_wrap=True)
            for reason in refused[:2]:
                console.print(f"  refused {reason}", style="dim", soft_wrap=True)
            if config is not None:
                entries.append(table.Entry(problem, config, None))
    output.parent.mkdir(parents=True, exist_ok=True)
    made = table.Table(device.to_dict(), False, families.digests(), table.in_order(entries))
    table.write(completed(made, old), output)
    console.print(f"predicted configs written to {output}: {len(entries)}", soft_wrap=True)
    if as_json:
        print_json({"gpu": device.name, "table": output, "problems": told})
    return failed
