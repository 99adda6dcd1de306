"""Predict configs for a GPU that is not here, and compile them: `tritile tune --target`."""

from pathlib import Path

from tritile.cli.shared import console, progress
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.families import registry as families
from tritile.planning import table
from tritile.tune import tuner
from tritile.tune.measure.child import ForkServer
from tritile.tune.measure.pool import CompilePool


def predict(problems: list[Tiled], device: Device, output: Path, jobs: int, fork_server: ForkServer) -> int:
    """Write a table of predicted configs that compile; return how many problems have none."""
    console.print(f"{device.name} is not here: configs are predicted and compiled for it, not timed")
    entries, failed = [], 0
    with CompilePool(jobs or None, fork_server) as pool, progress() as bar:
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
    kernels = families.digests()
    table.write(table.Table(device.to_dict(), False, kernels, tuple(entries)), output)
    console.print(f"{len(entries)} predicted configs written to {output}")
    return failed
