"""A kernel under `tritile.autotune` inside torch.compile: the tracer sees the remembered config alone.

torch's tracer takes a `triton.runtime.Autotuner` apart. It asks `early_config_prune` for configs, makes a
kernel of each, and times them itself where there are several. So the tuner shows it a pruning that leaves the
config which tritile remembers. Any other caller of that pruning gets the kernel's own. Nothing can be
measured or checked while the tracer runs.
"""

import ast
import re
import textwrap
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
import triton
from torch.compiler import is_dynamo_compiling

from tritile.core import device as devices
from tritile.core.of_torch import TracingContext, trace_as_constant
from tritile.core.of_triton import Heuristics
from tritile.core.settings import current_mode
from tritile.core.versions import parsed, warn_untested
from tritile.errors import DeviceError, UntunedWarning, callers_level
from tritile.tune.remembering import RememberingAutotuner
from tritile.tune.spaces import Space

_OF_DESCRIPTORS: Final = re.compile("load|store|gather|scatter|atomic_")
Pruning = Callable[..., Sequence[triton.Config]]
Tensors = tuple[tuple[str, torch.dtype, torch.device], ...]
Values = tuple[tuple[str, Any], ...]


def unfollowed(fn: Any) -> str:
    """Return why torch's tracer cannot follow a pruning of this kernel, "" where it can.

    Before torch 2.13 it does not follow one through heuristics. It tells a pruning nothing of tensor
    descriptors.
    """
    if isinstance(fn, Heuristics) and parsed(torch.__version__) < (2, 13):
        return "has heuristics, which this torch does not look through"
    while isinstance(fn, Heuristics):
        fn = fn.fn
    methods = (
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(textwrap.dedent(getattr(fn, "src", ""))))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    if any(name in fn.arg_names and _OF_DESCRIPTORS.match(method) for name, method in methods):
        return "takes tensor descriptors, of which torch tells nothing"
    return ""


def is_known(value: Any) -> bool:
    """Tell whether the tracer knows a value as it compiles: neither a tensor nor a number that may change."""
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, int | float):
        return torch.fx.experimental.symbolic_shapes.has_static_value(value)
    return True


def pruning(
    tuner: "TracedAutotuner", early: Pruning | None, perf_model: Callable[..., float] | None
) -> Pruning:
    """Return an `early_config_prune` that leaves the tracer the configs remembered for a call.

    The tracer follows all of its code but `remembered`, which it runs. `early` and `perf_model` are the
    kernel's own. They choose where nothing is remembered; `early` also answers every other caller.
    """
    names, keys, of = tuple(tuner.arg_names), tuple(tuner.keys), weakref.ref(tuner)

    def remembered(tensors: Tensors, values: Values, unknown: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return indices of the tuner's configs, none where nothing is remembered; None: leave them all."""
        tuner = of()
        return None if tuner is None else tuner.traced(tensors, dict(values), unknown)

    trace_as_constant(remembered)

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
        indices = remembered(tensors, values, unknown)
        if indices:
            return [configs[index] for index in indices]
        left = configs if early is None else list(early(configs, named_args, **kwargs))
        if indices is None:
            return left
        if perf_model is not None:  # the tracer knows no min by key
            left = sorted(left, key=lambda config: perf_model(**given, **config.all_kwargs()))
        return left[:1]

    return prune


class TracedAutotuner(RememberingAutotuner):
    """Show torch's tracer the remembered config."""

    configs_top_k: Any
    early_config_prune: Any

    def __init__(self, fn: Any, configs: list[triton.Config] | Space, key: list[str], **rest: Any) -> None:
        self._unfollowed, self._told = unfollowed(fn), False
        super().__init__(fn, configs, key, **rest)
        if isinstance(self.configs_top_k, float) and self.configs_top_k <= 1.0:
            # The number that Triton makes of a share: the tracer would take that share of the pruned configs.
            self.configs_top_k = max(1, int(len(self._configs) * self.configs_top_k))
        self._early = self.early_config_prune
        self._show_to_the_tracer()

    def _show_to_the_tracer(self) -> None:
        if not self._unfollowed and (self.space is not None or len(self._configs) > 1):
            self.early_config_prune = pruning(self, self._early, self.perf_model)

    def __copy__(self) -> Self:
        """Copy the tuner; the copy may then be given other configs and another mode."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._show_to_the_tracer()
        return copied

    @property
    def configs(self) -> list[triton.Config]:
        """Return the configs to choose among; of a space one, and while torch.compile traces the remembered.

        Warns, once, where the tracer takes them all.
        """
        if (self.space is not None or self._unfollowed) and TracingContext.try_get() is not None:
            if self._unfollowed:
                self._say_left_to_torch()
            else:
                self._offer_remembered()
        return self._configs

    @configs.setter
    def configs(self, configs: list[triton.Config]) -> None:
        self._configs = configs

    def _say_left_to_torch(self) -> None:
        if not self._told and len(self._configs) > 1:
            self._told = True
            text = (
                f"{self.base_fn.__qualname__} {self._unfollowed}: inside torch.compile, torch times all its "
                "configs, whatever is remembered"
            )
            warnings.warn(text, UntunedWarning, stacklevel=callers_level())

    def _offer_remembered(self) -> None:
        """Put a space's fastest configs, of all its problems, where the tracer looks for configs."""
        gpus = {devices.gpu(index) for index in range(torch.cuda.device_count())}
        for device in gpus or {devices.INTERPRETER}:
            for problem, _ in self.measured(device):
                config = self.remembered(problem, device)
                if config is not None and config not in self._configs:
                    self._configs.append(config)

    def traced(
        self, tensors: Tensors, values: Mapping[str, Any], unknown: Sequence[str]
    ) -> tuple[int, ...] | None:
        """Return the indices among `configs` of those remembered for a call that torch.compile traces.

        `tensors` holds each tensor's name, dtype and device, `values` the known values of the key, and
        `unknown` the names in the key whose values may change from call to call. With such names the configs
        are those of all nearest problems, whatever their values of these. The tuple is empty where neither
        the store nor a neighbour tells; None stands for a GPU that is not here. Nothing is measured.
        Raises NotTunedError in mode "strict" where nothing is remembered.
        """
        warn_untested()
        gpus = [device.index or 0 for _, _, device in tensors if device.type == "cuda"]
        try:
            device = devices.gpu(gpus[0]) if gpus else devices.INTERPRETER
        except DeviceError:
            return None
        mode = self.mode or current_mode()
        if mode == "off":
            return ()
        of_dtypes = {name: SimpleNamespace(dtype=dtype) for name, dtype, _ in tensors}
        problem = self.problem((), {**of_dtypes, **values})
        if unknown:
            found = self.nearest(problem, device, unknown)
        else:
            found = [config for config in [self.remembered(problem, device)] if config is not None]
        if not found:
            mode = "cached" if mode == "tune" else mode
            near = self.likely(problem, mode, device, ", outside of torch.compile")
            found = [] if near is None else [near]
        return tuple(index for index, config in enumerate(self._configs) if config in found)
