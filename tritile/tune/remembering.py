"""A decorated kernel and the store: a call becomes a problem, under which measured configs are kept."""

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import triton

from tritile.core import device as devices
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.of_triton import Autotuner as TritonAutotuner
from tritile.core.problem import KernelProblem, Problem, doublings
from tritile.core.settings import Mode
from tritile.core.source import source_hash
from tritile.errors import InvalidValueError, NotTunedError, UntunedWarning, callers_level
from tritile.planning.store import store_of
from tritile.planning.trial import Trial, best_of
from tritile.runtime.interpreter import HostAware
from tritile.tune.measure.tasks import Rules
from tritile.tune.recall import DESCRIPTORS
from tritile.tune.spaces import Space
from tritile.tune.timing import do_bench as default_bench

_OPENING: Final = 8  # configs of a space that are offered where nothing is timed


def plain_config(config: triton.Config) -> Config | None:
    """Return the config as a store holds it; None where it holds more than plain data, and cannot be kept."""
    if getattr(config, "ir_override", None) is not None:
        return None
    try:
        return Config.from_triton(config)
    except InvalidValueError:
        return None


def _dtypes(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, given in values.items():
        value = given.base if type(given) in DESCRIPTORS else given
        if hasattr(value, "dtype"):
            yield name, str(value.dtype).removeprefix("torch.")


def _storable(value: Any) -> Any:
    """Return a value of a key, as text where JSON does not hold it."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if isinstance(value, int | float | bool | str | None) and finite else str(value)


class RememberingAutotuner(TritonAutotuner):
    """Hold what `tritile.autotune` was told of a kernel, and find what the store remembers of it.

    `isolate` tells whether configs are measured in a process of their own: not where a benchmark, or a hook,
    of the user's own may want this very process.
    """

    def __init__(
        self,
        fn: Any,
        configs: list[triton.Config] | Space,
        key: list[str],
        *,
        mode: Mode | None,
        bucket: Mapping[str, Callable[[Any], Any]],
        isolate: bool,
        search: str | None,
        reference: Callable[..., Mapping[str, torch.Tensor]] | None,
        ragged: Callable[[dict[str, Any]], dict[str, Any]] | None,
        tolerance: float | None,
        do_bench: Callable[..., Any] | None,
        reset_to_zero: list[str] | None,
        restore_value: list[str] | None,
        **rest: Any,
    ) -> None:
        self.space = configs if isinstance(configs, Space) else None
        listed = [configs.opening(1)[0].to_triton()] if isinstance(configs, Space) else configs
        bench = do_bench or default_bench
        resets = {"reset_to_zero": reset_to_zero, "restore_value": restore_value}
        super().__init__(fn, fn.arg_names, listed, key, **resets, do_bench=bench, **rest)
        self.host_aware = HostAware(fn)
        self.mode, self.bucket = mode, bucket
        self.search = search or ("exhaustive" if self.space is None else Rules.strategy)
        self.reference, self.ragged, self.tolerance = reference, ragged, tolerance
        self._own_bench = do_bench is not None
        self.isolate = isolate and not self._own_bench and not self.user_defined_post_hook
        self._digest: str | None = None
        self._lock = threading.RLock()  # Triton keeps the arguments of the call in hand on the tuner

    @property
    def digest(self) -> str:
        """Return the digest of the kernel's source; trials of another source do not count."""
        if self._digest is None:
            self._digest = source_hash(self.fn)
        return self._digest

    def measurable(self, device: Device) -> bool:
        """Tell whether there is something to time a call with: a GPU, or a benchmark of the user's own."""
        return self._own_bench or device != devices.INTERPRETER

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call by name."""
        return {**dict(zip(self.arg_names, args, strict=False)), **kwargs}

    @contextlib.contextmanager
    def holding(self, args: Sequence[Any]) -> Iterator[None]:
        """Hold a call's arguments where Triton's pruning looks for them, for one thread at a time."""
        with self._lock:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            try:
                yield
            finally:
                self.nargs = {}

    def offered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[triton.Config]:
        """Return the configs of a list that its pruning leaves for a call; of a space the first few."""
        if self.space is not None:
            return [config.to_triton() for config in self.space.opening(_OPENING)]
        with self.holding(args):
            return list(self.prune_configs(kwargs))

    def problem(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelProblem:
        """Describe a call as the store does: values of `key`, in their buckets, and dtypes of tensors."""
        given = self.named(args, kwargs)
        values = {name: given[name] for name in self.arg_names if name in given}
        keys = ((name, values[name]) for name in self.keys if name in values)
        key = ((name, self.bucket[name](value) if name in self.bucket else value) for name, value in keys)
        plain = tuple((name, _storable(value)) for name, value in key)
        return KernelProblem(self.base_fn.__qualname__, plain, tuple(_dtypes(values)))

    def remembered(self, problem: Problem, device: Device) -> triton.Config | None:
        """Return the fastest measured config of just this problem, of those that are offered now."""
        found = self.best(problem, device)
        return None if found is None else found[0]

    def best(self, problem: Problem, device: Device) -> tuple[triton.Config, Trial] | None:
        """Return what `remembered` does, with its trial."""
        find = self._finder()
        trials = store_of(device).trials(self.digest, problem)
        trial = best_of(trial for trial in trials if find(trial.config) is not None)
        config = find(trial.config) if trial is not None else None
        return (config, trial) if trial is not None and config is not None else None

    def predicted(self, args: Sequence[Any], kwargs: dict[str, Any]) -> triton.Config:
        """Return the first by the kernel's own performance model, else the first that its pruning leaves."""
        configs = self.offered(args, kwargs) if self.space is None else self.configs
        if self.perf_model is None:
            return configs[0]
        values = self.named(args, kwargs)
        return min(configs, key=lambda config: self.perf_model(**values, **config.all_kwargs()))

    def likely(
        self, problem: KernelProblem, mode: str, device: Device, where: str = ""
    ) -> triton.Config | None:
        """Return the nearest measured problem's config, for a problem of which nothing is remembered.

        Raises NotTunedError in mode "strict". Warns where nothing at all tells which config is fast; `where`
        ends that warning's advice.
        """
        if mode == "strict" and self.measurable(device):
            raise NotTunedError(f"mode is strict and nothing measured is remembered for {problem.label}")
        near = self.nearest(problem, device)[:1] if mode != "off" else []
        if not near and self.perf_model is None and mode == "cached" and self.measurable(device):
            warnings.warn(
                f"{problem.label} was never measured on {device.name}: using the config that comes first. "
                f'Run once under tritile.mode("tune") or TRITILE_MODE=tune{where}.',
                UntunedWarning,
                stacklevel=callers_level(),
            )
        return near[0] if near else None

    def measured(self, device: Device) -> list[tuple[KernelProblem, triton.Config]]:
        """Return every measured problem of this kernel with its best config, where that is still offered."""
        find, found = self._finder(), []
        for trial in store_of(device).bests(self.digest, KernelProblem.op):
            config = find(trial.config)
            if isinstance(trial.problem, KernelProblem) and trial.problem.kernel == self.base_fn.__qualname__:
                found += [(trial.problem, config)] * (config is not None)
        return found

    def nearest(
        self, problem: KernelProblem, device: Device, unknown: Sequence[str] = ()
    ) -> list[triton.Config]:
        """Return the best configs of the nearest measured problems that differ in sizes alone.

        `unknown` are names in the key whose values do not count.
        """
        found: dict[float, list[triton.Config]] = {}
        for other, config in self.measured(device):
            known = replace(other, key=tuple(pair for pair in other.key if pair[0] not in unknown))
            if known.dtypes == problem.dtypes and len(known.sizes) == len(problem.sizes):
                found.setdefault(doublings(known, problem), []).append(config)
        return sorted(found[min(found)], key=str) if found else []

    def _finder(self) -> Callable[[Config], triton.Config | None]:
        """Return a function that turns a remembered config into Triton's; None for one not offered now."""
        space = self.space
        if space is not None:
            return lambda config: config.to_triton() if config in space else None
        plain = ((plain_config(config), config) for config in self.configs)
        known = {key: config for key, config in plain if key is not None}
        return known.get
