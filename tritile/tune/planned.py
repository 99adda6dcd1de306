"""Plan a call of a decorated kernel: tell which config would run, without measuring or launching."""

from collections.abc import Mapping, Sequence
from typing import Any

import triton

from tritile.core.device import INTERPRETER, Device
from tritile.core.settings import current_mode
from tritile.errors import NotTunedError
from tritile.planning.kernel_plan import KernelPlan
from tritile.tune.remembering import RememberingAutotuner


def _untold(
    tuner: RememberingAutotuner, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[triton.Config, str]:
    """Return the config that runs where nothing measured tells one, and why."""
    if tuner.perf_model is not None:
        return tuner.predicted(args, kwargs), "the kernel's own performance model's choice"
    only = tuner.space is None and len(tuner.configs) == 1
    why = "the kernel's only config" if only else "the first config: nothing was measured of this kernel"
    return tuner.predicted(args, kwargs), why


def planned(
    tuner: RememberingAutotuner, args: Sequence[Any], kwargs: Mapping[str, Any], device: Device
) -> KernelPlan:
    """Return the plan of a call by the mode in force. Mode "tune" plans as "cached" does.

    Raises NotTunedError in mode "strict" where a measurement could be had, and none is remembered.
    """
    mode, given = tuner.mode or current_mode(), {n: v for n, v in kwargs.items() if n != "grid"}
    problem = tuner.problem(args, given)
    best = tuner.best(problem, device) if mode != "off" else None
    if best is not None:
        config, trial = best
        why = "the fastest of its configs that were measured on this GPU"
        return KernelPlan(problem, config, "exact", device, trial.us, why)
    single = tuner.space is None and len(tuner.configs) == 1
    if mode == "strict" and tuner.measurable(device) and not single:
        raise NotTunedError(f"mode is strict and nothing measured is remembered for {problem.label}")
    near = tuner.nearest(problem, device)[:1] if mode != "off" else []
    if near:
        return KernelPlan(problem, near[0], "predicted", device, None, "the fastest at the nearest sizes")
    config, why = _untold(tuner, args, given)
    return KernelPlan(problem, config, "interpreter" if device == INTERPRETER else "model", device, None, why)
