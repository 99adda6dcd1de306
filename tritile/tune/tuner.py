"""Tuning many problems by search."""

from collections.abc import Callable, Iterable, Iterator

from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.planning import plans
from tritile.tune.measure import engine
from tritile.tune.measure.tasks import Keep, Rules, Tuned
from tritile.tune.measure.workshop import Workshop
from tritile.tune.subject import task_of


def tune(
    problems: Iterable[Tiled], device: Device, shop: Workshop, keep: Keep, rules: Rules,
    force: bool = False, keep_on: Callable[[], bool] = lambda: True,
) -> Iterator[Tuned]:  # fmt: skip
    """Search for the best config of each problem; yield each problem as it is done.

    Trials in the store are used, unless `force`; `keep` takes every new one. Problems are drawn a few ahead.
    Stops before the next problem once `keep_on()` is false. A problem
    that runs out of GPU memory, or whose every config fails, is yielded with its failure.
    """
    tasks = (task_of(problem, device, force) for problem in problems)
    for tuned in engine.tune(tasks, shop, rules, keep, keep_on):
        yield tuned
        plans.forget()
