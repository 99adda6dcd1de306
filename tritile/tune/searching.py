"""Searching for a decorated kernel's config: how configs of one call are measured, and where."""

import copy
import math
import threading
import time
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
from tritile.core.of_triton import time_config
from tritile.core.problem import KernelProblem
from tritile.core.settings import tune_budget_s
from tritile.core.source import source_hash
from tritile.errors import (
    InvalidValueError,
    IsolationWarning,
    TuningError,
    UnsupportedError,
    WrongAnswerWarning,
    brief,
    callers_level,
)
from tritile.planning.store import Store, store_of
from tritile.planning.trial import Trial
from tritile.runtime.interpreter import HostAware
from tritile.tune.decorated import KernelCall, checked_here, tuned_elsewhere
from tritile.tune.measure.log import keeper
from tritile.tune.measure.tasks import Rules, now, proposed, tried_of, whole
from tritile.tune.search import Listed, Space
from tritile.tune.timing import do_bench as timed

_OPENING: Final = 8  # configs of a space that are tried where nothing is timed
_MOST: Final = 96  # configs of a space that a search tries: by replay, then some 1% from the best


def plain_config(config: triton.Config) -> Config | None:
    """The config as a store can hold it; None where it holds more than plain data, and so cannot be kept."""
    if getattr(config, "ir_override", None) is not None:
        return None
    try:
        return Config.from_triton(config)
    except InvalidValueError:
        return None


