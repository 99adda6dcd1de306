"""Measure the configs of one call of a decorated kernel, by the search of every problem.

In processes of their own configs run on copies of the call's memory, and one that hangs or crashes costs
itself alone. Otherwise they run in this process on the call's own arguments, one after the other.
"""

import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from tritile.core.config import Config
from tritile.core.device import HOST, Device
from tritile.core.log import log
from tritile.core.of_triton import time_config
from tritile.core.problem import KernelProblem
from tritile.core.settings import tune_budget_s
from tritile.errors import IsolationWarning, TuningError, UnsupportedError, brief, callers_level
from tritile.planning.checked import MAX_US
from tritile.planning.store import store_of
from tritile.planning.trial import Trial, best_of, is_settled
from tritile.tune.decorated import KernelCall, KernelSubject, checked_here
from tritile.tune.identity import tensors_of, zero
from tritile.tune.measure.answers import OUTSIDE, WRONG
from tritile.tune.measure.bench import Screened, Subject, Taken
from tritile.tune.measure.engine import Keep, Rules, Task, has_more, logged, tune, whole
from tritile.tune.measure.shipping import pack
from tritile.tune.measure.timing import Timing
from tritile.tune.measure.workers import WorkerError, borrowed
from tritile.tune.search import Listed

if TYPE_CHECKING:
    from tritile.tune.autotuner import Autotuner

_MOST: Final = 96  # the most configs of a space that a search tries
_FLUSH_S: Final = 1.0
_LEAST_US: Final = 1e-6


