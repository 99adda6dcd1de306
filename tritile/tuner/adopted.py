"""The tuner of a kernel that somebody else decorated with `triton.autotune`: see `adoption`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import triton

from tritile.core.forgetting import Memo
from tritile.core.settings import requested_mode
from tritile.core.torch_private import TracingContext
from tritile.core.triton_private import Autotuner as TritonAutotuner
from tritile.errors import (
    GpuTakenError,
    NotCompiledError,
    NotTunedError,
    UntunedWarning,
    brief,
)
from tritile.tuner import traced
from tritile.tuner.adoption import TUNERS, AdoptedKernel, Options, Unchosen, warn
from tritile.tuner.arguments import DESCRIPTORS
from tritile.tuner.autotuner import DTYPES, MAX_CACHED, NO_DTYPE, SPECIAL, Autotuner, CacheKey, Scope
from tritile.tuner.plan import KernelPlan
from tritile.tuner.store.claims import Claim
from tritile.tuner.store.trial import seconds_between
from tritile.tuner.store.trials import store_of

_NONE: Final[dict[CacheKey, triton.Config]] = {}
_taken: set[int] = set()  # GPUs that had no room for workers: this process tries no more


class _KernelAttribute:
    """An attribute that lives on the kernel, where programs read it."""

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, tuner: "Adopted", kind: type | None = None) -> Any:
        return self if tuner is None else getattr(tuner.kernel, self._name, None)

    def __set__(self, tuner: "Adopted", value: Any) -> None:
        setattr(tuner.kernel, self._name, value)


class Adopted(Autotuner):
    """Tunes a kernel by the kernel's own attributes, and puts its choices into the kernel's own `cache`.

    `before` is the tuner that the kernel had until a program changed one of its attributes.
    """

    best_config = _KernelAttribute()
    configs_timings = _KernelAttribute()
    bench_time = _KernelAttribute()
    measures_on_taken_gpu = False

    def __init__(
        self, kernel: Any, options: Options, record: AdoptedKernel, before: "Adopted | None" = None
    ) -> None:
        self.kernel, self._record = kernel, record
        own = {name: kernel.__dict__.get(name) for name in ("configs_timings", "bench_time")}
        super().__init__(
            kernel.fn, kernel.configs, [*kernel.keys], mode=options.mode, effort=options.effort,
            bucket=dict(options.bucket), isolate=True, reference=options.reference, tolerance=None,
            table=options.table, do_bench=_bench_of(kernel), prune_configs_by={
                "perf_model": kernel.perf_model, "top_k": kernel.configs_top_k,
                "early_config_prune": kernel.__dict__.get("early_config_prune"),
            },
            reset_to_zero=kernel.reset_to_zero, restore_value=kernel.restore_value,
            pre_hook=_hook_of(kernel, "pre_hook"), post_hook=_hook_of(kernel, "post_hook"),
        )  # fmt: skip
        for name, value in own.items():
            kernel.__dict__.pop(name, None) if value is None else setattr(kernel, name, value)
        self._cache: dict[CacheKey, triton.Config] = kernel.cache
        self._caches: dict[Any, Any] = {}
        self._written: dict[CacheKey, triton.Config] = {}  # what this tuner put into the kernel's cache
        self._guessed: set[tuple[str, CacheKey]] = set()  # mode and call of unmeasured choices
        if before is not None and before.kernel is kernel:
            self._digest, self._warnings, self._retuned = before._digest, before._warnings, before._retuned
            self._tables_of_others = before._tables_of_others
            if before._cache is kernel.cache and before.keys == self.keys:
                self._caches, self._written, self._guessed = before._caches, before._written, before._guessed
                self._spreads = before._spreads
                for place in [place for place, spread in self._spreads.items() if spread is None]:
                    self._spreads.pop(place)  # other configs may be left to measure now
        TUNERS.add(self)

    def launch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Launch with the config in the kernel's `cache`, else with one chosen now. May raise Unchosen."""
        kernel, mode = self.kernel, self.mode or requested_mode() or "tune"
        key, gpu = self.cache_key_of(args, kwargs)
        config, written = self._caches.get((mode, gpu), _NONE).get(key), self._cache.get(key)
        if config is None or config is not written:
            config = self._chosen((mode, gpu), key, config, written, args, kwargs)
        kernel.best_config = config
        if config.pre_hook is not None or self.interpreted or mode in SPECIAL:
            return self._launch_special(config, (mode, gpu), key, args, kwargs)
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.launch(args, kwargs)

    def _chosen(
        self, scope: Scope, key: CacheKey, chosen: triton.Config | None, written: triton.Config | None,
        args: tuple[Any, ...], kwargs: Mapping[str, Any],
    ) -> triton.Config:  # fmt: skip
        """Return the program's own entry in the kernel's `cache`, else the choice for the mode and GPU.

        The choice goes into the cache, for programs to read. If a program removes an entry, it is chosen
        again.
        """
        cache = self._cache
        if written is None and key in cache:
            written = cache[key]  # the `get` of some caches misses what `in` finds
        if written is not None and self._written.get(key) is not written:
            return written
        if chosen is None or written is None:
            own = self._caches.setdefault(scope, Memo(MAX_CACHED))
            own.pop(key, None)
            chosen = self._on_miss(scope, own, key, args, dict(kwargs))
            if own.get(key) is not chosen:
                return chosen  # not cached: tentative, or during a capture
        self._written[key] = cache[key] = chosen
        return chosen

    def drop_guesses(self) -> None:
        """Remove unmeasured choices from the kernel's cache, where Triton would take them for measured."""
        for _, key in self._guessed:
            if key in self._written and self._cache.get(key) is self._written[key]:
                del self._cache[key]
        self._guessed.clear()

    def _launch_special(
        self, config: triton.Config, scope: Scope, key: CacheKey, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        self.kernel.nargs = dict(zip(self.arg_names, args, strict=False))  # for hooks
        try:
            return super()._launch_special(config, scope, key, args, kwargs)
        finally:
            self.kernel.nargs = None

    def cache_key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CacheKey, int]:
        """Return exactly Triton's cache key, as programs access the cache by it, and a tensor's GPU."""
        placed, gpu = len(args), -1
        key = [
            args[index] if index < placed else kwargs[name]
            for name, index in self.key_indices()
            if index < placed or name in kwargs
        ]
        for value in args if len(kwargs) <= 2 else (*args, *kwargs.values()):  # more than grid and warmup
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
        self, scope: Scope, cache: Any, key: CacheKey, args: tuple[Any, ...], kwargs: Any
    ) -> triton.Config:
        self.kernel.nargs = dict(zip(self.arg_names, args, strict=False))  # for prunings
        try:
            return super()._on_miss(scope, cache, key, args, kwargs)
        except (NotTunedError, NotCompiledError):
            raise
        except Exception as error:
            name, why, self._record.why = self._record.name, self._record.why, brief(error)
            if scope[0] == "strict":
                text = f"mode is strict, and tritile chooses no config for {name}: {brief(error)}"
                raise NotTunedError(text) from error
            if not why:
                text = f"tritile chooses no config for {name}, and Triton tunes it: {brief(error)}"
                warn(text, RuntimeWarning)
            raise Unchosen from error
        finally:
            self.kernel.nargs = None

    def choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: str) -> KernelPlan:
        before, self.bench_time = self.bench_time, 0.0  # measuring sets it
        key, gpu = self.cache_key_of(args, kwargs)
        try:
            is_taken = mode == "tune" and gpu in _taken
            plan = self._unmeasurable(args, kwargs) if is_taken else super().choose(args, kwargs, mode)
        except GpuTakenError as error:
            self._warn_taken(gpu, error)
            if error.for_all:
                _taken.add(gpu)
            plan = self._unmeasurable(args, kwargs)
        finally:
            seconds = self.bench_time
            self.bench_time = seconds or before or 0.0
        if self.configs_timings is None:
            self.configs_timings = {}
        if plan.tentative:
            return plan
        is_measured = plan.source in ("exact", "table")
        (self._guessed.discard if is_measured else self._guessed.add)((mode, key))
        trials = [] if seconds or not is_measured else store_of(plan.device).trials(self.digest, plan.problem)
        self._record.count(is_measured, seconds, seconds_between(trials))
        return plan

    def _unmeasurable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KernelPlan:
        """Return the plan where the GPU has no room: tentative while a process with room measures."""
        store = store_of(self.device_of(args, kwargs))
        is_open = Claim(store, self.digest, self.problem(args, kwargs)).is_open(alive=True)
        return replace(super().choose(args, kwargs, "cached"), tentative=is_open)

    def _warn_taken(self, gpu: int, error: GpuTakenError) -> None:
        what = "nothing more" if error.for_all else f"no call of {self._record.name} of this size"
        text = f"tritile measures {what} on GPU {max(gpu, 0)}, which has no room for it: {error}"
        advice = "What is not measured runs with the config of the nearest measured problem, or its first."
        how = "Tune before the GPU is full, or on another of its model: tritile run --mode tune COMMAND"
        self._warn(f"{text}. {advice} {how}", UntunedWarning)

    def warn_untuned(self, *args: Any) -> None:
        if not _taken:  # else said once
            super().warn_untuned(*args)

    def _warn(self, text: str, category: type[Warning]) -> None:
        warn(text, category)  # does not raise: adoption breaks no program that turns warnings into errors

    def shown_to_tracer(self) -> Any:
        """Return the pruning that leaves torch's tracer the remembered configs."""
        if TracingContext.try_get() is not None:
            traced.show(self)
        return self.early_config_prune


def _bench_of(kernel: Any) -> Any:
    """Return a program's own benchmark; None for Triton's, even with `warmup`, `rep` or `use_cuda_graph`."""
    bench = kernel.__dict__.get("_do_bench")
    return None if getattr(bench, "__module__", None) == TritonAutotuner.__module__ else bench


def _hook_of(kernel: Any, name: str) -> Any:
    """Return the program's own hook; None for the one that Triton makes of `reset_to_zero`/`restore_value`.

    Triton marks the hooks that were passed to its decorator. An unmarked one is the program's own too, unless
    the constructor of the tuner's class made it, in Triton or in a subclass.
    """
    hook = getattr(kernel, name)
    if getattr(kernel, f"user_defined_{name}", False):
        return hook
    made = {(each.__module__, f"{each.__qualname__}.__init__") for each in type(kernel).__mro__}
    where = getattr(hook, "__module__", None), getattr(hook, "__qualname__", "").rpartition(".<locals>")[0]
    return None if where in made else hook