class SearchingAutotuner(TritonAutotuner):
    """A `triton.runtime.Autotuner` that searches a list or a space, and remembers every trial.

    It holds what `tritile.autotune` was told of how to measure; when, and what is launched, is decided above.
    """

    def __init__(
        self,
        fn: Any,
        configs: "list[triton.Config] | Space",
        key: list[str],
        isolate: bool = True,
        search: str | None = None,
        reference: Callable[..., Mapping[str, torch.Tensor]] | None = None,
        ragged: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        tolerance: float | None = None,
        **rest: Any,
    ):
        hooks = {name: rest.pop(name, None) for name in ("reset_to_zero", "restore_value")}
        self._own_bench = rest.get("do_bench") is not None
        rest["do_bench"] = rest.get("do_bench") or timed
        self.space = configs if isinstance(configs, Space) else None
        listed = [configs.opening(1)[0].to_triton()] if isinstance(configs, Space) else configs
        super().__init__(fn, fn.arg_names, listed, key, **hooks, **rest)
        self.host_aware = HostAware(fn)
        # A benchmark, or a hook, of the user's own may want this very process.
        self._isolate = isolate and not self._own_bench and not self.user_defined_post_hook
        self.search = search or ("exhaustive" if self.space is None else Rules.strategy)
        self.reference, self.ragged, self.tolerance = reference, ragged, tolerance
        self._digest: str | None = None
        self._lock = threading.RLock()  # upstream keeps the arguments in hand on self while it measures

    @property
    def digest(self) -> str:
        """A digest of the kernel's source; what was measured of another source is not believed."""
        if self._digest is None:
            self._digest = source_hash(self.fn)
        return self._digest

    def measurable(self, device: Device) -> bool:
        """Whether there is something to time a call with: a GPU, or a benchmark of the user's own."""
        return self._own_bench or device != devices.INTERPRETER

    def measure(
        self, problem: KernelProblem, args: Sequence[Any], kwargs: dict[str, Any], device: Device
    ) -> triton.Config:
        """Search for the fastest config, measuring only what was never measured for `problem`.

        Each trial is remembered as it is made. Configs run in a process of their own, on copies of the
        arguments; in this one where a benchmark was given, `isolate` is off, or the call cannot be sent.
        Stops after the budget of `TRITILE_TUNE_BUDGET` once a config has worked.
        Raises TuningError, naming the reasons, where no config works.
        """
        with self._lock:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            try:
                configs = self.prune_configs(kwargs) if self.space is None else []
                best = None
                if self._isolate and device != devices.INTERPRETER:
                    best = self._measure_elsewhere(configs, problem, args, kwargs, device)
                if best is None:  # else the tensors of this call are as they were
                    best = self._measure_here(configs, problem, args, kwargs, store_of(device))
                    self.pre_hook({**self.nargs, **kwargs, **best.all_kwargs()}, reset_only=True)
            finally:
                self.nargs = {}
        return best

    def _timed(self, config: triton.Config, args: Sequence[Any], kwargs: dict[str, Any]) -> list[float]:
        """Milliseconds of one config at the quantiles 0.5, 0.2 and 0.8. Raises TuningError if it fails."""
        try:
            bench = copy.copy(self)
            bench.fn = (
                self.host_aware
            )  # where the benchmark is the user's own, tensors may lie in host memory
            times = time_config(bench, *args, config=config, **kwargs)
        except Exception as error:  # whatever one config raises, the others still deserve their turn
            raise TuningError(brief(error)) from error
        times = list(times) if isinstance(times, list | tuple) else [times] * 3
        if math.isinf(times[0]):
            raise TuningError("did not compile, or asked for more than the GPU has")
        if not times[0] > 0 or len(times) != 3:
            raise TuningError(f"the benchmark gave {times}: wanted milliseconds at three quantiles")
        return times

    def _rules(self) -> Rules:
        """Of a list, and by an exhaustive search, every config is asked for."""
        rules = Rules(self.search, problem_s=tune_budget_s(Rules.problem_s), most=_MOST)
        return whole(rules) if self.space is None or self.search == "exhaustive" else rules

    def _call(
        self, args: Sequence[Any], kwargs: dict[str, Any], hooks: Mapping[str, Callable[..., Any]]
    ) -> KernelCall:
        return KernelCall(
            self.host_aware,
            tuple(self.arg_names),
            tuple(args),
            kwargs,
            hooks,
            tuple(self.reset_to_zero),
            tuple(self.restore_value),
            self.pre_hook if self.user_defined_pre_hook else None,
            self.reference,
            self.ragged,
            self.tolerance,
        )

    def _measure_elsewhere(
        self,
        configs: Sequence[triton.Config],
        problem: KernelProblem,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device: Device,
    ) -> triton.Config | None:
        """The fastest by measuring in another process; None where the call cannot be sent there."""
        plain = {plain_config(config): config for config in configs}
        if None in plain:
            return None
        hooks = {config.key: own.pre_hook for config, own in plain.items() if config and own.pre_hook}
        space = self.space or Listed(config for config in plain if config is not None)
        store = store_of(device)
        known = {t.config: t for t in store.trials(self.digest, problem) if t.config in space}
        call = self._call(args, kwargs, hooks)
        found, remember = dict(known), keeper(store)

        def keep(digest: str, trial: Trial) -> None:
            found[trial.config] = trial
            remember(digest, trial)

        try:
            best = tuned_elsewhere(call, problem, device, self.digest, space, known, self._rules(), keep)
        except UnsupportedError as error:
            text = f"{problem.kernel} is measured in this process, without protection from it: {error}"
            warnings.warn(text, IsolationWarning, stacklevel=callers_level())
            return None
        good = [trial for trial in found.values() if trial.works]
        self.configs_timings = {plain.get(t.config) or t.config.to_triton(): [t.time / 1e3] * 3 for t in good}
        return plain.get(best) or best.to_triton()

    def _proposals(
        self, configs: Sequence[triton.Config], known: Mapping[str, Trial]
    ) -> Iterator[triton.Config]:
        """The configs to measure one after the other: a list as it is, a space as the search goes."""
        if self.space is None:
            yield from configs
            return
        rules = self._rules()
        while True:
            batch = proposed(self.space, tried_of(known.values()), rules)
            if not batch:
                yield from (trial.config.to_triton() for trial in known.values() if trial.us)
                return
            yield from (config.to_triton() for config in batch)

    def _measure_here(
        self,
        configs: Sequence[triton.Config],
        problem: KernelProblem,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        store: Store,
    ) -> triton.Config:
        """The fastest by measuring one config after the other on the call's own arguments."""
        deadline = time.monotonic() + self._rules().problem_s
        found: dict[triton.Config, float] = {}
        failures: list[str] = []
        known = {trial.config.key: trial for trial in store.trials(self.digest, problem)}
        for config in self._proposals(configs, known):
            if found and time.monotonic() > deadline:
                break
            plain = plain_config(config)
            if plain is None or plain.key not in known:
                trial = self._measure_one(config, plain, problem, args, kwargs)
                if plain is not None:
                    known[plain.key] = trial
                    store.add(self.digest, trial)
            else:
                trial = known[plain.key]
            if trial.works:
                found[config] = trial.time / 1e3
            else:
                failures.append(f"{config}: {trial.failure}")
        self.configs_timings = {config: [ms] * 3 for config, ms in found.items()}
        for config in sorted(found, key=found.__getitem__):
            plain = plain_config(config)
            failure = self._verdict(config, known.get(plain.key) if plain else None, args, kwargs, store)
            if failure is None:
                return config
            failures.append(f"{config}: {failure}")
        raise TuningError(f"no config works for {problem.label}: {'; '.join(failures[:4])}")

    def _verdict(
        self,
        config: triton.Config,
        trial: Trial | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        store: Store,
    ) -> str | None:
        """Check a measured config by the reference, and remember what was found; why it fails, or None."""
        if self.reference is None or (trial is not None and trial.error is not None):
            return None
        error, failure = None, None
        try:
            error = checked_here(self._call(args, kwargs, {}), config)
        except TuningError as wrong:
            failure = str(wrong)[:200]
        if trial is not None:
            us = trial.us if failure is None else None
            store.add(self.digest, replace(trial, us=us, error=error, failure=failure))
        return failure

    def first_right(
        self, likely: triton.Config, problem: KernelProblem, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> triton.Config:
        """Return the first config whose answer is right: `likely`, or else one of those that are offered.

        Nothing is timed. Warns with WrongAnswerWarning of each config that is wrong.
        Raises TuningError, naming the reasons, where all are.
        """
        if self.reference is None:
            return likely
        call, failures = self._call(args, kwargs, {}), []
        offered = self.offered(args, kwargs)
        for config in (likely, *(other for other in offered if other != likely)):
            try:
                checked_here(call, config)
            except TuningError as wrong:
                text = f"{config} of {problem.label} is left out: {wrong}"
                warnings.warn(text, WrongAnswerWarning, stacklevel=callers_level())
                failures.append(text)
            else:
                return config
        raise TuningError(f"no config works for {problem.label}: {'; '.join(failures[:4])}")

    def offered(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[triton.Config]:
        """The configs of a list that its pruning leaves for a call; the first few of a space."""
        if self.space is not None:
            return [config.to_triton() for config in self.space.opening(_OPENING)]
        with self._lock:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            try:
                return list(self.prune_configs(kwargs))
            finally:
                self.nargs = {}

    def _measure_one(
        self,
        config: triton.Config,
        plain: Config | None,
        problem: KernelProblem,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Trial:
        utc, shown = now(), plain or Config()
        try:
            median, low, high = self._timed(config, args, kwargs)
        except TuningError as error:
            return Trial(problem, shown, None, failure=str(error)[:200], measured_utc=utc)
        return Trial(problem, shown, median * 1e3, (high - low) / median, measured_utc=utc)
