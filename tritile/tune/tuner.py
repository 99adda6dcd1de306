"""Tuning many problems: by search on the GPU that is here, or by prediction for one that is not."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import TuningError
from tritile.planning import plans
from tritile.runtime.ahead import compile_resources
from tritile.runtime.offline import Resources
from tritile.tune.measure import engine
from tritile.tune.measure.pool import CompilePool
from tritile.tune.measure.tasks import Keep, Rules, Tuned
from tritile.tune.measure.workshop import Workshop
from tritile.tune.subject import ProblemSpace, task_of


def tune(
    problems: Iterable[Tiled | None], device: Device, shop: Workshop, keep: Keep, rules: Rules,
    force: bool = False, keep_on: Callable[[], bool] = lambda: True,
) -> Iterator[Tuned]:  # fmt: skip
    """Search for the best config of each problem; yield each problem as it is done.

    Trials in the store are used, unless `force`; `keep` takes every new one. Problems are drawn a few ahead;
    None stands for "none at the moment". Stops before the next problem once `keep_on()` is false. A problem
    that runs out of GPU memory, or whose every config fails, is yielded with its failure.
    """
    tasks = (None if problem is None else task_of(problem, device, force) for problem in problems)
    for tuned in engine.tune(tasks, shop, rules, keep, keep_on):
        yield tuned
        plans.forget()


def predict(
    problem: Tiled, device: Device, pool: CompilePool, tries: int = 12
) -> tuple[Config | None, list[str]]:
    """Return the first of the model's choices that compiles for a device, and why those before it do not.

    A config is refused where it needs more shared memory than there is, or spills registers. Where all of
    `tries` configs are refused, the one that spills least is returned; None where none fits shared memory.
    """
    refused, spilling = list[str](), list[tuple[int, Config]]()
    for config in ProblemSpace(problem, device).opening(tries):
        try:
            found: Resources = pool.submit(compile_resources, problem, config, device).result()
        except (TuningError, CancelledError) as error:
            refused.append(f"{config}: {error}")
            continue
        excess = found.excess(device)
        if excess is None:
            return config, refused
        refused.append(f"{config}: {excess}")
        spilling += [(found.spills, config)] * (found.shared <= device.shared_memory)
    return (min(spilling, key=lambda item: item[0])[1] if spilling else None), refused
