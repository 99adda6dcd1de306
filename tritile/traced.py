"""What torch.compile sees of a kernel under `tritile.autotune`: the config that is remembered, and no other.

torch's tracer takes a `triton.runtime.Autotuner` apart. It asks its `early_config_prune` for configs, makes
a kernel of each, and times them by itself where there are several. So the pruning that it follows leaves
what tritile remembers. Nothing can be measured or checked while it traces. Whoever else asks the pruning
gets what the kernel's own gives.
"""

import ast
import re
import textwrap
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from torch.compiler import is_dynamo_compiling
from triton.runtime.autotuner import Heuristics

from tritile.versions import parsed

if TYPE_CHECKING:
    from tritile.autotuner import Autotuner

_OF_DESCRIPTORS: Final = re.compile("load|store|gather|scatter|atomic_")
Pruning = Callable[..., Sequence[triton.Config]]
Tensors = tuple[tuple[str, torch.dtype, torch.device], ...]
Values = tuple[tuple[str, Any], ...]


def unfollowed(fn: Any) -> str:
    """Return why torch's tracer cannot follow a pruning of this kernel, "" where it can.

    Before torch 2.13 it does not follow one through heuristics. Of what is given as a tensor descriptor it
    tells nothing.
    """
    if isinstance(fn, Heuristics) and parsed(torch.__version__) < (2, 13):
        return "has heuristics, through which this torch finds"
    while isinstance(fn, Heuristics):
        fn = fn.fn
    methods = (
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(textwrap.dedent(getattr(fn, "src", ""))))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    if any(name in fn.arg_names and _OF_DESCRIPTORS.match(method) for name, method in methods):
        return "takes tensor descriptors, by which torch finds"
    return ""


def is_known(value: Any) -> bool:
    """Whether the tracer knows a value as it compiles: not a tensor's, nor a number's that may change."""
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, int | float):
        return torch.fx.experimental.symbolic_shapes.has_static_value(value)
    return True


def pruning(tuner: "Autotuner", early: Pruning | None, perf_model: Callable[..., float] | None) -> Pruning:
    """Return an `early_config_prune` that, for torch's tracer, leaves what is remembered for a call.

    The tracer follows all of it but `remembered`, which it runs. `early` and `perf_model` are the kernel's
    own: they choose where nothing is remembered, and `early` for whoever else asks.
    """
    names, keys, of = tuple(tuner.arg_names), tuple(tuner.keys), weakref.ref(tuner)

    def remembered(tensors: Tensors, values: Values, unknown: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the places of configs among the tuner's, none where nothing tells; None: ask nobody."""
        tuner = of()
        return None if tuner is None else tuner.traced(tensors, dict(values), unknown)

    remembered._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result does

    def prune(
        configs: list[triton.Config], named_args: Mapping[str, Any], **kwargs: Any
    ) -> Sequence[triton.Config]:
        if not is_dynamo_compiling():
            return configs if early is None else early(configs, named_args, **kwargs)
        given = {**named_args, **kwargs}
        tensors = tuple(
            (name, given[name].dtype, given[name].device)
            for name in names
            if name in given and isinstance(given[name], torch.Tensor)
        )
        values = tuple((name, given[name]) for name in keys if name in given and is_known(given[name]))
        unknown = tuple(name for name in keys if name in given and not is_known(given[name]))
        places = remembered(tensors, values, unknown)
        if places:
            return [configs[place] for place in places]
        left = configs if early is None else list(early(configs, named_args, **kwargs))
        if places is None:
            return left
        if perf_model is not None:  # the tracer knows no min by key
            left = sorted(left, key=lambda config: perf_model(**given, **config.all_kwargs()))
        return left[:1]

    return prune
