"""The tuner of one kernel that somebody else decorated with `triton.autotune`: see `adoption`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import triton

from tritile.core.settings import requested_mode
from tritile.core.torch_private import TracingContext
from tritile.core.triton_private import Autotuner as TritonAutotuner
from tritile.errors import NotCompiledError, NotTunedError, brief, callers_level
from tritile.tuner import traced
from tritile.tuner.adoption import AdoptedKernel, Options, Unchosen
from tritile.tuner.arguments import DESCRIPTORS
from tritile.tuner.autotuner import DTYPES, NO_DTYPE, Autotuner, Key, Place
from tritile.tuner.plan import KernelPlan

_NONE: Final[dict[Key, triton.Config]] = {}


class _OfKernel:
    """An attribute that programs read of the kernel, and that its tuner sets."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, tuner: "Adopted", kind: type | None = None) -> Any:
        return self if tuner is None else getattr(tuner.kernel, self._name, None)

    def __set__(self, tuner: "Adopted", value: Any) -> None:
        setattr(tuner.kernel, self._name, value)


class Adopted(Autotuner):
    """Tune a kernel as its own attributes say; what it chooses goes into the kernel's own `cache`.

    `before` is the tuner that the kernel had until a program changed an attribute of it.
    """

    best_config = _OfKernel()
    configs_timings = _OfKernel()
    bench_time = _OfKernel()

    def __init__(
        self, kernel: Any, options: Options, record: AdoptedKernel, before: "Adopted | None" = None
    ) -> None:
        self.kernel, self._record = kernel, record
        own = {name: kernel.__dict__.get(name) for name in ("configs_timings", "bench_time")}
        super().__init__(
            kernel.fn, kernel.configs, [*kernel.keys], mode=options.mode, bucket=dict(options.bucket),
            isolate=True, reference=options.reference, tolerance=None, table=options.table,
            do_bench=_bench_of(kernel), prune_configs_by={
                "perf_model": kernel.perf_model, "top_k": kernel.configs_top_k,
                "early_config_prune": kernel.__dict__.get("early_config_prune"),
            },
            reset_to_zero=kernel.reset_to_zero, restore_value=kernel.restore_value,
            pre_hook=_hook_of(kernel, "pre_hook"), post_hook=_hook_of(kernel, "post_hook"),
        )  # fmt: skip
        for name, value in own.items():
            kernel.__dict__.pop(name, None) if value is None else setattr(kernel, name, value)
        self._caches = {None: kernel.cache}  # of the first mode and GPU
        if before is not None:
            self._digest, self._warnings, self._retuned = before._digest, before._warnings, before._retuned

    def launch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Launch as `run` does, sooner where the config was chosen before."""
        key, gpu = self.key_of(args, kwargs)
        mode = self.mode or requested_mode() or "tune"
        config = self._caches.get((mode, gpu), _NONE).get(key)
        if config is None or config.pre_hook is not None or self.interpreted or mode == "strict":
            return self.run(*args, **kwargs)
        self.kernel.best_config = config
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Key, int]:
        """Return just Triton's key, by which programs read and write the cache, and the GPU of a tensor."""
        placed, gpu = len(args), -1
        key = [
            args[index] if index < placed else kwargs[name]
            for name, index in self.key_indices()
            if index < placed or name in kwargs
        ]
        for value in args if len(kwargs) <= 2 else (*args, *kwargs.values()):  # beside grid and warmup
            if value.__class__ in NO_DTYPE:
                continue
            dtype = getattr(value, "dtype", None)
            if dtype is not None:
                key.append(DTYPES.get(dtype) or DTYPES.setdefault(dtype, str(dtype)))
                if gpu < 0 and getattr(value, "is_cuda", False):
                    gpu = value.get_device()
            elif gpu < 0 and value.__class__ in DESCRIPTORS and value.base.is_cuda:
                gpu = value.base.get_device()
        return tuple(key), gpu

    def _on_miss(
        self, place: Place, cache: Any, key: Key, args: tuple[Any, ...], kwargs: Any
    ) -> triton.Config:
        """Return the config of a call: the program's own, where its `cache` answers by `in` alone."""
        if cache is self.kernel.cache and key in cache:
            return cache[key]
        self.kernel.nargs = dict(zip(self.arg_names, args, strict=False))  # where prunings look for it
        try:
            return super()._on_miss(place, cache, key, args, kwargs)
        except (NotTunedError, NotCompiledError):
            raise
        except Exception as error:
            self._warn_once(error)
            raise Unchosen from error
        finally:
            self.kernel.nargs = None

    def choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: str) -> KernelPlan:
        before, self.bench_time = self.bench_time, 0.0  # measuring sets it
        try:
            plan = super().choose(args, kwargs, mode)
        finally:
            seconds = self.bench_time
            self.bench_time = seconds or before or 0.0
        if self.configs_timings is None:
            self.configs_timings = {}
        self._record.count(plan.source in ("exact", "table"), seconds)
        return plan

    def _warn_once(self, error: Exception) -> None:
        if not self._record.why:
            self._record.why = brief(error)
            text = f"tritile chooses no config for {self._record.name}, and Triton tunes it: {brief(error)}"
            warnings.warn(text, RuntimeWarning, callers_level())

    def shown_to_tracer(self) -> Any:
        """Return the pruning that leaves torch's tracer the remembered configs."""
        if TracingContext.try_get() is not None:
            traced.show(self)
        return self.early_config_prune


def _bench_of(kernel: Any) -> Any:
    """Return a program's own benchmark; None for Triton's, also with `warmup`, `rep` or `use_cuda_graph`."""
    bench = kernel.__dict__.get("_do_bench")
    return None if getattr(bench, "__module__", None) == TritonAutotuner.__module__ else bench


def _hook_of(kernel: Any, name: str) -> Any:
    """Return a hook that a program gave; None for one that does `reset_to_zero` and `restore_value`.

    Triton marks hooks that its decorator was given. One that is not marked is the program's own, too, unless
    the constructor of the tuner's class made it, in Triton or in a subclass.
    """
    hook = getattr(kernel, name)
    if getattr(kernel, f"user_defined_{name}", False):
        return hook
    made = {(each.__module__, f"{each.__qualname__}.__init__") for each in type(kernel).__mro__}
    where = getattr(hook, "__module__", None), getattr(hook, "__qualname__", "").rpartition(".<locals>")[0]
    return None if where in made else hook
