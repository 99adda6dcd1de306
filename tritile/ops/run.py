"""Take a described call to a launch, as operations do once their arguments are checked."""

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch

from tritile.core import device as devices
from tritile.core.call import Call, PermuteCall
from tritile.core.config import Config
from tritile.core.device import capturing
from tritile.core.forgetting import forget
from tritile.core.log import log
from tritile.core.of_torch import current_gpu, empty_strided_on_gpu, increment_versions, modes_entered
from tritile.core.of_triton import INTERPRETING
from tritile.core.problem import Product, QuantizedProblem, Tiled
from tritile.core.settings import current_mode
from tritile.core.threads import once
from tritile.errors import HostWarning, TuningError, UnsupportedError, UntunedWarning, callers_level
from tritile.families.permute.family import in_place
from tritile.ops.checks import check_may_change
from tritile.planning import aten, gpu_tables, model, plans
from tritile.planning.store import store_of
from tritile.planning.trial import TORCH
from tritile.runtime import launch
from tritile.runtime.compiles import as_mode_asks, asking

_WIDENED: Final = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # the interpreter gets these wrong
_FALLBACKS = 8  # predicted configs to try where the planned one does not run

_warned: set[str] = set()


def new_output(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a new output on a GPU, its elements not yet written."""
    if empty_strided_on_gpu is not None and device.index == current_gpu() and modes_entered() == 0:
        return empty_strided_on_gpu(shape, strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def interpret(call: Call) -> None:
    launch.run_interpreted(call, fixed(call) or plans.interpreted(call.problem).config)


def interpret_product(
    describe: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, str], Call],
    tensors: Iterable[torch.Tensor | None],
    out: torch.Tensor,
    precision: str = "ieee",
) -> None:
    """Run a product of host tensors in the interpreter, widening dtypes that the interpreter gets wrong.

    `describe(read, out, precision)` returns the call; it passes each tensor through `read`, which widens.
    torch rounds the result. `tensors` are all tensors of the call, an operand first.
    """
    dtypes = [tensor.dtype for tensor in (*tensors, out) if tensor is not None]
    if not any(dtype in _WIDENED for dtype in dtypes):
        interpret(describe(lambda tensor: tensor, out, precision))
        return
    wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    precision = precision if dtypes[0] == torch.float32 else "ieee"
    interpret(describe(lambda t: t.float() if t.is_floating_point() else t, wide, precision))
    out.copy_(wide)


def fixed(call: Call) -> Config | None:
    """Return the config of a call in place, which has no choice; None for other calls.

    Such a call must not be measured, as it changes its own input.
    """
    return in_place(call.problem) if isinstance(call, PermuteCall) and call.in_place else None


def planned(problem: Tiled, index: int, by_torch: bool = False) -> plans.Plan:
    """Return the plan of a problem on a GPU. In mode "tune", measure a problem that has no measurement first.

    Where several threads meet a problem at the same time, one measures it and the others wait. `by_torch`:
    torch's kernel may make it.
    """
    device = devices.gpu(index)
    chosen = plans.plan_for(problem, device, None, by_torch)
    if chosen is None and capturing():
        chosen = plans.plan_for(problem, device, "cached", by_torch)
    elif chosen is None:
        chosen = once(
            ("planned", problem, device, by_torch), lambda: _measured(problem, device, index, by_torch)
        )
    assert chosen is not None
    if chosen.source == "model" and chosen.config != aten.CONFIG and current_mode() == "cached":
        _warn_uncalibrated(device)
    return chosen


def is_by_aten(problem: Tiled, index: int) -> bool:
    """True if torch's kernel is planned for a problem on a GPU that it may make."""
    return planned(problem, index, True).config == aten.CONFIG


def _warn_uncalibrated(device: devices.Device) -> None:
    """Warn, once for each GPU without calibrated classes, that the model chooses configs."""
    key = f"uncalibrated {device.name}"
    if key in _warned or gpu_tables.is_calibrated(device):
        return
    _warned.add(key)
    warnings.warn(
        f"configs are predicted, as no class of problems was measured on {device.name}: "
        "run `tritile tune --calibrate all`, which takes minutes for each class",
        UntunedWarning,
        stacklevel=callers_level(),
    )


def _measured(problem: Tiled, device: devices.Device, index: int, by_torch: bool) -> plans.Plan:
    chosen = plans.plan_for(problem, device, None, by_torch)
    if chosen is not None:  # another thread has just measured it
        return chosen
    from tritile.tune.now import time_torch, tuned_now  # load the tuner only to measure

    if plans.plan_for(problem, device) is None:
        config = tuned_now(problem, device, index)
        forget()
        if plans.plan_for(problem, device) is None:
            plans.unrecorded[problem, device] = config
    if by_torch and isinstance(problem, Product | QuantizedProblem):
        if store_of(device).best(TORCH, problem) is None:
            time_torch(problem, device, index)
        plans.torch_was_timed.add((problem, device))
        forget()
    chosen = plans.plan_for(problem, device, None, by_torch)
    assert chosen is not None
    return chosen


def may_be_kept() -> bool:
    """True if a plan made now may be kept: not a stopgap that mode "tune" uses during a capture."""
    return not (current_mode() == "tune" and capturing())


def on_host(tensor: torch.Tensor) -> bool:
    """True if calls on this tensor launch nothing on a GPU: in host memory, or by TRITON_INTERPRET.

    Warn once where no kernel is interpreted either.
    """
    if tensor.device.type == "cpu" and not INTERPRETING:
        warn_of_host()
    return tensor.device.type == "cpu" or INTERPRETING


@functools.cache
def warn_of_host() -> None:
    """Warn, once in a process and at the line that called tritile, that no kernel runs."""
    warnings.warn(
        "tensors are in host memory: torch computes them on the CPU, and no GPU kernel runs. With "
        "TRITON_INTERPRET=1 in the environment tritile's kernels run in Triton's interpreter",
        HostWarning,
        stacklevel=callers_level(),
    )


def mark_written(op: str, out: torch.Tensor) -> torch.Tensor:
    """Tell autograd that out is overwritten, as torch's own out= does; return out.

    Raise GradientError for an inference tensor outside of `torch.inference_mode()`.
    """
    if out.is_inference():
        check_may_change(op, out)
    else:
        increment_versions((out,))
    return out


def _candidates(call: Call, device: devices.Device) -> Iterator[Config]:
    """Yield the configs of a call in the order in which to try them: the planned one, then the model's.

    Ranking the whole space is the slowest step of a first call. It is done only where the planned config does
    not run.
    """
    only = fixed(call)
    first = only or planned(call.problem, call.tensors[0].device.index).config
    yield first
    if only is None:
        yield from (c for c in model.screened(call.problem, device, _FALLBACKS) if c != first)


def prepared(call: Call) -> launch.Launch | launch.SplitLaunch:
    """Return the launch of a call on a GPU, by its plan.

    Where the planned config does not compile or load here, the next configs of the model are tried.

    Raises:
        UnsupportedError: no config runs.
        NotCompiledError: something would have to be compiled, in mode "strict".
    """
    device, failures = devices.gpu(call.tensors[0].device.index), []
    label = f"{call.problem.label} on {device.name}"
    advice = "call it once in another mode"
    if fixed(call) is None:  # calls in place are not compiled ahead
        advice = f"run `tritile compile` or `tritile.warm` for it, or {advice}"
    for config in _candidates(call, device):
        try:
            with asking(call.problem.label, str(config)), as_mode_asks(f"{label} with {config}", advice):
                return launch.prepare(call, config)
        except TuningError as error:
            failures.append(why := str(error))
            facts = {"problem": call.problem.label, "config": str(config), "device": device.name}
            log("compile", logging.WARNING, **facts, failure=why)
    raise UnsupportedError(f"no config runs {label}: {'; '.join(failures[:3])}")
