"""`tritile.autotune`: `triton.autotune` that measures a problem once, and remembers it in every process.

`kernel[grid](...)` calls `Autotuner.run`: a dictionary look-up by Triton's own cache key, and Triton's
launch. On a miss `choose` finds a config: remembered, measured now (`decorated.measured_config`), or a guess,
depending on the mode.
"""

import contextlib
import copy
import functools
import hashlib
import heapq
import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter
from types import FunctionType
from typing import Any, Final, Self

import torch
import triton

from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import HOST, Device, capturing
from tritile.core.forgetting import Memo, also_forgets
from tritile.core.log import log
from tritile.core.problem import KernelProblem
from tritile.core.settings import Effort, Mode, requested_mode
from tritile.core.source import source_hash
from tritile.core.threads import interpreter_lock, once
from tritile.core.torch_private import TracingContext
from tritile.core.triton_private import Autotuner as TritonAutotuner
from tritile.core.triton_private import AutotunerError, InterpretedFunction, JITFunction
from tritile.core.versions import warn_untested
from tritile.errors import (
    NotCompiledError,
    NotTunedError,
    RetuningWarning,
    UnsupportedError,
    UntunedWarning,
    brief,
    callers_level,
)
from tritile.runtime.ahead import check_fits
from tritile.runtime.compiles import compiles_refused, count_as_ours, listen
from tritile.tuner import arguments, sync, traced
from tritile.tuner.arguments import DESCRIPTORS, SCALARS, dtypes_of, hashable, identified, stored, tensors_of
from tritile.tuner.decorated import KernelCall, lacks_trials, measured_config, notify
from tritile.tuner.measure.timing import do_bench as default_bench
from tritile.tuner.plan import KernelPlan
from tritile.tuner.search import Space
from tritile.tuner.spread import Spread
from tritile.tuner.store.claims import RETRY_S
from tritile.tuner.store.tables import kernel_problem, kernel_tables
from tritile.tuner.store.trial import rank
from tritile.tuner.store.trials import store_of

MAX_CACHED: Final = 4096  # configs cached in the process, per kernel, mode and GPU
_MAX_WARNINGS: Final = 256  # of unmeasured problems: Python keeps the text of each
_MANY_VALUES: Final = 8  # tuned values of one number in the key, above which a warning suggests a bucket
SPECIAL: Final = ("spread", "strict")  # modes in which a call does more than launch
_OPENING: Final = 8  # configs of a space to choose among if nothing can be timed
_NEIGHBOURS: Final = 8  # nearest measured problems to look up
_COMPILE_ADVICE: Final = "call it once in another mode, and keep the folder TRITON_CACHE_DIR"
NO_DTYPE: Final = SCALARS | {float, JITFunction, FunctionType}  # classes whose values have no dtype
DTYPES: Final[dict[Any, str]] = {}  # the text of each dtype, which takes long to make

_TUNERS: "weakref.WeakValueDictionary[int, Autotuner]" = weakref.WeakValueDictionary()


def _forget() -> None:
    for tuner in filter(None, [ref() for ref in _TUNERS.valuerefs()]):  # other threads may decorate kernels
        tuner.forget()


also_forgets(_forget)

Scope = tuple[str, int]  # a mode and a GPU's index (-1: no tensor is on one), whose calls share a cache
CacheKey = tuple[Any, ...]  # Triton's: values of the arguments in `key`, then dtypes
Configs = Mapping[Config, triton.Config]  # by their names in the store
Fits = Callable[[triton.Config], bool]


