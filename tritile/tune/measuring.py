"""Measure the configs of one call of a decorated kernel, by the search of every problem.

In processes of their own configs run on copies of the call's memory, and one that hangs or crashes costs
itself alone. Otherwise they run in this process on the call's own arguments, one after the other.
"""

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
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
from tritile.tune.measure.bench import Screened, Subject, Taken
from tritile.tune.measure.child import ChildError
from tritile.tune.measure.engine import tune
from tritile.tune.measure.shipping import pack
from tritile.tune.measure.tasks import (
    Keep,
    Rules,
    Task,
    Tuned,
    fastest,
    has_more,
    keeper,
    tell_measured,
    whole,
)
from tritile.tune.measure.workshop import Workshop, borrowed
from tritile.tune.remembering import RememberingAutotuner, plain_config
from tritile.tune.spaces import Listed

_MOST: Final = 96  # the most configs of a space that a search tries
_STAND_IN: Final = "PLACE_IN_LIST"  # what a config is called that no store holds


class Here(Workshop):
    """Measure in this process: nothing is compiled ahead, and each config is timed once."""

    benches = 1

    def __init__(
        self,
        tuner: RememberingAutotuner,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        config_of: Callable[[Config], triton.Config],
    ) -> None:
        self._tuner, self._args, self._kwargs, self._config_of = tuner, args, kwargs, config_of

    def compile(self, subject: Subject, config: Config, for_check: bool = False) -> Future[None]:
        """Return a future that is done."""
        done = Future[None]()
        done.set_result(None)
        return done

    def begin(self, subject: Subject) -> None:
        """Do nothing: the call has its operands."""

    def end(self, subject: Subject) -> None:
        """Do nothing."""

    def screen(self, subject: Subject, config: Config, fastest_us: float, held_too: bool) -> Screened:
        """Time a config by the tuner's benchmark. Raises ChildError where it fails."""
        bench = copy.copy(self._tuner)
        bench.fn = bench.host_aware  # tensors may lie in host memory where the user brings a benchmark
        try:
            times = time_config(bench, *self._args, config=self._config_of(config), **self._kwargs)
        except Exception as error:  # whatever one config raises, the others still deserve their turn
            raise ChildError(brief(error), lost=False) from error
        times = list(times) if isinstance(times, list | tuple) else [times] * 3
        if math.isinf(times[0]):
            raise ChildError("did not compile, or asked for more than the GPU has", lost=False)
        if not times[0] > 0 or len(times) != 3:
            text = f"the benchmark gave {times}: wanted milliseconds at three quantiles"
            raise ChildError(text, lost=False)
        median, low, high = times
        return Screened(median * 1e3, (high - low) / median, Taken())

    def check(self, subject: Subject, config: Config) -> float | None:
        """Check a config by the reference, on copies of the call's tensors. Raises ChildError if it fails."""
        if self._tuner.reference is None:
            return None
        try:
            return checked_here(call_of(self._tuner, self._args, self._kwargs, {}), self._config_of(config))
        except TuningError as wrong:
            raise ChildError(str(wrong)[:200], lost=False) from wrong


