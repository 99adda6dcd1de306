"""Measure the configs of one call of a decorated kernel, in a process of its own or in this one.

In a process of its own configs run on copies of the call's memory, and one that hangs or crashes costs itself
alone (`tuned_elsewhere`). In this process they run on the call's own arguments, one after the other.
"""

import copy
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import triton

from tritile.core.config import Config
from tritile.core.device import INTERPRETER, Device
from tritile.core.of_triton import time_config
from tritile.core.problem import KernelProblem
from tritile.core.settings import tune_budget_s
from tritile.errors import (
    IsolationWarning,
    TuningError,
    UnsupportedError,
    WrongAnswerWarning,
    brief,
    callers_level,
)
from tritile.planning.store import store_of
from tritile.planning.trial import Trial
from tritile.tune.decorated import KernelCall, KernelSubject, checked_here
from tritile.tune.measure.engine import tune
from tritile.tune.measure.shipping import pack
from tritile.tune.measure.tasks import (
    Keep,
    Rules,
    Task,
    fastest,
    has_more,
    keeper,
    now,
    proposed,
    tried_of,
    whole,
)
from tritile.tune.measure.workshop import borrowed
from tritile.tune.remembering import RememberingAutotuner, plain_config
from tritile.tune.search import Listed, SearchSpace

_MOST: Final = 96  # the most configs of a space that a search tries


class Measurement:
    """Measure the configs of one call, where `tuner` holds its arguments.

    Only configs without a trial in the store are measured; each trial is stored as it is made. A search ends
    after the seconds of `TRITILE_TUNE_BUDGET` once a config has worked.
    """

    def __init__(
        self,
        tuner: RememberingAutotuner,
        problem: KernelProblem,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device: Device,
    ) -> None:
        self._tuner, self._problem, self._device = tuner, problem, device
        self._args, self._kwargs = args, kwargs
        self._store, self._space = store_of(device), tuner.space
        self._configs = tuner.prune_configs(kwargs) if self._space is None else []
        rules = Rules(tuner.search, problem_s=tune_budget_s(Rules.problem_s), most=_MOST)
        # Every config of a list is measured, and every config of a space by an exhaustive search.
        self._rules = whole(rules) if self._space is None or tuner.search == "exhaustive" else rules

    def best(self) -> triton.Config:
        """Return the fastest config. Raises TuningError, naming the reasons, where no config works."""
        if self._tuner.isolate and self._device != INTERPRETER:
            best = self._elsewhere()
            if best is not None:  # the tensors of this call are as they were
                return best
        best = self._here()
        self._tuner.pre_hook({**self._tuner.nargs, **self._kwargs, **best.all_kwargs()}, reset_only=True)
        return best

    def _elsewhere(self) -> triton.Config | None:
        """Measure in another process; return None where the call cannot be sent there."""
        tuner, store = self._tuner, self._store
        plain = {plain_config(config): config for config in self._configs}
        if None in plain:
            return None
        hooks = {config.key: own.pre_hook for config, own in plain.items() if config and own.pre_hook}
        call = call_of(tuner, self._args, self._kwargs, hooks)
        space = self._space or Listed(config for config in plain if config is not None)
        known = {t.config: t for t in store.trials(tuner.digest, self._problem) if t.config in space}
        found, remember = dict(known), keeper(store)

        def keep(digest: str, trial: Trial) -> None:
            found[trial.config] = trial
            remember(digest, trial)

        try:
            best = tuned_elsewhere(
                call, self._problem, self._device, tuner.digest, space, known, self._rules, keep
            )
        except UnsupportedError as error:
            text = f"{self._problem.kernel} is measured in this process, which a config may crash: {error}"
            warnings.warn(text, IsolationWarning, stacklevel=callers_level())
            return None
        good = [trial for trial in found.values() if trial.works]
        tuner.configs_timings = {
            plain.get(t.config) or t.config.to_triton(): [t.time / 1e3] * 3 for t in good
        }
        return plain.get(best) or best.to_triton()

    def _here(self) -> triton.Config:
        """Measure on the call's own arguments; return the fastest config whose answer is right."""
        store, digest = self._store, self._tuner.digest
        deadline = time.monotonic() + self._rules.problem_s
        found: dict[triton.Config, float] = {}
        failures: list[str] = []
        known = {trial.config.key: trial for trial in store.trials(digest, self._problem)}
        for config in self._proposals(known):
            if found and time.monotonic() > deadline:
                break
            plain = plain_config(config)
            trial = known.get(plain.key) if plain is not None else None
            if trial is None:
                trial = self._tried(config, plain or Config())
                if plain is not None:
                    known[plain.key] = trial
                    store.add(digest, trial)
            if trial.works:
                found[config] = trial.time / 1e3
            else:
                failures.append(f"{config}: {trial.failure}")
        self._tuner.configs_timings = {config: [ms] * 3 for config, ms in found.items()}
        for config in sorted(found, key=found.__getitem__):
            plain = plain_config(config)
            failure = self._wrong(config, known.get(plain.key) if plain else None)
            if failure is None:
                return config
            failures.append(f"{config}: {failure}")
        raise _none_works(self._problem, failures)

    def _proposals(self, known: Mapping[str, Trial]) -> Iterator[triton.Config]:
        """Yield the configs to measure: a list in its order, a space as the search goes.

        `known` are trials by the text of their config; the caller adds to them. The last of a space are those
        that were known before.
        """
        if self._space is None:
            yield from self._configs
            return
        while batch := proposed(self._space, tried_of(known.values()), self._rules):
            yield from (config.to_triton() for config in batch)
        yield from (trial.config.to_triton() for trial in known.values() if trial.us)

    def _tried(self, config: triton.Config, stored: Config) -> Trial:
        """Time one config; `stored` is what its trial says was timed."""
        utc = now()
        try:
            median, low, high = self._timed(config)
        except TuningError as error:
            return Trial(self._problem, stored, None, failure=str(error)[:200], measured_utc=utc)
        return Trial(self._problem, stored, median * 1e3, (high - low) / median, measured_utc=utc)

    def _timed(self, config: triton.Config) -> list[float]:
        """Return milliseconds at the quantiles 0.5, 0.2 and 0.8. Raises TuningError where a config fails."""
        bench = copy.copy(self._tuner)
        bench.fn = bench.host_aware  # tensors may lie in host memory where the user brings a benchmark
        try:
            times = time_config(bench, *self._args, config=config, **self._kwargs)
        except Exception as error:  # whatever one config raises, the others still deserve their turn
            raise TuningError(brief(error)) from error
        times = list(times) if isinstance(times, list | tuple) else [times] * 3
        if math.isinf(times[0]):
            raise TuningError("did not compile, or asked for more than the GPU has")
        if not times[0] > 0 or len(times) != 3:
            raise TuningError(f"the benchmark gave {times}: wanted milliseconds at three quantiles")
        return times

    def _wrong(self, config: triton.Config, trial: Trial | None) -> str | None:
        """Check a timed config by the reference, and store the result; return why it fails, or None."""
        if self._tuner.reference is None or (trial is not None and trial.error is not None):
            return None
        error, failure = None, None
        try:
            error = checked_here(call_of(self._tuner, self._args, self._kwargs, {}), config)
        except TuningError as wrong:
            failure = str(wrong)[:200]
        if trial is not None:
            us = trial.us if failure is None else None
            checked = replace(trial, us=us, error=error, failure=failure)
            self._store.add(self._tuner.digest, checked)
        return failure


