"""A kernel under `tritile.autotune` inside torch.compile: the tracer sees only the remembered config.

torch's tracer takes a `triton.runtime.Autotuner` apart: it calls `early_config_prune`, makes a kernel of each
config that this returns, and times them itself if there are several. So the tuner has a pruning that leaves
the tracer the remembered config, provided that the kernel's own pruning leaves it too. Any other caller gets
the result of the kernel's own pruning. Nothing is measured or checked while the tracer runs.
"""

import inspect
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from torch.compiler import is_dynamo_compiling

from tritile.core import device as devices
from tritile.core.settings import requested_mode
from tritile.core.torch_private import constant_in_graphs, is_fake
from tritile.core.triton_private import Heuristics
from tritile.core.versions import parsed, warn_untested
from tritile.errors import DeviceError, NotTunedError, UntunedWarning, callers_level
from tritile.tuner.arguments import constants_of, identified
from tritile.tuner.store.tables import kernel_problem
from tritile.tuner.store.trials import store_of

if TYPE_CHECKING:
    from tritile.tuner.autotuner import Autotuner

_MAX_NEAR: Final = 256  # measured problems to look up for a call with dynamic sizes
Pruning = Callable[..., Sequence[triton.Config]]
Tensors = tuple[tuple[str, torch.dtype, torch.device], ...]


def _is_constant(value: Any) -> bool:
    """True for a value that is fixed while tracing: neither a tensor nor a number that may change."""
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return torch.fx.experimental.symbolic_shapes.has_static_value(value)
    return not isinstance(value, torch.Tensor)


def pruning(tuner: "Autotuner", early: Pruning | None, perf_model: Callable[..., float] | None) -> Pruning:
    """Return an `early_config_prune` that leaves the tracer the configs remembered for a call.

    The tracer traces its code, and calls `remembered`. `early` and `perf_model` are the kernel's own: they
    choose if nothing is remembered, and `early` serves every other caller.
    """
    names, keys, tuner_ref = tuple(tuner.arg_names), tuple(tuner.keys), weakref.ref(tuner)
    # torch drops both lists when it prunes, and would time several configs on tensors that nothing restores.
    most = 1 if tuner.reset_to_zero or tuner.restore_value else None

    def remembered(
        tensors: Tensors, values: tuple[tuple[str, Any], ...], unknown: tuple[str, ...],
        absent: tuple[str, ...],
    ) -> tuple[int, ...] | None:  # fmt: skip
        tuner = tuner_ref()
        return None if tuner is None else indices_of(tuner, tensors, dict(values), unknown, absent)

    constant_in_graphs(remembered)

    def prune(
        configs: list[triton.Config], named_args: Mapping[str, Any], **kwargs: Any
    ) -> Sequence[triton.Config]:
        named = {**named_args, **kwargs}
        left = configs if early is None else early(configs, named_args, **kwargs)
        if not is_dynamo_compiling() and not any(is_fake(value) for value in named.values()):
            return left
        tensors = tuple(
            (name, named[name].dtype, named[name].device)
            for name in names
            if name in named and isinstance(named[name], torch.Tensor)
        )
        values = tuple((name, named[name]) for name in keys if name in named and _is_constant(named[name]))
        unknown = tuple(name for name in keys if name in named and not _is_constant(named[name]))
        indices = remembered(tensors, values, unknown, tuple(name for name in names if name not in named))
        left = list(left)
        if indices is None:
            return left[:most]
        chosen = [configs[index] for index in indices]
        if early is not None:  # what is remembered runs only where the kernel's own pruning leaves it
            chosen = [config for config in chosen if any(config is other for other in left)]
        if chosen:
            return chosen[:most]
        if perf_model is not None:  # the tracer knows no min by key
            left = sorted(left, key=lambda config: perf_model(**named, **config.all_kwargs()))
        return left[:1]

    return prune


def show(tuner: "Autotuner") -> None:
    """Add a space's fastest configs, of any problem, to `configs`; warn of heuristics unknown to torch."""
    if isinstance(tuner.fn, Heuristics) and parsed(torch.__version__) < (2, 13):
        tuner._pruning = tuner._early
        _warn_left_to_torch(tuner, "has heuristics, which this torch does not look through")
    elif tuner.space is not None:
        gpus = {devices.gpu(index) for index in range(torch.cuda.device_count())}
        for device in gpus or {devices.HOST}:
            for problem in filter(None, map(kernel_problem, store_of(device).problems(tuner.digest))):
                plan = tuner.remembered(problem, device, {})
                if plan is not None and plan.config not in tuner._configs:
                    tuner._configs.append(plan.config)


def _warn_left_to_torch(tuner: "Autotuner", why: str) -> None:
    if len(tuner._configs) > 1:
        text = f"{tuner.base_fn.__qualname__} {why}: inside torch.compile, torch times all its configs"
        warnings.warn(f"{text}, whatever is remembered", UntunedWarning, stacklevel=callers_level())


def indices_of(
    tuner: "Autotuner", tensors: Tensors, values: Mapping[str, Any], unknown: Sequence[str],
    absent: Sequence[str] = (),
) -> tuple[int, ...] | None:  # fmt: skip
    """Return the indices of a tuner's configs that are remembered for a call which torch.compile traces.

    Empty: the first config that the pruning leaves should run. None: torch should time all of them, which is
    so in mode "tune" if nothing is remembered, and for a GPU that is not installed. Raises NotTunedError in
    mode "strict" if nothing is remembered.

    `tensors` has each tensor's name, dtype and device, and `values` the values in the key that are fixed.
    `unknown` names those that may change from call to call; the configs are then those of all nearest
    problems, whatever their values of these. `absent` names arguments that torch hides from the pruning, such
    as tensor descriptors.
    """
    warn_untested()
    gpus = [device.index or 0 for _, _, device in tensors if device.type == "cuda"]
    try:
        device = devices.gpu(gpus[0]) if gpus else devices.HOST
    except DeviceError:
        return None
    mode = tuner.mode or requested_mode() or "tune"
    if mode == "off":
        return ()
    parameters, constants = inspect.signature(tuner.base_fn).parameters, constants_of(tuner.base_fn)
    if any(parameters[n].default is inspect.Parameter.empty for n in absent if n not in constants):
        _warn_left_to_torch(tuner, "takes arguments that torch hides from its pruning")
        return None
    of_dtypes = {name: SimpleNamespace(dtype=dtype) for name, dtype, _ in tensors}
    problem, configs = tuner.problem((), {**of_dtypes, **values}), identified(tuner._configs)
    exact = None if unknown else tuner.remembered(problem, device, configs)
    chosen = [] if exact is None else [exact.config]
    if exact is None and mode == "strict" and tuner.measurable(device):
        raise NotTunedError(f"mode is strict and nothing measured is remembered for {problem.label}")
    if unknown or (exact is None and mode != "tune"):
        near = list(tuner.nearest(problem, device, configs, unknown, _MAX_NEAR if unknown else 1))
        chosen = [config for doublings, config in near if doublings == near[0][0]]
    if not chosen and mode == "tune" and not (tuner.space or tuner.reset_to_zero or tuner.restore_value):
        return None
    if not chosen and tuner.perf_model is None and tuner.measurable(device):
        tuner.warn_untuned(problem, device, ", outside of torch.compile")
    is_same = operator.eq if tuner.space is not None else operator.is_
    return tuple(
        i for i, config in enumerate(tuner._configs) if any(is_same(config, other) for other in chosen)
    )
