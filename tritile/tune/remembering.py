"""What a decorated kernel remembers: its calls as problems, and the configs that were measured for them."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import triton

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import KernelProblem, Problem, doublings
from tritile.errors import NotTunedError, UntunedWarning, callers_level
from tritile.planning.store import store_of
from tritile.planning.trial import best_of
from tritile.tune.forms import DESCRIPTORS
from tritile.tune.searching import SearchingAutotuner, plain_config


def _dtypes(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, given in values.items():
        value = given.base if type(given) in DESCRIPTORS else given
        if hasattr(value, "dtype"):
            yield name, str(value.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    """Return a key value as what a store can hold."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if isinstance(value, int | float | bool | str | None) and finite else str(value)


class RememberingAutotuner(SearchingAutotuner):
    """A tuner that finds in the store what it, or another process, measured."""

    bucket: Mapping[str, Callable[[Any], Any]] = {}  # of key values, by name: what they count as

    def problem(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelProblem:
        """Return a call in the store's words: the values of `key`, in their buckets, and tensors' dtypes."""
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        values = {name: given[name] for name in self.arg_names if name in given}
        given_keys = ((name, values[name]) for name in self.keys if name in values)
        key = tuple(
            (name, _plain(self.bucket[name](value) if name in self.bucket else value))
            for name, value in given_keys
        )
        return KernelProblem(self.base_fn.__qualname__, key, tuple(_dtypes(values)))

    def _finder(self) -> Callable[[Config], triton.Config | None]:
        """Return what gives a remembered config back as Triton's, None for one that is no longer offered."""
        space = self.space
        if space is not None:
            return lambda config: config.to_triton() if config in space else None
        plain = ((plain_config(config), config) for config in self.configs)
        known = {key: config for key, config in plain if key is not None}
        return known.get

    def remembered(self, problem: Problem, device: Device) -> triton.Config | None:
        """Return the fastest config of the present list that was measured for just this problem."""
        find = self._finder()
        trials = store_of(device).trials(self.digest, problem)
        best = best_of(trial for trial in trials if find(trial.config) is not None)
        return find(best.config) if best is not None else None

    def _nearest(self, problem: KernelProblem, device: Device) -> triton.Config | None:
        """Return the best config of the nearest measured problem that differs in sizes alone."""
        found = [
            (doublings(other, problem), str(config), config)
            for other, config in self._measured(device)
            if other.dtypes == problem.dtypes and len(other.sizes) == len(problem.sizes)
        ]
        return min(found, key=lambda item: item[:2])[2] if found else None

    def _measured(self, device: Device) -> list[tuple[KernelProblem, triton.Config]]:
        """Return every measured problem of this kernel with its best config, where that is still offered."""
        find, found = self._finder(), []
        for trial in store_of(device).bests(self.digest, KernelProblem.op):
            config = find(trial.config)
            if isinstance(trial.problem, KernelProblem) and trial.problem.kernel == self.base_fn.__qualname__:
                found += [(trial.problem, config)] * (config is not None)
        return found

    def _likely(
        self, problem: KernelProblem, mode: str, device: Device, where: str = ""
    ) -> triton.Config | None:
        """Return the nearest measured problem's config, for a call of which nothing is remembered.

        Raises NotTunedError in mode "strict". Warns where nothing at all tells which config is fast; `where`
        ends that warning's advice.
        """
        if mode == "strict" and self.measurable(device):
            raise NotTunedError(f"mode is strict and nothing measured is remembered for {problem.label}")
        near = self._nearest(problem, device) if mode != "off" else None
        if near is None and self.perf_model is None and mode == "cached" and self.measurable(device):
            warnings.warn(
                f"{problem.label} was never measured on {device.name}: using the config that comes first. "
                f'Run once under tritile.mode("tune") or TRITILE_MODE=tune{where}.',
                UntunedWarning,
                stacklevel=callers_level(),
            )
        return near
