"""`tritile.explain`: what a call costs, what bounds it, and why other configs lose."""

from collections.abc import Callable
from typing import Any

import torch

from tritile import device as devices
from tritile import launch
from tritile.config import Config
from tritile.device import Device
from tritile.errors import InvalidValueError
from tritile.explain import Explanation, config_like, explained
from tritile.measure.timing import graph_of, screen_us
from tritile.ops.matmul import matmul
from tritile.ops.permute import transpose
from tritile.ops.plan import plan
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.subject.operands import copies_of, run_of


def _measure(problem: MatmulProblem | PermuteProblem, device: Device) -> Callable[[Config], float]:
    """What times a config of the problem on the current GPU: in a graph, over operands that leave L2 cold."""
    calls = copies_of(problem, device)

    def measured_us(config: Config) -> float:
        return screen_us(graph_of(run_of(launch.prepare(calls[0], config)), calls)).us

    return measured_us


def explain(
    what: Callable[..., Any] | MatmulProblem | PermuteProblem | torch.Tensor,
    *args: Any,
    device: Device | None = None,
    config: Config | str | None = None,
    measure: bool = True,
    **kwargs: Any,
) -> Explanation:
    """What a call costs with its config, what bounds it, and why other configs lose. It prints as a table.

    Args:
        what: `tritile.matmul`, `permute` or `transpose`, followed by the arguments of the call; or the
            tensors alone, two of which are multiplied and one transposed; or a problem alone.
        args: the call's positional arguments.
        device: explain for this GPU, which need not be here. Default: that of the tensors, or for a
            problem, and for tensors in host memory, the current GPU.
        config: explain this config, or the likeliest that has the parameters this text names
            ("tile BLOCK_M=64"). Default: that of the plan.
        measure: time the config, and those beside it, on random operands where the GPU is the current one.
            It takes memory for copies of the operands, of three times the L2 cache together.
        kwargs: the call's keyword arguments.

    Raises what `tritile.plan` raises, and InvalidValueError for a config that is not legal for the problem,
    and for a call in place.
    """
    if isinstance(what, torch.Tensor):
        what, args = (matmul if args else transpose), (what, *args)
    if config is not None and not isinstance(config, str | Config):
        raise InvalidValueError(
            f"explain: config={config!r}: wanted a Config, or the names of some parameters"
        )
    out = kwargs.get("out")
    if isinstance(out, torch.Tensor) and any(out is value for value in args):
        raise InvalidValueError("explain: in place there is one kernel and one config: leave out= away")
    here = devices.current_gpu()
    if device is None and not isinstance(what, MatmulProblem | PermuteProblem):
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            device = here
            if device is None:
                raise InvalidValueError(
                    "explain: there is no GPU here: name one with device=tritile.target_device('nvidia-h200')"
                )
    chosen = plan(what, *args, device=device, **kwargs)
    if isinstance(config, str):
        config = config_like(config, chosen.problem, chosen.device)
    timed = measure and chosen.device == here and torch.cuda.is_available()
    return explained(chosen, config, _measure(chosen.problem, chosen.device) if timed else None)
