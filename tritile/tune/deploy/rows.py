"""What calls with one weight compile, whatever the number of rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.pointer import Pointer
from tritile.core.problem import Tiled
from tritile.core.views import posed
from tritile.families import numerics
from tritile.families.common.work import Descriptor
from tritile.families.work import early, work_of
from tritile.planning import plans
from tritile.tune.deploy.fill import Entry
from tritile.tune.suites import Case


def _kind(value: Any) -> Any:
    """Tell what of an argument may decide what is compiled: of whole numbers 1, multiples of 16, others."""
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, Descriptor):
        return value.buffer, value.block, value.rounded
    if isinstance(value, int) and not isinstance(value, bool):
        return "one" if value == 1 else (value % 16 == 0, value >= 2**31)
    return value


def _compiled(problem: Tiled, config: Config, device: Device) -> tuple[Any, ...]:
    """Return what two calls share that launch the same kernels."""
    call = posed(problem, lambda dtype, elements: Pointer(getattr(torch, dtype)))
    steps = []
    for step in work_of(call, config, device.processors, early(device)).steps:
        constants = {p.name for p in step.kernel.params if p.is_constexpr}
        args = (v if name in constants else _kind(v) for name, v in step.args.items())
        steps.append((step.kernel, *args, *step.options.items()))
    return tuple(steps)


def entries(case: Case, most: int, device: Device, invariant: bool = False) -> Iterator[Entry]:
    """Yield a problem and its config for all that calls compile with the weight of a case.

    Each M from 1 to `most` is planned as a call would plan it, an `invariant` one as a batch-invariant call.
    """
    seen = set()
    for m in range(1, most + 1):
        problem = replace(case, m=m).problem
        problem = numerics.in_one_way(problem) if invariant else problem
        plan = plans.plan_for(problem, device, "cached")
        assert plan is not None
        key = plan.config, _compiled(problem, plan.config, device)
        if key not in seen:
            seen.add(key)
            yield problem, plan.config
