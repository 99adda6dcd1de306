"""`tritile.autotune`: `triton.autotune` that remembers across processes and never measures by surprise.

`kernel[grid](...)` calls `Autotuner.run`. A call that was met before is launched at once (`recall`). Else
`choose` gives its config: measured now (`measuring`), remembered, or a like problem's (`remembering`).
"""

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final

import torch
import triton

from tritile.core import device as devices
from tritile.core.device import Device, capturing
from tritile.core.events import Event, tell
from tritile.core.forgetting import also_forgets
from tritile.core.problem import KernelProblem
from tritile.core.settings import Mode, current_mode
from tritile.core.threads import once
from tritile.core.versions import warn_untested
from tritile.errors import InvalidValueError
from tritile.planning.kernel_plan import KernelPlan
from tritile.planning.store import is_frozen
from tritile.runtime.compiles import compiles_refused, count_as_ours
from tritile.tune import measuring, recall
from tritile.tune.declared import (
    check_arguments,
    check_choices,
    check_kernel,
    check_tolerance,
    set_by,
    warn_deprecated,
)
from tritile.tune.measure.tasks import Rules
from tritile.tune.planned import planned
from tritile.tune.remembering import plain_config
from tritile.tune.spaces import Space
from tritile.tune.traced import TracedAutotuner

_MOST_MET: Final = 4096  # the most entries of a tuner's cache


_TUNERS: "weakref.WeakSet[Autotuner]" = weakref.WeakSet()


def _after_fork() -> None:
    for tuner in list(_TUNERS):
        tuner._lock = threading.RLock()  # another thread of the parent may have held the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _forget() -> None:
    """Drop the choices that decorated kernels made in this process, so that they choose anew."""
    for tuner in list(_TUNERS):
        tuner.cache.clear()


also_forgets(_forget)