class Autotuner(TritonAutotuner):  # type: ignore[misc]
    """`triton.runtime.Autotuner` with measurements that outlive the process.

    The time of each config is stored by GPU, versions and kernel source, so a changed list of configs
    measures only what is new. A remembered config runs only if the kernel's pruning leaves it for the current
    call. Nothing is measured while a CUDA graph is captured. A config that fails, in whatever way,
    stops no other. In Triton's interpreter the first config that the pruning leaves runs, unmeasured.
    """

    configs_top_k: Any
    nargs: Any = None
    bench_time = 0.0
    measures_on_taken_gpu = True  # in this process, where the GPU has no room for another
    measures_here = True  # in this process, where no other can

    def __init__(
        self, fn: Any, configs: list[triton.Config] | Space, key: list[str], *, mode: Mode | None,
        effort: Effort | None, bucket: Mapping[str, Callable[[Any], Any]] | None, isolate: bool,
        reference: Callable[..., Mapping[str, torch.Tensor]] | None, tolerance: float | None,
        table: str | os.PathLike[str] | None, do_bench: Callable[..., Any] | None,
        prune_configs_by: dict[str, Any] | None, **rest: Any,
    ) -> None:  # fmt: skip
        self.space = configs if isinstance(configs, Space) else None
        self.mode, self.bucket, self.table = mode, dict(bucket or {}), Path(table) if table else None
        self.effort = effort
        self.reference, self.tolerance = reference, tolerance
        self._scope: Scope | None = None  # of the latest call
        self._caches: dict[Scope | None, Memo[CacheKey, triton.Config]] = {}
        self._tentative = Memo[tuple[Scope, CacheKey], tuple[triton.Config, float]](MAX_CACHED)  # until when
        self._spreads = Memo[tuple[Scope, CacheKey], Spread | None](MAX_CACHED)  # None: over
        self._compiled = Memo[Any, bool](MAX_CACHED)  # calls in mode "strict" with a loaded kernel
        super().__init__(
            fn, fn.arg_names, [configs.opening(1)[0].to_triton()] if isinstance(configs, Space) else configs,
            [name for name in key if name in fn.arg_names],  # Triton 3.9 refuses others
            prune_configs_by={"early_config_prune": None} | (prune_configs_by or {}),
            do_bench=do_bench or default_bench, **rest,
        )  # fmt: skip
        self._is_timed_by_user = do_bench is not None
        self.isolate = isolate and not self._is_timed_by_user and not self.user_defined_post_hook
        self.configs_timings: dict[triton.Config, list[float]] = {}
        self._indices = {name: index for index, name in enumerate(self.arg_names)}
        self._key_indices: tuple[Any, list[tuple[str, int]]] = (None, [])  # of `keys`, which may be set
        self.interpreted = any(isinstance(layer, InterpretedFunction) for layer in arguments.layers_of(fn))
        self._digest: tuple[Any, Any, str] = (None, None, "")  # of `fn` and benchmark, which may be set
        self._warnings, self._retuned, self._tables_of_others = _MAX_WARNINGS, set[str](), set[Path]()
        if isinstance(self.configs_top_k, float) and self.configs_top_k <= 1.0:
            # The count that Triton makes of a fraction; torch's tracer would take it of the pruned configs.
            self.configs_top_k = max(1, int(len(self._configs) * self.configs_top_k))
        self.early_config_prune = self._early  # again: what the setter reads is complete only now
        _TUNERS[id(self)] = self
        count_as_ours(self.base_fn)

    def __repr__(self) -> str:
        name, key = getattr(self.base_fn, "__qualname__", ""), ", ".join(map(repr, self.keys))
        if self.space is None:
            configs = f"{len(self._configs)} configs"
        else:
            configs = f"a Space of {math.prod(map(len, self.space.parameters.values()))} combinations"
        return f"tritile.autotune({name.rpartition('.')[2]}, key=[{key}], {configs})"

    # A call.

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the cached config, or the one that `choose` returns; `kernel[grid](...)` calls this."""
        mode = self.mode or requested_mode() or "tune"
        scope, key = (mode, -1), ()
        if self._is_fixed and len(self._configs) == 1:
            config = self._configs[0]
        else:
            key, gpu = self.cache_key_of(args, kwargs)
            self._scope = scope = mode, gpu
            cache = self._caches.get(scope)
            if cache is None:  # the first such call takes over what a program put into `cache` before
                cache = self._caches.setdefault(scope, self._caches.pop(None, Memo(MAX_CACHED)))
            config = cache.get(key)
            if config is None:
                config = self._on_miss(scope, cache, key, args, kwargs)
        self.best_config = config
        try:
            if config.pre_hook is not None or self.interpreted or mode in SPECIAL:
                return self._launch_special(config, scope, key, args, kwargs)
            return self.fn.run(*args, **kwargs, **config.all_kwargs())
        except TypeError:
            # Does the config set the same argument?
            arguments.check_conflicts(self.base_fn, self.space or self._configs, args, kwargs)
            raise
        except RuntimeError as error:
            if "0 active drivers" not in str(error):
                raise
            why = "no kernel runs without a GPU: set TRITON_INTERPRET=1 to run it in Triton's interpreter"
            raise UnsupportedError(f"{self.base_fn.__qualname__}: {why}") from error

    def _launch_special(
        self, config: triton.Config, scope: Scope, key: CacheKey, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Launch after the config's hook, in the interpreter, or in a mode that does more than launch."""
        spread = self._spreads.get((scope, key)) if scope[0] == "spread" else None
        if spread is not None and spread.guess is config:  # else a program put another into the cache

            def run(config: triton.Config) -> Any:
                self.best_config = config
                return self._launch_special(config, ("cached", scope[1]), key, args, kwargs)

            return spread.launch(args, kwargs, run)
        options = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **options})
        if self.interpreted:
            with interpreter_lock:
                return self.fn.run(*args, **kwargs, **options)
        if scope[0] == "strict":
            return self._launch_strict(args, kwargs, config)
        return self.fn.run(*args, **kwargs, **options)

    def cache_key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CacheKey, int]:
        """Return Triton's cache key of a call, and the index of its tensors' GPU.

        Unlike Triton's it includes dtypes inside tuples and behind descriptors.
        """
        key: list[Any] = []
        placed = len(args)
        for name, index in self.key_indices():
            if index < placed:
                value = args[index]
            elif name in kwargs:
                value = kwargs[name]
            else:
                continue
            key.append(value if value.__class__ in SCALARS else hashable(value))
        gpu, values = -1, args
        if len(kwargs) > 2 or "grid" not in kwargs:
            more = [v for n, v in kwargs.items() if v.__class__ not in NO_DTYPE and n in self._indices]
            values = (*args, *more) if more else args
        for value in values:
            kind = value.__class__
            if kind in NO_DTYPE or (kind is tuple and NO_DTYPE.issuperset(map(type, value))):
                continue
            tensor = value.base if kind in DESCRIPTORS else value
            dtype = getattr(tensor, "dtype", None)
            if dtype is not None:
                key.append(DTYPES.get(dtype) or DTYPES.setdefault(dtype, str(dtype)))
                if gpu < 0 and getattr(tensor, "is_cuda", False):
                    gpu = tensor.get_device()
            elif isinstance(value, tuple | list):
                key += [dtype for _, dtype in dtypes_of("", value)]
                if gpu < 0:
                    gpu = next((x.get_device() for x in tensors_of(value) if x.is_cuda), -1)
        return tuple(key), gpu

    def key_indices(self) -> list[tuple[str, int]]:
        """The names in `keys`, each with the index of its argument."""
        keys, indices = self._key_indices
        if keys is not self.keys:
            indices = [(name, self._indices[name]) for name in self.keys if name in self._indices]
            self._key_indices = self.keys, indices
        return indices

    def _on_miss(
        self, scope: Scope, cache: Memo[CacheKey, triton.Config], key: CacheKey, args: tuple[Any, ...],
        kwargs: Any,
    ) -> triton.Config:  # fmt: skip
        """Choose a config for a call that is not cached. Of threads with the same call, one measures."""
        arguments.check_conflicts(self.base_fn, self.space or self._configs, args, kwargs)
        captured = capturing()

        def choose() -> triton.Config:
            plan = self.choose(args, kwargs, scope[0])
            if plan.tentative:
                self._tentative[scope, key] = plan.config, monotonic() + RETRY_S
            elif not captured:
                if scope[0] == "spread" and plan.source != "table":
                    self._spread(scope, cache, key, plan, args, kwargs)
                cache[key] = plan.config
            return plan.config

        tentative, until = self._tentative.get((scope, key), (None, 0.0))
        if tentative is not None and monotonic() < until:
            return tentative
        if scope[0] != "tune" or captured:
            return choose()
        return once((id(self), scope, key), lambda: cache.get(key) or choose())

    def _spread(
        self, scope: Scope, cache: Memo[CacheKey, triton.Config], key: CacheKey, plan: KernelPlan,
        args: tuple[Any, ...], kwargs: Any,
    ) -> None:  # fmt: skip
        """Have a problem measured in the course of its calls, if it can be measured in another process.

        One with some trials lacks others if its search was interrupted, or is another process's that goes on.
        """

        def on_end() -> None:
            if self._spreads.get((scope, key)) is spread:  # else it was forgotten
                self._spreads[scope, key] = None  # once in a process: some configs cannot be measured
                if cache.get(key) is plan.config:
                    cache.pop(key, None)  # the next call finds what was measured

        if not self.isolate or plan.device == HOST or (scope, key) in self._spreads:
            return
        if plan.source != "exact" or (plan.why != sync.WHY and lacks_trials(self, self.call(args, kwargs))):
            self._spreads[scope, key] = spread = Spread(self, plan.config, on_end)

    def _launch_strict(self, args: Sequence[Any], kwargs: Any, config: triton.Config) -> Any:
        """Launch a kernel that is compiled. Raises NotCompiledError, before any launch, if it is not."""
        options = config.all_kwargs()
        values = (*args, *[value for name, value in kwargs.items() if name in self._indices])
        aligned = tuple(x.data_ptr() % 16 for x in values if getattr(x, "is_cuda", False))
        types, index = tuple(map(type, values)), devices.current_index()
        call = aligned, types, hashable(values), hashable((*options.items(),)), index
        if call in self._compiled:
            return self.fn.run(*args, **kwargs, **options)
        what = f"{self.base_fn.__qualname__} with {config}"
        with compiles_refused(what, _COMPILE_ADVICE):
            kernel = self.fn.run(*args, **kwargs, **options)
        self._compiled[call] = True
        return kernel

    @property
    def cache(self) -> dict[CacheKey, triton.Config]:
        """The configs by Triton's cache key, for the mode and GPU of the latest call."""
        return self._caches.setdefault(self._scope, Memo(MAX_CACHED))

    @cache.setter
    def cache(self, cache: dict[CacheKey, triton.Config]) -> None:
        self._caches[self._scope] = Memo(MAX_CACHED)
        self._caches[self._scope].update(cache)

    def forget(self) -> None:
        """Drop the configs chosen in this process; measurements stay in the store."""
        for cache in [*self._caches.values(), self._tentative, self._spreads, self._compiled]:
            cache.clear()

    # How the store identifies a call.

    @property
    def digest(self) -> str:
        """The digest of the kernel's source and of the user's benchmark, under which trials are stored.

        With tritile's own benchmark it is only the source's digest.
        """
        fn, bench, digest = self._digest
        if fn is not self.fn or bench is not self.do_bench:
            digest = source_hash(self.fn)
            if self.do_bench is not default_bench:
                text = f"{digest} {arguments.described_benchmark(self.do_bench)}"
                digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            self._digest = self.fn, self.do_bench, digest
        return digest

    def device_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Device:
        """Return the GPU of a call's tensors; HOST in the interpreter, without a GPU and for host tensors."""
        if self.interpreted:
            return HOST
        tensors = [tensor for value in (*args, *kwargs.values()) for tensor in tensors_of(value)]
        gpus = [tensor.get_device() for tensor in tensors if tensor.is_cuda]
        if gpus:
            return devices.gpu(gpus[0])
        on_host = bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)
        return HOST if on_host else devices.current_gpu() or HOST

    def problem(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelProblem:
        """Describe a call as the store does: bucketed values of `key`, and dtypes of tensors."""
        passed = dict(zip(self.arg_names, args, strict=False)) | dict(kwargs)
        values = {name: passed[name] for name in self.arg_names if name in passed}
        bucketed = {name: bucket(values[name]) for name, bucket in self.bucket.items() if name in values}
        key = tuple((name, stored((values | bucketed)[name])) for name in self.keys if name in values)
        dtypes = tuple(pair for name, value in values.items() for pair in dtypes_of(name, value))
        return KernelProblem(self.base_fn.__qualname__, key, dtypes)

    def offered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Configs:
        """Return the configs left for a call by the kernel's own pruning; of a space, the first few.

        Raises Triton's error if none is left.
        """
        if self.space is not None:
            return {config: config.to_triton() for config in self.space.opening(_OPENING)}
        configs = listed = list(self.configs)
        if self._early is not None or self.perf_model is not None:
            configs = list(self.with_arguments(args).prune_configs(dict(kwargs)))
        if not configs:
            raise AutotunerError(f"{self.base_fn.__qualname__}: its pruning leaves no config for this call")
        named = identified(configs, listed)
        if self._early is not None:  # a pruning may edit configs in place, differently at each call
            for name, config in named.items():
                named[name] = copy.copy(config)
                named[name].kwargs = dict(config.kwargs)
        return named

    def with_arguments(self, args: Sequence[Any]) -> Self:
        """Return a copy with a call's arguments in `nargs`, where Triton's pruning and hooks read them."""
        copied = copy.copy(self)
        copied.nargs = dict(zip(self.arg_names, args, strict=False))
        return copied

    def call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: Device | None = None
    ) -> KernelCall:
        """Describe a call, by default on the GPU of its tensors, with the configs that may run for it."""
        hook = self.pre_hook if self.user_defined_pre_hook else None
        return KernelCall(
            self.problem(args, kwargs), device or self.device_of(args, kwargs), self.digest,
            self.fn, self.arg_names, tuple(args), dict(kwargs), self.offered(args, kwargs),
            self.reset_to_zero, self.restore_value, hook, self.reference, self.tolerance,
        )  # fmt: skip

    def measurable(self, device: Device) -> bool:
        """True if a call can be timed: on a GPU, or by the user's benchmark."""
        return self._is_timed_by_user or device != HOST

    # The choice.

    def choose(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: str) -> KernelPlan:
        """Return the plan of a call in a mode, after measuring if need be.

        It is tentative if another process is measuring the problem, or if the GPU is busy. Raises
        NotTunedError in mode "strict" if the call could be measured and no measurement is remembered, and
        TuningError, with the reasons, if no config works.
        """
        warn_untested()
        listen()
        since, call, plan, tentative = perf_counter(), self.call(args, kwargs), None, False
        fixed = self.space is None and len(self._configs) == len(call.configs) == 1
        measurable = self.measurable(call.device)
        fits = functools.cache(functools.partial(self._fits, call, mode))
        if mode == "tune" and measurable and not capturing():
            plan = self._agreed(call.problem, call.device, call.configs)
            if plan is None and kernel_tables(self.table):
                plan = self.remembered(call.problem, call.device, call.configs, fits)
                plan = plan if plan is not None and plan.source == "table" else None
            if plan is not None:
                notify(self, call, plan.config, {plan.config: [(plan.us or 0.0) / 1e3] * 3})
            elif not fixed or self.reference is not None:
                config = measured_config(self, call, shared=True)
                tentative = config is None
                plan = None if tentative else KernelPlan(call.problem, config, "exact", call.device)
                for scope, cache in list(self._caches.items()):
                    if scope is not None and scope[0] != "tune":
                        cache.clear()  # other modes, which may have guessed, choose again
        if plan is None:
            plan = replace(self._unmeasured(call, mode, fits), tentative=tentative)
            if plan.source in ("exact", "table") and not tentative:
                notify(self, call, plan.config, {plan.config: [(plan.us or 0.0) / 1e3] * 3})
            is_guess = plan.source == "model" and self.perf_model is None and not fixed
            if is_guess and measurable and mode not in ("off", "spread") and not tentative:
                self.warn_untuned(call.problem, call.device)
        named = (name for name, config in call.configs.items() if config is plan.config)
        name = next(named, None) or arguments.identity(plan.config)
        choice = sync.Choice(name, plan.source)
        sync.note_kernel(call.device, call.source, call.problem, choice, call.configs, self.space)
        log(
            "plan", logging.INFO, problem=call.problem.label, config=str(name),
            source=self._named(plan, call).source, device=call.device.name, seconds=perf_counter() - since,
        )  # fmt: skip
        return plan

    def warn_untuned(self, problem: KernelProblem, device: Device, where: str = "") -> None:
        """Warn that nothing measured says which config is fast; `where` ends the advice."""
        self._warnings -= 1
        if self._warnings >= 0:
            text = f"{problem.label} was never measured on {device.name}: using the config that comes first"
            advice = f'Run once under tritile.mode("tune") or TRITILE_MODE=tune{where}.'
            self._warn(f"{text}. {advice}", UntunedWarning)

    def warn_of_retuning(self, device: Device) -> None:
        """Warn, once, of a number in the key that was measured for many values."""
        problems = filter(None, map(kernel_problem, store_of(device).problems(self.digest)))
        values: dict[str, set[int]] = {}
        for name, value in (part for problem in problems for part in problem.key):
            if type(value) is int and name not in self.bucket:
                values.setdefault(name, set()).add(value)
        for name, own in values.items():
            if len(own) > _MANY_VALUES and name not in self._retuned:
                self._retuned.add(name)
                text = f"{self.base_fn.__qualname__} was tuned for {len(own)} values of {name} in its key"
                advice = f"bucket={{{name!r}: triton.next_power_of_2}} makes one problem of many"
                self._warn(f"{text}: {advice}", RetuningWarning)

    def _warn_of_another_gpu(self, path: Path, gpu: str, device: Device) -> None:
        """Warn, once for a file, that its winners were measured on another GPU."""
        if path not in self._tables_of_others:
            self._tables_of_others.add(path)
            text = (
                f"{self.base_fn.__qualname__} runs on {device.name} with configs that were measured on {gpu}"
            )
            advice = f"which has the same architecture: to measure here, do without {path}"
            self._warn(f"{text}, {advice}", UntunedWarning)

    def _warn(self, text: str, category: type[Warning]) -> None:
        warnings.warn(text, category, stacklevel=callers_level())

    def _unmeasured(self, call: KernelCall, mode: str, fits: Fits | None = None) -> KernelPlan:
        """Return the plan of a call without measuring: remembered, the config of a neighbour, or a guess.

        Raises NotTunedError in mode "strict" if the call could be measured and no measurement is remembered.
        """
        problem, device, configs = call.problem, call.device, list(call.configs.values())
        only = self.space is None and len(configs) == 1
        if mode != "off":
            exact = self.remembered(problem, device, call.configs, fits)
            if exact is not None:
                return exact
            if mode == "strict" and self.measurable(device) and not only:
                raise NotTunedError(f"mode is strict and nothing measured is remembered for {problem.label}")
            guess = self._agreed(problem, device, call.configs, measured=False)
            if guess is not None:
                return guess
            for _, near in self.nearest(problem, device, call.configs, fits=fits):
                why = "the fastest at the nearest sizes"
                return KernelPlan(problem, near, "predicted", device, None, why)
        best, why = configs[0], "the first config: nothing was measured of this kernel"
        if self.perf_model is not None:
            why = "the kernel's own performance model's choice"
            named = dict(zip(self.arg_names, call.args, strict=False)) | call.kwargs
            best = min(configs, key=lambda config: self.perf_model(**(named | config.all_kwargs())))
        elif only:
            why = "the kernel's only config"
        return KernelPlan(problem, best, "model", device, None, why)

    def remembered(
        self, problem: KernelProblem, device: Device, configs: Configs, fits: Fits | None = None
    ) -> KernelPlan | None:
        """Return the fastest config measured for exactly this problem, among `configs` or all of a space.

        What ranks agreed on comes first; trials on this machine come before entries of tables. One that was
        measured on another GPU of the same architecture counts if `fits(config)`.
        """

        def allowed(config: Config) -> triton.Config | None:
            return self._allowed(config, configs)

        plan = self._agreed(problem, device, configs)
        if plan is not None:
            return plan
        for trial in sorted(store_of(device).trials(self.digest, problem), key=rank):
            config = allowed(trial.config) if trial.works else None
            if config is not None:
                why = f"the fastest of its configs that were measured on {device.name}"
                return KernelPlan(problem, config, "exact", device, trial.us, why)
        tables = kernel_tables(self.table)
        entries = [(table.path, table.find(device, self.digest, problem)) for table in tables]
        found = [(path, entry) for path, entry in entries if entry is not None]
        for path, entry in sorted(found, key=lambda each: each[1].gpu != device.name):
            config, why = allowed(entry.config), f"measured on a GPU of this model: {path}"
            if config is None:
                continue
            if entry.gpu != device.name:
                if fits is not None and not fits(config):
                    continue
                self._warn_of_another_gpu(path, entry.gpu, device)
                why = f"measured on {entry.gpu}, which has the same architecture: {path}"
            return KernelPlan(problem, config, "table", device, entry.us, why)
        return None

    def _fits(self, call: KernelCall, mode: str, config: triton.Config) -> bool:
        """True if the GPU of a call can run a config: compiled for it, it takes no more than there is.

        Raises NotCompiledError in mode "strict" if it is not compiled.
        """
        if call.device == HOST:
            return True
        what = f"{self.base_fn.__qualname__} with {config}"
        refused = compiles_refused(what, _COMPILE_ADVICE) if mode == "strict" else contextlib.nullcontext()
        try:
            with refused:
                check_fits(call.launch(config, grid=(1,), warmup=True), call.device)
        except NotCompiledError:
            raise
        except Exception as error:  # anything that a compiler raises: another config runs
            log(
                "compile", logging.WARNING, problem=call.problem.label, device=call.device.name,
                config=str(arguments.identity(config)), failure=brief(error),
            )  # fmt: skip
            return False
        return True

    def _allowed(self, config: Config, configs: Configs) -> triton.Config | None:
        if self.space is not None:
            return config.to_triton() if config in self.space else None
        return configs.get(config)

    def _agreed(
        self, problem: KernelProblem, device: Device, configs: Configs, measured: bool = True
    ) -> KernelPlan | None:
        """Return what `tritile.sync` settled for a problem by measurements, or where there were none."""
        choice = sync.agreed(device, [self.digest], problem, configs)
        if choice is None or (choice.source in sync.MEASURED) != measured:
            return None
        config = self._allowed(choice.config, configs)
        return config and KernelPlan(problem, config, choice.source, device, None, sync.WHY)

    def nearest(
        self, problem: KernelProblem, device: Device, configs: Configs, unknown: Collection[str] = (),
        most: int = _NEIGHBOURS, fits: Fits | None = None,
    ) -> Iterator[tuple[float, triton.Config]]:  # fmt: skip
        """Yield the configs of measured problems that differ only in sizes, the nearest first.

        Each comes with its distance in doublings. Sizes are the positive integers in `key` that are not
        constexprs. `unknown`: names in `key` whose values do not count. `most`: how many problems to look up.
        `fits`: as in `remembered`.
        """
        constants = arguments.constants_of(self.base_fn)

        def split(key: Any) -> tuple[list[Any], list[float]]:
            """Return what neighbours must have in common, and log2 of the sizes in which they may differ."""
            shared: list[Any] = []
            sizes: list[float] = []
            for name, value in key:
                if name in unknown:
                    continue
                if type(value) is int and value > 0 and name not in constants:
                    sizes.append(math.log2(value))
                    shared.append((name, "size"))
                else:
                    shared.append((name, type(value), value))
            return shared, sizes

        texts = {*store_of(device).problems(self.digest)}
        for table in kernel_tables(self.table):
            texts.update(table.winners(device, self.digest))
        (shared, sizes), near = split(problem.key), []
        for text in texts:
            other = kernel_problem(text)
            if other is not None and (other.kernel, other.dtypes) == (problem.kernel, problem.dtypes):
                others, lengths = split(other.key)
                if others == shared:
                    gaps = (abs(a - b) for a, b in zip(lengths, sizes, strict=True))
                    near.append((sum(gaps), text, other))
        for doublings, _, other in heapq.nsmallest(most, near):
            plan = self.remembered(other, device, configs, fits)
            if plan is not None:
                yield doublings, plan.config

    def planned(self, args: Sequence[Any], kwargs: Mapping[str, Any], device: Device | None) -> KernelPlan:
        """Return the plan of a call for `tritile.plan`, without measuring.

        Raises InvalidValueError for missing or unknown arguments, and NotTunedError in mode "strict" if the
        call could be measured and no measurement is remembered.
        """
        arguments.check_arguments(self.fn, self.space or self._configs, args, kwargs)
        call = self.call(args, kwargs, device)
        return self._named(self._unmeasured(call, self.mode or requested_mode() or "cached"), call)

    def _named(self, plan: KernelPlan, call: Any) -> KernelPlan:
        """Return a plan with the source that users see: in the interpreter nothing is predicted."""
        interpreted = self.interpreted and call.device == HOST and plan.source == "model"
        return replace(plan, source="interpreter") if interpreted else plan

    # For torch's tracer, and for copies.

    @property
    def early_config_prune(self) -> traced.Pruning | None:
        """The kernel's own pruning, which leaves torch's tracer only the remembered config."""
        return self._pruning

    @early_config_prune.setter
    def early_config_prune(self, early: traced.Pruning | None) -> None:
        self._early = self._pruning = early
        # Then, with one config, there is nothing to choose or check.
        self._is_fixed = not (self.space or early or self.perf_model or self.reference)
        if self.space is not None or len(self._configs) > 1:
            self._pruning = traced.pruning(self, early, self.perf_model)

    @property
    def configs(self) -> list[triton.Config]:
        """The configs to choose among; of a space one or, in torch.compile, the remembered ones."""
        if TracingContext.try_get() is not None and self._pruning is not self._early:
            traced.show(self)
        return self._configs

    @configs.setter
    def configs(self, configs: list[triton.Config]) -> None:
        self._configs = configs

    def __copy__(self) -> Self:
        """Copy the tuner, so that other configs and another mode can be set on the copy."""
        copied = object.__new__(type(self))
        copied.__dict__.update(
            self.__dict__, _caches={}, _tentative=Memo(MAX_CACHED), _spreads=Memo(MAX_CACHED)
        )
        copied.early_config_prune = self._early
        _TUNERS[id(copied)] = copied
        return copied