def _none_works(problem: KernelProblem, failures: Sequence[str]) -> TuningError:
    return TuningError(f"no config works for {problem.label}: {'; '.join(failures[:4])}")


def call_of(
    tuner: RememberingAutotuner,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    hooks: Mapping[str, Callable[..., Any]],
) -> KernelCall:
    """Return a call with all that a tuner knows of it; `hooks` are those of configs, by their text."""
    return KernelCall(
        tuner.host_aware,
        tuple(tuner.arg_names),
        tuple(args),
        kwargs,
        hooks,
        tuple(tuner.reset_to_zero),
        tuple(tuner.restore_value),
        tuner.pre_hook if tuner.user_defined_pre_hook else None,
        tuner.reference,
        tuner.ragged,
        tuner.tolerance,
    )


def tuned_elsewhere(
    call: KernelCall,
    problem: KernelProblem,
    device: Device,
    source: str,
    space: SearchSpace,
    known: Mapping[Config, Trial],
    rules: Rules,
    keep: Keep,
) -> Config:
    """Return the fastest config of a call, measured in processes of its own, on copies of its memory.

    Only configs that are not among the `known` trials are measured. Raises UnsupportedError where the call
    cannot be sent, or does not run there, and TuningError, with the reasons, where no config works.
    """
    if not has_more(space, known, rules):
        return fastest(known.values())
    tensors = (value for value in call.named.values() if isinstance(value, torch.Tensor) and value.is_cuda)
    gpu = next((tensor.get_device() for tensor in tensors), torch.cuda.current_device())
    room = torch.cuda.mem_get_info(gpu)[0] // 3  # two copies are made there at the least
    with tempfile.TemporaryDirectory(prefix="tritile-") as folder:
        subject = KernelSubject(problem, device, source, pack(call, Path(folder), room))
        with borrowed(gpu) as shop:
            (tuned,) = tune([Task(subject, space, known)], shop, rules, keep)
    if tuned.best is None:
        if not tuned.trials:  # no config was tried, so none of them is at fault
            raise UnsupportedError(f"it cannot run in another process: {tuned.failure}")
        raise TuningError(f"no config works for {problem.label}: {tuned.failure}")
    return tuned.best.config


def first_right(
    tuner: RememberingAutotuner,
    likely: triton.Config,
    problem: KernelProblem,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> triton.Config:
    """Return the first config whose answer is right: `likely`, or else one of those that are offered.

    Nothing is timed. Warns with WrongAnswerWarning of each config that is wrong.
    Raises TuningError, naming the reasons, where all are.
    """
    if tuner.reference is None:
        return likely
    call, failures = call_of(tuner, args, kwargs, {}), []
    offered = tuner.offered(args, kwargs)
    for config in (likely, *(other for other in offered if other != likely)):
        try:
            checked_here(call, config)
        except TuningError as wrong:
            text = f"{config} of {problem.label} is left out: {wrong}"
            warnings.warn(text, WrongAnswerWarning, stacklevel=callers_level())
            failures.append(text)
        else:
            return config
    raise _none_works(problem, failures)
