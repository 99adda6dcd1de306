"""`tritile.autotune`: `triton.autotune` that remembers across processes and never measures by surprise."""

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner as TritonAutotuner

from tritile import device as devices
from tritile.config import Config
from tritile.device import Device
from tritile.errors import InvalidValueError, NotTunedError, TuningError, UntunedWarning, brief
from tritile.interpreter import HostAware
from tritile.problem import KernelProblem, Problem, doublings
from tritile.settings import MODES, current_mode, tune_budget_s
from tritile.source import source_hash
from tritile.store import store_of
from tritile.timing import do_bench as timed
from tritile.trial import Trial


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream: no time to measure anything."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _dtypes(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if hasattr(value, "dtype"):
            yield name, str(value.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    """A key value as what a store can hold."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if isinstance(value, int | float | bool | str | None) and finite else str(value)


def _plain_config(config: triton.Config, family: str) -> Config | None:
    """The config as a store can hold it; None where it holds more than plain data, and so cannot be kept."""
    if getattr(config, "ir_override", None) is not None:
        return None
    try:
        return replace(Config.from_triton(config), family=family)
    except InvalidValueError:
        return None


class Autotuner(TritonAutotuner):
    """A `triton.runtime.Autotuner` whose measurements outlive the process.

    What differs: each config's time is remembered on its own, by GPU, versions and kernel source, so
    that a changed list of configs measures only what is new; a miss is measured only in mode "tune"
    (`tritile.mode`, or the `mode` argument); nothing is measured while a CUDA graph is captured; a
    config that fails in any way costs that config alone; host tensors run in the interpreter.
    """

    def __init__(self, fn: Any, configs: list[triton.Config], key: list[str], mode: str | None, **rest: Any):
        hooks = {name: rest.pop(name, None) for name in ("reset_to_zero", "restore_value")}
        rest["do_bench"] = rest.get("do_bench") or timed
        super().__init__(HostAware(fn), fn.arg_names, configs, key, **hooks, **rest)
        self.mode = mode
        self.family = ""
        self.also: tuple[Any, ...] = ()  # kernels that run beside this one, and count for its digest
        self.cache: dict[Any, triton.Config] = {}
        self._digest: str | None = None
        self._lock = threading.RLock()  # upstream keeps the arguments in hand on self while it measures

    @property
    def digest(self) -> str:
        """A digest of the kernel's source; what was measured of another source is not believed."""
        if self._digest is None:
            self._digest = source_hash(self.base_fn, *self.also)
        return self._digest

    def problem(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelProblem:
        """This call in the store's words: the values of `key` and every tensor's dtype."""
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        values = {name: given[name] for name in self.arg_names if name in given}
        key = tuple((name, _plain(values[name])) for name in self.keys if name in values)
        return KernelProblem(self.base_fn.__qualname__, key, tuple(_dtypes(values)))

    def _device(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Device:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return devices.gpu(value.device.index)
        return devices.current_gpu() or devices.INTERPRETER

    def _by_key(self) -> dict[str, triton.Config]:
        """The configs that can be remembered, by their text."""
        plain = ((_plain_config(config, self.family), config) for config in self.configs)
        return {key.key: config for key, config in plain if key is not None}

    def remembered(self, problem: Problem, device: Device) -> triton.Config | None:
        """The fastest config of the present list that was measured for just this problem."""
        known = self._by_key()
        trials = store_of(device).trials(self.digest, problem)
        good = [t for t in trials if t.us is not None and t.failure is None and t.config.key in known]
        return known[min(good, key=lambda t: (t.us, t.config.key)).config.key] if good else None

    def _nearest(self, problem: KernelProblem, device: Device) -> triton.Config | None:
        """The best config of the nearest measured problem that differs in sizes alone."""
        known, found = self._by_key(), []
        for trial in store_of(device).bests(self.digest, problem.op):
            other = trial.problem
            if not isinstance(other, KernelProblem) or trial.config.key not in known:
                continue
            alike = (other.kernel, other.dtypes) == (problem.kernel, problem.dtypes)
            if alike and len(other.sizes) == len(problem.sizes):
                found.append((doublings(other, problem), trial.config.key))
        return known[min(found)[1]] if found else None

    def _predicted(self, args: Sequence[Any], kwargs: dict[str, Any]) -> triton.Config:
        """What the kernel's own pruning and performance model say, else its first config."""
        with self._lock:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            try:
                configs = self.prune_configs(kwargs)
                if self.perf_model is None:
                    return configs[0]
                values = {**self.nargs, **kwargs}
                return min(configs, key=lambda config: self.perf_model(**values, **config.all_kwargs()))
            finally:
                self.nargs = {}

    def choose(self, problem: KernelProblem, args: Sequence[Any], kwargs: dict[str, Any]) -> triton.Config:
        """The config for this call, by the mode in force. Raises NotTunedError in mode "strict"."""
        mode, device = self.mode or current_mode(), self._device(args, kwargs)
        if mode == "tune" and not capturing():
            return self.measure(problem, args, kwargs)  # times only what was never timed
        config = self.remembered(problem, device) if mode != "off" else None
        if config is not None:
            return config
        if mode == "strict":
            raise NotTunedError(f"mode is strict and nothing measured is remembered for {problem.label}")
        near = self._nearest(problem, device) if mode != "off" else None
        if near is None and self.perf_model is None and mode == "cached":
            warnings.warn(
                f"{problem.label} was never measured on {device.name}: using the first config. "
                'Run once under tritile.mode("tune") or TRITILE_MODE=tune.',
                UntunedWarning,
                stacklevel=4,
            )
        return near or self._predicted(args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the config that `choose` gives; called by `kernel[grid](...)`."""
        if len(self.configs) == 1:
            config = self.configs[0]
        else:
            problem = self.problem(args, kwargs)
            memo = (problem, self.mode or current_mode(), self._device(args, kwargs).name)
            config = self.cache.get(memo)
            if config is None:
                config = self.choose(problem, args, kwargs)
                if not capturing():
                    self.cache[memo] = config
        conflicts = kwargs.keys() & config.kwargs.keys()
        if conflicts:
            raise InvalidValueError(
                f"{', '.join(sorted(conflicts))} given, and tuned too: leave it to the tuner"
            )
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook(
                {**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()}
            )
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def _timed(self, config: triton.Config, args: Sequence[Any], kwargs: dict[str, Any]) -> list[float]:
        """Milliseconds of one config at the quantiles 0.5, 0.2 and 0.8. Raises TuningError if it fails."""
        try:
            times = self._bench(*args, config=config, **kwargs)
        except Exception as error:  # whatever one config raises, the others still deserve their turn
            raise TuningError(brief(error)) from error
        times = list(times) if isinstance(times, list | tuple) else [times] * 3
        if math.isinf(times[0]):
            raise TuningError("did not compile, or asked for more than the GPU has")
        if not times[0] > 0 or len(times) != 3:
            raise TuningError(f"the benchmark gave {times}: wanted milliseconds at three quantiles")
        return times

    def measure(
        self,
        problem: Problem,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        configs: Sequence[triton.Config] | None = None,
        timer: Callable[[triton.Config], list[float]] | None = None,
    ) -> triton.Config:
        """Time those of `configs` (default: the pruned ones) never timed for `problem`; return the fastest.

        `timer` takes the place of launching the kernel: milliseconds at the quantiles 0.5, 0.2 and 0.8.
        Each is remembered. Stops after the budget of `TRITILE_TUNE_BUDGET` once a config has worked.
        Raises TuningError, naming the reasons, where no config works.
        """
        device = self._device(args, kwargs)
        store, deadline = store_of(device), time.monotonic() + tune_budget_s()
        found: dict[triton.Config, float] = {}
        failures: list[str] = []
        with self._lock:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            try:
                known = {trial.config.key: trial for trial in store.trials(self.digest, problem)}
                for config in self.prune_configs(kwargs) if configs is None else configs:
                    if found and time.monotonic() > deadline:
                        break
                    self._measure_one(config, problem, args, kwargs, store, known, found, failures, timer)
                if found:
                    best = min(found, key=found.__getitem__)
                    self.pre_hook({**self.nargs, **kwargs, **best.all_kwargs()}, reset_only=True)
            finally:
                self.nargs = {}
        if not found:
            raise TuningError(f"no config works for {problem.label}: {'; '.join(failures[:4])}")
        self.cache.clear()  # what was guessed before is to be chosen anew
        self.configs_timings = {config: [ms] * 3 for config, ms in found.items()}
        return best

    def _measure_one(
        self,
        config: triton.Config,
        problem: Problem,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        store: Any,
        known: Mapping[str, Trial],
        found: dict[triton.Config, float],
        failures: list[str],
        timer: Callable[[triton.Config], list[float]] | None,
    ) -> None:
        plain = _plain_config(config, self.family)
        if plain is not None and plain.key in known:
            trial = known[plain.key]
            if trial.us is not None and trial.failure is None:
                found[config] = trial.us / 1e3
            else:
                failures.append(f"{config}: {trial.failure}")
            return
        now, measured = datetime.now(UTC).isoformat(timespec="seconds"), None
        try:
            median, low, high = timer(config) if timer else self._timed(config, args, kwargs)
            found[config] = median
            if plain is not None:
                measured = Trial(problem, plain, median * 1e3, (high - low) / median, measured_utc=now)
        except TuningError as error:
            failures.append(f"{config}: {error}")
            if plain is not None:
                measured = Trial(problem, plain, None, failure=str(error)[:200], measured_utc=now)
        if measured is not None:
            store.add(self.digest, measured)


def autotune(
    configs: list[triton.Config],
    key: list[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: list[str] | None = None,
    restore_value: list[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
    *,
    mode: str | None = None,
) -> Callable[[Any], Autotuner]:
    """Decorate a `triton.jit` kernel so that its configs are measured once per GPU and remembered.

    Takes what `triton.autotune` takes, with the same meaning (its deprecated `warmup`, `rep` and
    `use_cuda_graph` excepted; `cache_results` changes nothing, as results are always kept).

    Args:
        configs: `triton.Config` objects to choose among.
        key: names of arguments; a call whose values of these, or whose tensors' dtypes, are new is a
            new problem.
        prune_configs_by: "early_config_prune", "perf_model" and "top_k", as in Triton.
        reset_to_zero: names of tensors to zero before each run that is measured.
        restore_value: names of tensors to restore after each run that is measured.
        pre_hook: replaces what `reset_to_zero` and `restore_value` do before a run.
        post_hook: replaces what `restore_value` does after a run.
        do_bench: times a call: `(call, quantiles) -> milliseconds`. Default: `tritile.timing.do_bench`.
        cache_results: accepted for compatibility.
        mode: the mode of this kernel, whatever `tritile.mode` says: "tune" measures on a first call,
            as `triton.autotune` does. None: the mode in force.

    Raises InvalidValueError for an unknown mode.
    """
    if mode is not None and mode not in MODES:
        raise InvalidValueError(f"mode is {mode!r}: wanted one of {', '.join(MODES)}, or None")

    def decorator(fn: Any) -> Autotuner:
        return Autotuner(
            fn,
            configs,
            key,
            mode,
            prune_configs_by=prune_configs_by,
            reset_to_zero=reset_to_zero,
            restore_value=restore_value,
            pre_hook=pre_hook,
            post_hook=post_hook,
            do_bench=do_bench,
        )

    return decorator
