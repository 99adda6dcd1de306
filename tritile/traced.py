"""What torch.compile sees of a kernel under `tritile.autotune`: the config that is remembered, and no other.

torch's tracer takes a `triton.runtime.Autotuner` apart. It asks its `early_config_prune` for configs, makes
a kernel of each, and times them by itself where there are several. So the pruning that it sees leaves one,
and what tritile remembers, and checks, counts there too. Nothing can be measured while it traces.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.runtime.autotuner import Heuristics

from tritile.versions import parsed

if TYPE_CHECKING:
    from tritile.autotuner import Autotuner

Pruning = Callable[..., Sequence[triton.Config]]
Tensors = tuple[tuple[str, torch.dtype, torch.device], ...]
Values = tuple[tuple[str, Any], ...]


def follows(fn: Any) -> bool:
    """Whether torch's tracer can follow a pruning of this kernel: before torch 2.13 none with heuristics."""
    return not isinstance(fn, Heuristics) or parsed(torch.__version__) >= (2, 13)


def key_value(value: Any) -> Any:
    """What the tracer is to compile for: a value that it knows, or the power of two from a size it does not.

    Where sizes may change, what is compiled is for all that come to the same power of two.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if torch.fx.experimental.symbolic_shapes.has_static_value(value):
        return operator.index(value)
    size = 1
    while size < value:  # each comparison becomes a condition of what is compiled
        size *= 2
    return size


def pruning(tuner: "Autotuner", early: Pruning | None, perf_model: Callable[..., float] | None) -> Pruning:
    """Return an `early_config_prune` that leaves the one config that `tuner` would launch a call with.

    torch's tracer follows all of it but `remembered`, which it runs. `early` and `perf_model` are the
    kernel's own; they choose where nothing is remembered.
    """
    names, keys = tuple(tuner.arg_names), tuple(tuner.keys)

    def remembered(tensors: Tensors, values: Values) -> int:
        """Return the place of a config among `tuner.configs`, -1 where nothing tells."""
        like = {name: torch.empty(0, dtype=dtype, device="meta") for name, dtype, _ in tensors}
        config = tuner.traced(like | dict(values), [device for *_, device in tensors])
        return -1 if config is None else tuner.configs.index(config)

    remembered._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result does

    def prune(
        configs: list[triton.Config], named_args: Mapping[str, Any], **kwargs: Any
    ) -> Sequence[triton.Config]:
        given = {**named_args, **kwargs}
        tensors = tuple(
            (name, given[name].dtype, given[name].device)
            for name in names
            if name in given and isinstance(given[name], torch.Tensor)
        )
        index = remembered(tensors, tuple((name, key_value(given[name])) for name in keys if name in given))
        if index >= 0:
            return [configs[index]]
        left = configs if early is None else early(configs, named_args, **kwargs)
        if perf_model is not None:
            left = sorted(left, key=lambda config: perf_model(**given, **config.all_kwargs()))  # no min
        return [left[0]]

    return prune