def measured(
    tuner: RememberingAutotuner,
    problem: KernelProblem,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: Device,
    rules: Rules | None = None,
    force: bool = False,
) -> triton.Config:
    """Return the fastest config of one call, whose arguments the tuner holds.

    Only configs without a trial in the store are measured, unless `force`; each trial is stored as it is
    made. A search goes by `rules`, by default those of `rules_of`. Raises TuningError, naming the reasons,
    where no config works.
    """
    store, rules = store_of(device), rules or rules_of(tuner)
    offered = tuner.prune_configs(kwargs) if tuner.space is None else []
    listed = {plain_config(c) or Config(((_STAND_IN, place),)): c for place, c in enumerate(offered)}
    space = tuner.space or Listed(listed)
    trials = [] if force else store.trials(tuner.digest, problem)
    known = {t.config: t for t in trials if t.config in space}
    found, remember = dict(known), keeper(store)

    def keep(digest: str, trial: Trial) -> None:
        before, found[trial.config] = found.get(trial.config), trial
        if _STAND_IN in dict(trial.config.kwargs):
            tell_measured(trial, before, str(config_of(trial.config)))
        else:
            remember(digest, trial)

    def config_of(config: Config) -> triton.Config:
        return listed.get(config) or config.to_triton()

    task, best = Task(KernelSubject(problem, device, tuner.digest), space, known), None
    if not has_more(space, known, rules):
        best = fastest(known.values())
    elif tuner.isolate and device != INTERPRETER and not any(_STAND_IN in dict(c.kwargs) for c in listed):
        hooks = {config.key: own.pre_hook for config, own in listed.items() if own.pre_hook}
        best = _elsewhere(call_of(tuner, args, kwargs, hooks), task, rules, keep)
    if best is None:
        task = replace(task, known=dict(found))
        here = Here(tuner, args, kwargs, config_of)
        (tuned,) = tune([task], here, replace(rules, finalists=1), keep)
        best = _winner(tuned)
        tuner.pre_hook({**tuner.nargs, **kwargs, **config_of(best).all_kwargs()}, reset_only=True)
    good = {config: trial.time / 1e3 for config, trial in found.items() if trial.works}
    tuner.configs_timings = {config_of(config): [ms] * 3 for config, ms in good.items()}
    return config_of(best)


def rules_of(tuner: RememberingAutotuner) -> Rules:
    """Return the rules of every search; of a list, and by strategy "exhaustive", every config is measured."""
    rules = Rules(tuner.search, problem_s=tune_budget_s(Rules.problem_s), most=_MOST)
    return whole(rules) if tuner.space is None or tuner.search == "exhaustive" else rules


def _winner(tuned: Tuned) -> Config:
    if tuned.best is None:
        raise TuningError(f"no config works for {tuned.problem.label}: {tuned.failure}")
    return tuned.best.config


def _elsewhere(call: KernelCall, task: Task, rules: Rules, keep: Keep) -> Config | None:
    """Measure in another process; return None, with a warning, where the call cannot be sent there."""
    try:
        return tuned_elsewhere(call, task, rules, keep)
    except UnsupportedError as error:
        text = f"{task.subject.problem.label} is measured in this process, which a config may crash: {error}"
        warnings.warn(text, IsolationWarning, stacklevel=callers_level())
        return None


def room_of(call: KernelCall) -> tuple[int, int]:
    """Return the number of a call's GPU, and how many bytes the call's memory may have for copies to fit."""
    tensors = (value for value in call.named.values() if isinstance(value, torch.Tensor) and value.is_cuda)
    gpu = next((tensor.get_device() for tensor in tensors), torch.cuda.current_device())
    return gpu, torch.cuda.mem_get_info(gpu)[0] // 3  # two copies are made there at the least


def tuned_elsewhere(call: KernelCall, task: Task, rules: Rules, keep: Keep) -> Config:
    """Return the fastest config of a call, measured in processes of its own, on copies of its memory.

    Raises UnsupportedError where the call cannot be sent, or does not run there, and TuningError, with the
    reasons, where no config works.
    """
    gpu, room = room_of(call)
    with tempfile.TemporaryDirectory(prefix="tritile-") as folder:
        assert isinstance(task.subject, KernelSubject)
        sent = replace(task.subject, shipment=pack(call, Path(folder), room))
        with borrowed(gpu) as shop:
            (tuned,) = tune([replace(task, subject=sent)], shop, rules, keep)
    if tuned.best is None and not tuned.trials:  # no config was tried, so none of them is at fault
        raise UnsupportedError(f"it cannot run in another process: {tuned.failure}")
    return _winner(tuned)


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
    raise TuningError(f"no config works for {problem.label}: {'; '.join(failures[:4])}")