def autotune(
    configs: list[triton.Config] | Space, key: list[str], prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: list[str] | None = None, restore_value: list[str] | None = None,
    pre_hook: Callable[..., Any] | None = None, post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None, rep: int | None = None, use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None, cache_results: bool = False, *,
    mode: Mode | None = None, reference: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    tolerance: float | None = None, isolate: bool = True,
    bucket: Mapping[str, Callable[[Any], Any]] | None = None, table: str | os.PathLike[str] | None = None,
    effort: Effort | None = None,
) -> Callable[[Any], Autotuner]:  # fmt: skip
    """Decorate a `triton.jit` kernel so that its configs are measured once per GPU and remembered.

    Takes what `triton.autotune` takes, with the same meaning. A new problem is measured at its first call, in
    processes of its own, and remembered in `TRITILE_CACHE_DIR` for all later processes. A remembered config
    runs only if the kernel's own pruning leaves it for the current call.

    Args:
        configs: `triton.Config` objects to choose among, all of which are measured, or a `tritile.Space`,
            which is searched as `tritile tune` searches, up to 96 configs. Either ends after
            `TRITILE_TUNE_BUDGET` seconds, 15 by default, once a config works.
        key: names of arguments. Each new combination of their values and of the tensors' dtypes is a problem
            of its own; a tensor counts by dtype and shape. A name that is not an argument is ignored, with a
            UserWarning.
        prune_configs_by: "early_config_prune", "perf_model" and "top_k", as in Triton.
        reset_to_zero: names of tensors to zero before each measured run.
        restore_value: names of tensors to restore after each measured run.
        pre_hook: called before each measured run, in place of `reset_to_zero` and `restore_value`.
        post_hook: called after each measured run, in place of `restore_value`.
        warmup: ignored, with a DeprecationWarning: tritile or `do_bench` decides how often to launch.
        rep: like `warmup`.
        use_cuda_graph: like `warmup`.
        do_bench: times a call: `(call, quantiles) -> milliseconds`. Default:
            `tritile.tuner.measure.timing.do_bench`. Times are only compared with others of the same
            benchmark: if its code changes, configs are timed again.
        cache_results: accepted for compatibility: results are always kept.
        mode: the mode of this kernel, whatever `tritile.mode` says. None: that of `tritile.mode` or
            `TRITILE_MODE`, else "tune". "cached" never measures: it uses what is remembered, else the config
            of the nearest problem that differs only in sizes, else the first.
        reference: called with those of the kernel's arguments that it names, on untouched copies; returns the
            right tensors by argument name. The winner is checked against them, with outputs filled with NaN
            beforehand. A tensor that is both read and written must be in `restore_value`.
        tolerance: the allowed error of an element, relative to its value or, if that is smaller, to the
            typical size of values in its row and column. Default: four times the epsilon of the output's
            dtype, once for fp8, 256 times for fp32 and fp64.
        isolate: measure in a separate process, which a config may hang or crash. In the calling process,
            where a `do_bench` always runs, the memory around the arguments is not watched.
        bucket: functions by names in `key`; in a problem the function's value replaces the argument's. With
            `{"N": triton.next_power_of_2}` all N from 1025 to 2048 are one problem, which the first call
            measures. A config of the bucket that the pruning forbids for a call does not run.
        table: a file that `tritile export --kernel` wrote, shipped with the kernel. Its entries for this GPU
            model and the kernel's source count as measured. So do those of a GPU of the same architecture
            where it has none, with an UntunedWarning, if the config runs on this GPU. `TRITILE_TABLE` may
            name another file.
        effort: "quick" measures the 8 likeliest configs within 2 seconds, and no more once one works: the
            fastest at the nearest measured problems, then a sample of the list. "full" measures every config,
            however long that takes. None: every config of a list, up to 96 of a space, within the budget.

    Inside torch.compile the tracer sees only the remembered config. If nothing is remembered, torch times all
    configs itself, like those of `triton.autotune`; in modes other than "tune" it sees the likeliest one.
    torch wraps NotTunedError in an error of its own.

    Raises InvalidValueError for an unknown mode or effort, and for a space with `prune_configs_by`. The
    decorator raises it if `reset_to_zero`, `restore_value`, a space, a config (without an
    "early_config_prune") or the reference names anything but an argument of the kernel, if `bucket` names
    anything not in `key`, and for a kernel under another autotuner whose configs set some of the same names.
    """
    deprecated = {"warmup": warmup, "rep": rep, "use_cuda_graph": use_cuda_graph}
    arguments.check_options(configs, prune_configs_by, mode, effort, reference, tolerance, **deprecated)

    def decorator(fn: Any) -> Autotuner:
        is_whole = not (prune_configs_by or {}).get("early_config_prune")
        arguments.check_kernel(fn, configs, key, reset_to_zero, restore_value, reference, bucket, is_whole)
        return Autotuner(
            fn, configs, key, mode=mode, effort=effort, bucket=bucket, table=table,
            prune_configs_by=prune_configs_by, reset_to_zero=reset_to_zero, restore_value=restore_value,
            pre_hook=pre_hook, post_hook=post_hook,
            do_bench=do_bench, isolate=isolate, reference=reference, tolerance=tolerance,
        )  # fmt: skip

    return decorator