class Autotuner(TracedAutotuner):
    """Extend `triton.runtime.Autotuner` by measurements that outlive the process.

    Each config's time is remembered on its own, by GPU, versions and kernel source, so that a changed list of
    configs measures only what is new. A miss is measured only in mode "tune" (`tritile.mode`, or the `mode`
    argument), and never while a CUDA graph is captured. A config that fails in any way costs that config
    alone. Host tensors run in the interpreter.
    """

    def __init__(self, fn: Any, configs: list[triton.Config] | Space, key: list[str], **rest: Any) -> None:
        super().__init__(fn, configs, key, **rest)
        # Under a call's form: the config, and all that it sets. Under a call's key: the config, and its
        # `recall.Launch`; under ("compiled", key): True.
        self.cache: dict[Any, Any] = {}
        self._places = {name: place for place, name in enumerate(self.arg_names) if name in self.keys}
        _TUNERS.add(self)
        count_as_ours(self.base_fn)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the config that `choose` gives; called by `kernel[grid](...)`."""
        mode = self.mode or current_mode()
        try:
            key = recall.key_of(mode, args, kwargs)
            known = self.cache.get(key)
        except TypeError:  # a value has no hash
            key = known = None
        if known is not None:
            self.best_config, launch = known
            kernel = launch(args, kwargs["grid"])
            if kernel is not None:
                return kernel
        self.best_config, options = self._chosen(mode, args, kwargs)
        if self.best_config.pre_hook is not None:
            self.best_config.pre_hook({**self.named(args, kwargs), **options})
        if mode == "strict":
            self._check_compiled(key, args, kwargs, options)
        kernel = self.host_aware.run(*args, **kwargs, **options)
        if key is not None and self.best_config.pre_hook is None and not capturing():
            launch = recall.launch_of(self.fn, kernel, args, options)
            if launch is not None:
                self._keep(key, (self.best_config, launch))
        return kernel

    def _chosen(
        self, mode: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[triton.Config, dict[str, Any]]:
        """Return the config for a call, and all that it sets: chosen once for all calls of a form."""
        form = recall.form_of(mode, self._places, args, kwargs)
        try:
            known = self.cache.get(form)
        except TypeError:  # a value of the key has no hash
            known = None
        if known is not None:
            return known
        lasts = recall.lasts(form)

        def choose() -> tuple[triton.Config, dict[str, Any]]:
            conflicts = set_by(self.space or self.configs) & {*self.arg_names[: len(args)], *kwargs}
            if conflicts:
                raise InvalidValueError(
                    f"{', '.join(sorted(conflicts))} given, but the tuner sets it: leave it out of the call"
                )
            if len(self.configs) == 1 and self.space is None and not (mode == "tune" and self.reference):
                config = self.configs[0]
            else:
                config = self.choose(self.problem(args, kwargs), args, kwargs)
            chosen = config, config.all_kwargs()
            if lasts and not capturing():
                self._keep(form, chosen)
            return chosen

        if lasts and mode == "tune" and not capturing():
            return once((self, form), lambda: self.cache.get(form) or choose())
        return choose()

    def choose(self, problem: KernelProblem, args: Sequence[Any], kwargs: dict[str, Any]) -> triton.Config:
        """Return the config for a call, by the mode in force.

        Raises NotTunedError in mode "strict" where a measurement could be had, and none is remembered.
        """
        warn_untested()
        since, device = perf_counter(), self.device_of(args, kwargs)
        config, source = self._found(problem, args, kwargs, device)
        tell(
            lambda: Event(
                "plan", problem.label, str(plain_config(config) or config), source, device.name,
                seconds=perf_counter() - since,
            )
        )  # fmt: skip
        return config

    def _found(
        self, problem: KernelProblem, args: Sequence[Any], kwargs: dict[str, Any], device: Device
    ) -> tuple[triton.Config, str]:
        """Return the config for a call, and its source as events name it."""
        mode = self.mode or current_mode()
        if mode == "tune" and self.measurable(device) and not is_frozen(device) and not capturing():
            best = self.measure(problem, args, kwargs, device)
            self.cache.clear()  # other problems may have guessed their config: they choose anew
            return best, "exact"
        config = self.remembered(problem, device) if mode != "off" else None
        source = "exact"
        if config is None:
            config, source = self.likely(problem, mode, device), "predicted"
        if config is None:
            config, source = self.predicted(args, kwargs), "model"
        if mode == "tune" and device == devices.INTERPRETER:  # not timed, but its answer can be checked
            config = measuring.first_right(self, config, problem, args, kwargs)
        return config, source

    def measure(
        self,
        problem: KernelProblem,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device: Device,
        rules: Rules | None = None,
        force: bool = False,
    ) -> triton.Config:
        """Return the fastest config of a call, measuring only configs that were never measured for `problem`.

        `rules` say how to search, by default those of every search. `force` measures all anew.
        Raises TuningError, naming the reasons, where no config works.
        """
        with self.holding(args):
            return measuring.measured(self, problem, args, kwargs, device, rules, force)

    def planned(self, args: Sequence[Any], kwargs: dict[str, Any], device: Device | None) -> KernelPlan:
        """Return the plan of a call, for `tritile.plan`: see `tritile.tune.planned`.

        Raises InvalidValueError where arguments are missing, or the kernel does not take them.
        """
        check_arguments(self.fn, self.space or self.configs, args, kwargs)
        return planned(self, args, kwargs, device or self.device_of(args, kwargs))

    def device_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Device:
        """Return the GPU of a call's tensors; INTERPRETER for host memory, or without a GPU."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        for value in tensors:
            if value.is_cuda:
                return devices.gpu(value.get_device())
        if tensors and all(value.device.type == "cpu" for value in tensors):
            return devices.INTERPRETER
        return devices.current_gpu() or devices.INTERPRETER

    def _check_compiled(
        self, key: recall.Key | None, args: Sequence[Any], kwargs: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Raise NotCompiledError where the first launch of a call would have to compile."""
        if ("compiled", key) in self.cache or self.device_of(args, kwargs) == devices.INTERPRETER:
            return
        what = f"{self.problem(args, kwargs).label} with {self.best_config}"
        advice = "call it once in another mode, and keep the folder TRITON_CACHE_DIR"
        with compiles_refused(what, advice):
            self.fn.run(*args, **(kwargs | options | {"warmup": True}))
        self._keep(("compiled", key), True)

    def _keep(self, key: Any, value: Any) -> None:
        if len(self.cache) >= _MOST_MET:
            self.cache.clear()
        self.cache[key] = value


def autotune(
    configs: list[triton.Config] | Space,
    key: list[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: list[str] | None = None,
    restore_value: list[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
    *,
    mode: Mode | None = None,
    search: str | None = None,
    reference: Callable[..., Mapping[str, torch.Tensor]] | None = None,
    ragged: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    tolerance: float | None = None,
    isolate: bool = True,
    bucket: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Callable[[Any], Autotuner]:
    """Decorate a `triton.jit` kernel so that its configs are measured once per GPU and remembered.

    Takes what `triton.autotune` takes, with the same meaning.

    Args:
        configs: `triton.Config` objects to choose among, or a `tritile.Space`.
        key: names of arguments. Each new combination of their values and of the tensors' dtypes is a problem
            of its own.
        prune_configs_by: "early_config_prune", "perf_model" and "top_k", as in Triton.
        reset_to_zero: names of tensors to zero before each measured run.
        restore_value: names of tensors to restore after each measured run.
        pre_hook: called before each measured run, in place of `reset_to_zero` and `restore_value`.
        post_hook: called after each measured run, in place of `restore_value`.
        warmup: without effect, with a DeprecationWarning: tritile, or `do_bench`, counts the launches.
        rep: as `warmup`.
        use_cuda_graph: as `warmup`.
        do_bench: times a call: `(call, quantiles) -> milliseconds`. Default: `tritile.tune.timing.do_bench`.
        cache_results: accepted for compatibility: results are always kept.
        mode: the mode of this kernel, whatever `tritile.mode` says: "tune" measures at a first call, as
            `triton.autotune` does. None: the mode in force.
        search: the strategy, a name in `tritile.tune.search.STRATEGIES`. Default: every config of a list; for
            a space "screening", as `tritile tune` searches, and 96 configs at the most. Either ends after
            `TRITILE_TUNE_BUDGET` seconds, 15 by default, once a config works.
        reference: called with the kernel's arguments that it names, on untouched copies; returns the right
            tensors by name of argument. The winner is checked against them, on outputs filled with NaN. A
            tensor that is both read and written must be in `restore_value`. On host tensors, which are not
            timed, mode "tune" runs the first config whose answer is right.
        ragged: called with the arguments by name; returns arguments of a call whose sizes end amid tiles, and
            optionally "grid". The winner is checked on them, too.
        tolerance: the allowed relative error |out - reference| / |reference|. Default: four times the epsilon
            of the output's dtype, 16 times for fp32.
        isolate: measure in a process of its own, which a config may hang or crash. In the calling process, as
            with a `do_bench`, the memory around the arguments is not watched.
        bucket: functions by names in `key`; a call's problem has the function's value in place of the
            argument's. With `{"N": triton.next_power_of_2}` all N from 1025 to 2048 are one problem, which
            the first call measures. In a bucket without a measurement the nearest bucket's config runs.

    Inside torch.compile the tracer is given one config, by the same choice: what is remembered counts there,
    too. Nothing is measured or checked while it traces, and torch wraps NotTunedError in an error of its own.

    Raises InvalidValueError for an unknown mode or strategy, and for a space with `prune_configs_by`. The
    decorator raises it where `key`, `reset_to_zero`, `restore_value`, a space or the reference names anything
    but an argument of the kernel, or `bucket` a name that is not in `key`.
    """
    check_choices(configs, prune_configs_by, mode, search)
    check_tolerance(tolerance, reference)
    warn_deprecated(warmup, rep, use_cuda_graph)

    def decorator(fn: Any) -> Autotuner:
        check_kernel(fn, configs, key, reset_to_zero, restore_value, reference, ragged, bucket)
        return Autotuner(
            fn,
            configs,
            key,
            mode=mode,
            bucket=dict(bucket or {}),
            prune_configs_by=prune_configs_by,
            reset_to_zero=reset_to_zero,
            restore_value=restore_value,
            pre_hook=pre_hook,
            post_hook=post_hook,
            do_bench=do_bench,
            isolate=isolate,
            search=search,
            reference=reference,
            ragged=ragged,
            tolerance=tolerance,
        )

    return decorator