class _Session:
    """Measure one problem: hold its trials in `trials`, store them, and say what happens.

    What it says goes to a terminal, in one line that shows how far it is, else to the log "tritile.tune".
    """

    def __init__(
        self, tuner: "Autotuner", problem: KernelProblem, listed: Mapping[Config, triton.Config],
        device: Device, trials: dict[Config, Trial],
    ) -> None:  # fmt: skip
        self.tuner, self.problem, self.listed, self.trials = tuner, problem, listed, trials
        self._store, self._waiting, self._count = store_of(device), list[Trial](), 0
        self._since = self._flushed = time.monotonic()
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    @property
    def keep(self) -> Keep:
        return logged(self._add)

    def config_of(self, config: Config) -> triton.Config:
        return self.listed.get(config) or config.to_triton()

    def _add(self, digest: str, trial: Trial) -> None:
        self._count += trial.config not in self.trials
        self.trials[trial.config] = trial
        self._waiting.append(trial)
        if time.monotonic() > self._flushed + _FLUSH_S:
            self.flush()
        if self._terminal:
            of = f" of {len(self.listed)}" if self.listed else ""
            sys.stderr.write(f"\r\x1b[Ktritile: tuning {self.problem.label}: {self._count}{of} configs")
            sys.stderr.flush()

    def flush(self) -> None:
        # In one transaction a second, as each waits for the disk.
        waiting, self._waiting, self._flushed = self._waiting, [], time.monotonic()
        self._store.add(self.tuner.digest, *waiting)

    def _say(self, text: str, level: int, **facts: str | float | None) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[Ktritile: {text}\n")
        else:
            log("tune", level, text, problem=self.problem.label, **facts)

    def report(self, call: KernelCall, rules: Rules) -> None:
        best, seconds = best_of(self.trials.values()), time.monotonic() - self._since
        self.tuner.bench_time = seconds
        if best is None:
            return
        won, what = self.config_of(best.config), self.problem.label
        how = f"in {seconds:.1f} s, {self._count} configs: {won}, {best.us:.1f} us"
        self._say(f"tuned {what} {how}", logging.INFO, config=str(best.config), us=best.us, seconds=seconds)
        if left := len(self.listed.keys() - self.trials.keys()):
            text = f"{what}: {left} configs were not measured within {rules.problem_s:g} s"
            self._say(f"{text} (TRITILE_TUNE_BUDGET): the next process goes on", logging.WARNING)
        if triton.knobs.autotuning.print:  # in the words that programs look for
            print(
                f"Triton autotuning for function {self.tuner.base_fn.__name__},\n"
                f"with key as {self.tuner.key_of(call.args, call.kwargs)[0]},\n"
                f"finished after {seconds:.2f}s,\nbest config selected: {won};"
            )


def measured(
    tuner: "Autotuner", problem: KernelProblem, listed: Mapping[Config, triton.Config], args: Sequence[Any],
    kwargs: dict[str, Any], device: Device, rules: Rules | None = None, force: bool = False,
) -> triton.Config:  # fmt: skip
    """Return the fastest config of one call, of those that its pruning offers: `Autotuner.measure`.

    Only configs without a trial in the store are measured, unless `force`. What failed for want of memory,
    hung or was lost is tried again, and all of it where nothing works. A search goes by `rules`, by default
    those of `rules_of`. Raises TuningError, naming the reasons, where no config works.
    """
    rules = replace(rules or rules_of(tuner), by_trials=tuner.reference is None)
    space = tuner.space or Listed(listed)
    stored = [] if force else store_of(device).trials(tuner.digest, problem)
    trials = {t.config: t for t in stored if t.settled and t.config in space}
    if best_of(trials.values()) is None:
        trials = {}
    session, exact = _Session(tuner, problem, listed, device, trials), {}
    unchecked = tuner.reference is not None and not any(trial.right for trial in trials.values())
    if unchecked or has_more(space, trials, rules):
        call = call_of(tuner, args, kwargs, {own.key: config for own, config in listed.items()})
        task = Task(KernelSubject(problem, device, tuner.digest), space, dict(trials))
        try:
            if not _elsewhere(session, call, task, rules):
                exact = _here(session, call, task, rules)
        finally:
            session.flush()
        session.report(call, rules)
        tuner.guess_anew()
    best = best_of(trials.values())
    if best is None:
        reasons = "; ".join(sorted({t.failure for t in trials.values() if t.failure})[:4])
        raise TuningError(f"no config works for {problem.label}: {reasons or 'none was tried'}")
    times = {session.config_of(config): [trial.time / 1e3] * 3 for config, trial in trials.items()}
    tuner.configs_timings = times | exact
    return session.config_of(best.config)


def rules_of(tuner: "Autotuner") -> Rules:
    """Return the rules of a search; every config of a list is measured."""
    rules = Rules(problem_s=tune_budget_s(Rules.problem_s), most=_MOST)
    return whole(rules) if tuner.space is None else rules


def _elsewhere(session: _Session, call: KernelCall, task: Task, rules: Rules) -> bool:
    """Measure in another process; return False, with a warning, where the call is to be measured here.

    That is where it cannot be sent, or every config that the compiler takes fails there: the kernel may use
    memory whose address it holds as a number, which that process lacks. A config that hangs would hang here.
    """
    if not session.tuner.isolate or task.subject.device == HOST:
        return False
    try:
        tuned_elsewhere(call, task, rules, session.keep)
        failures = [trial.failure for trial in session.trials.values() if trial.failure]
        in_running = [text for text in failures if _failed_in_running(text)]
        hung = any(text.startswith("hung:") for text in failures)
        if best_of(session.trials.values()) is not None or not in_running or hung:
            return True
        why = f"every config fails in another process: {in_running[0]}"
    except UnsupportedError as error:
        why = str(error)
    text = f"{session.problem.label} is measured in this process, which a config may crash: {why}"
    warnings.warn(text, IsolationWarning, stacklevel=callers_level())
    return False


def _failed_in_running(failure: str) -> bool:
    """True for a failure that copies of the call's memory may be the cause of; False for the compiler's."""
    return not is_settled(failure) or OUTSIDE in failure or WRONG in failure


class _InThisProcess:
    """Time configs as Triton does, one after the other, and check them on copies of the call."""

    benches = 1

    def __init__(self, session: _Session, call: KernelCall) -> None:
        self.session, self.call = session, call
        self.bench = session.tuner.holding(call.args)
        self.bench.pre_hook, self.bench.post_hook = _hooks(session.tuner)
        self.timings: dict[triton.Config, list[float]] = {}  # milliseconds, as the benchmark gave them

    def compile(self, subject: Subject, config: Config, for_check: bool = False) -> Future[None]:
        """Leave compiling to the first launch, which is not timed."""
        compiled = Future[None]()
        compiled.set_result(None)
        return compiled

    def begin(self, subject: Subject) -> None:
        pass

    def screen(self, subject: Subject, config: Config, fastest_us: float) -> Screened:
        own = self.session.config_of(config)
        try:
            found = time_config(self.bench, *self.call.args, config=own, **self.call.kwargs)
            times = [float(ms) for ms in (found if isinstance(found, list | tuple) else [found])]
            self.timings[own] = times
            if not 0 <= times[0] < math.inf:
                what = "it does not run here, or the benchmark gave"
                raise TuningError(f"{what} {times}: wanted milliseconds")
        except Exception as error:  # whatever one config raises, the others still deserve their turn
            raise WorkerError(brief(error)) from error
        us = min(max(times[0] * 1e3, _LEAST_US), MAX_US)  # of a clock that is too coarse
        return Screened(Timing(us, max(0.0, times[-1] - times[len(times) // 2]) * 1e3 / us), Taken())

    def race(self, subject: Subject, configs: Sequence[Config]) -> list[list[float]]:
        raise WorkerError("each config is timed once")

    def check(self, subject: Subject, config: Config) -> float | None:
        try:
            own = self.session.config_of(config)
            return None if self.call.reference is None else checked_here(self.call, own)
        except TuningError as wrong:
            raise WorkerError(str(wrong)[:200]) from wrong

    def end(self, subject: Subject) -> None:
        pass


def _here(session: _Session, call: KernelCall, task: Task, rules: Rules) -> dict[triton.Config, list[float]]:
    """Measure in this process, each config once; return the benchmark's own times in milliseconds."""
    trials = {c: t for c, t in session.trials.items() if t.works or not _failed_in_running(t.failure or "")}
    shop = _InThisProcess(session, call)
    (tuned,) = tune([replace(task, trials=trials)], shop, rules, session.keep)
    if tuned.best is not None:
        settings = session.config_of(tuned.best.config).all_kwargs()
        shop.bench.pre_hook({**session.tuner.named(call.args, call.kwargs), **settings}, reset_only=True)
    return shop.timings


def _hooks(tuner: "Autotuner") -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what runs ahead of and after each launch that is timed: as Triton's, but for None and tuples."""
    kept: dict[str, list[torch.Tensor]] = {}

    def before(named: Mapping[str, Any], reset_only: bool = False) -> None:
        zero(named, tuner.reset_to_zero)
        for name in () if reset_only else tuner.restore_value:
            kept[name] = [tensor.clone() for tensor in tensors_of(named.get(name))]

    def after(named: Mapping[str, Any], exception: BaseException | None) -> None:
        for name, copies in kept.items():
            for tensor, copied in zip(tensors_of(named.get(name)), copies, strict=True):
                tensor.copy_(copied)

    pre_hook = tuner.pre_hook if tuner.user_defined_pre_hook else before
    return pre_hook, tuner.post_hook if tuner.user_defined_post_hook else after


def room_of(call: KernelCall) -> tuple[int, int]:
    """Return the number of a call's GPU, and how many bytes the call's memory may have for copies to fit."""
    tensors = (tensor for value in call.named.values() for tensor in tensors_of(value) if tensor.is_cuda)
    gpu = next((tensor.get_device() for tensor in tensors), torch.cuda.current_device())
    return gpu, torch.cuda.mem_get_info(gpu)[0] // 3  # two copies are made there at the least


def tuned_elsewhere(call: KernelCall, task: Task, rules: Rules, keep: Keep) -> None:
    """Measure the configs of a call in processes of its own, on copies of its memory.

    Raises UnsupportedError where the call cannot be sent, or does not run there.
    """
    assert isinstance(task.subject, KernelSubject)
    try:
        gpu, room = room_of(call)
        with tempfile.TemporaryDirectory(prefix="tritile-") as folder:
            sent = replace(task.subject, shipment=pack(call, Path(folder), room))
            with borrowed(gpu) as shop:
                (tuned,) = tune([replace(task, subject=sent)], shop, rules, keep)
    except OSError as error:  # no folder for temporary files, or no process
        raise UnsupportedError(f"it cannot run in another process: {brief(error)}") from error
    if tuned.best is None and not tuned.trials:  # no config was tried, so none of them is at fault
        raise UnsupportedError(f"it cannot run in another process: {tuned.failure}")


def call_of(
    tuner: "Autotuner", args: Sequence[Any], kwargs: Mapping[str, Any], configs: Mapping[str, triton.Config]
) -> KernelCall:
    """Return a call with all that a tuner knows of it; `configs` by the text of their identities."""
    hook = tuner.pre_hook if tuner.user_defined_pre_hook else None
    return KernelCall(
        tuner.fn, tuple(tuner.arg_names), tuple(args), dict(kwargs), configs,
        tuple(tuner.reset_to_zero), tuple(tuner.restore_value), hook,
        tuner.reference, tuner.tolerance,
    )  # fmt: skip
