"""`tritile.explain`: explain what a call costs, what bounds it, and why other configs are slower."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.lab.explain import Explanation, config_like, explained
from tritile.lab.explain.explanation import Measure
from tritile.ops.matmul import matmul
from tritile.ops.permute import transpose
from tritile.ops.plan import IN_PLACE, plan
from tritile.planning.kernel_plan import Plannable
from tritile.runtime import launch
from tritile.tune.measure.timing import Timed, graph_of, interleaved, timing_of
from tritile.tune.subject.operands import copies_of, run_of


def _measured(problem: Tiled, device: Device) -> Measure:
    """Return a function that times configs on the current GPU, by turns, on operands that leave L2 cold."""

    def times_us(configs: Sequence[Config]) -> dict[Config, float]:
        graphs: dict[Config, Timed] = {}
        try:
            calls = copies_of(problem, device)
            for config in configs:
                with contextlib.suppress(TuningError):  # a config that cannot run here gets no time
                    graphs[config] = graph_of(run_of(launch.prepare(calls[0], config)), calls)
        except torch.cuda.OutOfMemoryError:
            warnings.warn("explain: too little GPU memory to measure; measure=False skips it", stacklevel=4)
        samples = interleaved(list(graphs.values())) if graphs else []
        return {config: timing_of(own).us for config, own in zip(graphs, samples, strict=True)}

    return times_us


def explain(
    what: Callable[..., Any] | str | Tiled | torch.Tensor,
    *args: Any,
    device: Device | torch.device | str | None = None,
    config: Config | str | None = None,
    measure: bool = True,
    **kwargs: Any,
) -> Explanation:
    """Explain what a call costs with its config, what bounds it, and why other configs are slower.

    The explanation prints as a table.

    Args:
        what: an operation, as `tritile.matmul`, or its name, followed by the arguments of the call; or
            tensors alone, two to multiply or one to transpose; or a problem alone.
        args: the call's positional arguments.
        device: the GPU to explain for, as `tritile.plan` takes it. Default: the tensors' GPU; for a problem,
            and for tensors in host memory or on the meta device, the current GPU.
        config: the config to explain, or a text that names some of its parameters ("tile BLOCK_M=64"), of
            which the fastest predicted config is taken. Default: the plan's config.
        measure: time this config and others on random operands if the GPU is the current one. This takes
            memory for copies of the operands that exceed the L2 cache three times, and for at least one copy;
            without that memory it warns and gives no times.
        kwargs: the call's keyword arguments.

    Raises what `tritile.plan` raises, and InvalidValueError for a config that is not legal for the problem,
    and for a call in place; UnsupportedError for a decorated kernel.
    """
    if isinstance(what, torch.Tensor):
        what, args = (matmul if args else transpose), (what, *args)
    if isinstance(what, Plannable):
        raise UnsupportedError(
            "explain: a decorated kernel tells nothing of its bytes: `tritile.plan` tells its config "
            "and why, `tritile.bench` its time"
        )
    if config is not None and not isinstance(config, str | Config):
        raise InvalidValueError(
            f"explain: config={config!r}: wanted a Config, or a text that names parameters"
        )
    here = devices.current_gpu()
    if device is None and not isinstance(what, Tiled):
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if all(tensor.device.type in ("cpu", "meta") for tensor in tensors):
            device = here
            if device is None:
                raise InvalidValueError(
                    "explain: there is no GPU here: name one with device=tritile.target_device('nvidia-h200')"
                )
    chosen = plan(what, *args, device=device, **kwargs)
    if chosen.why == IN_PLACE:
        raise InvalidValueError("explain: a call in place has one kernel and one config: leave out= away")
    if isinstance(config, str):
        config = config_like(config, chosen.problem, chosen.device)
    timed = measure and chosen.device == here and torch.cuda.is_available()
    return explained(chosen, config, _measured(chosen.problem, chosen.device) if timed else None)
