"""Tuning suites: problems searched, or predicted for a GPU that is not here."""

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
    problems: Iterable[Tiled | None],
    device: Device,
    shop: Workshop,
    keep: Keep,
    rules: Rules,
    budget_s: float | None = None,
    force: bool = False,
    keep_on: Callable[[], bool] = lambda: True,
) -> Iterator[Tuned]:
    """Tune problems, yielding each as it is done; what is known of them is used, unless `force`.

    `keep` takes every trial as it is measured. Problems are taken a few ahead; None
    stands for none at the moment. Stops before a problem
    once `budget_s` seconds are spent or `keep_on()` is false. A problem that runs out of GPU memory, or
    whose every config fails, is yielded with its failure.
    """
    tasks = (None if problem is None else task_of(problem, device, force) for problem in problems)
    for tuned in engine.tune(tasks, shop, rules, keep, budget_s, keep_on):
        yield tuned
        plans.forget()


def predict(
    problem: Tiled, device: Device, pool: CompilePool, tries: int = 12
) -> tuple[Config | None, list[str]]:
    """The model's first choice for a GPU that is not here that compiles within its means, and refusals.

    Means: shared memory and no spilled registers. Where each of `tries` spills, the one that spills
    least is taken; None where none compiles within shared memory.
    """
    refused: list[str] = []
    spilling: list[tuple[int, Config]] = []
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
        if found.shared <= device.shared_memory:
            spilling.append((found.spills, config))
    return (min(spilling, key=lambda item: item[0])[1] if spilling else None), refused
