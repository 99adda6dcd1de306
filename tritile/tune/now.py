"""Tune problems of tritile's own operations: many, or one at its first call in mode "tune"."""

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from tritile.choose import aten, pick
from tritile.choose.predictor import RACED
from tritile.core import settings
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import TuningError
from tritile.tune.subject import torch_calls
from tritile.tune.subject.problem import TunableProblem, task_of
from tritile.tuner.measure import engine
from tritile.tuner.measure.engine import OnTrial, Rules, Tuned, log_trial, now
from tritile.tuner.measure.workers import PoolRunner, shared_runner
from tritile.tuner.store.trial import TORCH, Trial, best_of
from tritile.tuner.store.trials import store_of


def tuned_now(problem: Tiled, device: Device, gpu: int) -> Config:
    """Return the fastest of the likeliest configs of a problem's class, else what a search finds.

    Trials are stored. Raises TuningError, with the reasons, if no config works.
    """
    if likely := pick.likely(problem, device, RACED):
        with contextlib.suppress(TuningError):  # none of these works
            return searched_now(problem, device, gpu, among=likely)
    return searched_now(problem, device, gpu)


def tune(
    problems: Iterable[Tiled], device: Device, runner: PoolRunner, on_trial: OnTrial, rules: Rules,
    force: bool = False, should_continue: Callable[[], bool] = lambda: True, among: Sequence[Config] = (),
) -> Iterator[Tuned]:  # fmt: skip
    """Search for the best config of each problem, or only `among` these; yield each outcome when done.

    Trials in the store are used unless `force`; `on_trial` gets every new one. Stops before the next problem
    once `should_continue()` is false. If a problem runs out of GPU memory, or if no config works, its outcome
    has a failure.
    """
    tasks = (task_of(each, device, force, among) for each in problems)
    for tuned in engine.tune(tasks, runner, rules, on_trial, should_continue):
        yield tuned
        pick.forget()


def searched_now(
    problem: Tiled, device: Device, gpu: int, rules: Rules | None = None, force: bool = False,
    among: Sequence[Config] = (),
) -> Config:  # fmt: skip
    """Return the fastest config that a search finds within the seconds of `TRITILE_TUNE_BUDGET`.

    `among`: the only configs to try. Trials are stored. Raises TuningError, with the reasons, if no config
    works.
    """
    rules = rules or Rules(problem_s=settings.tune_budget_s(Rules.problem_s))
    with shared_runner(gpu) as runner:
        (tuned,) = tune([problem], device, runner, store_of(device).add, rules, force, among=among)
    if tuned.best is None:
        raise TuningError(f"{problem.label}: {tuned.failure}") from tuned.cause
    return tuned.best.config


def time_torch(problem: Tiled, device: Device, gpu: int, shares_gpu: bool = False) -> None:
    """Time torch interleaved with a problem's fastest measured config, and store its time or failure.

    `shares_gpu`: a program uses the GPU meanwhile. Does nothing if torch has no single call for the problem,
    or if no config of it was measured.
    """
    best = best_of(pick.trials(problem, device))
    if torch_calls.run_of(problem) is None or best is None or not best.us:
        return
    tunable, us, failure = TunableProblem(problem, device, shares_gpu), None, None
    with shared_runner(gpu) as runner:
        try:
            pairs = zip(*runner.race(tunable, [best.config, aten.CONFIG]), strict=True)
            us = best.us * statistics.median(by_torch / own for own, by_torch in pairs)
        except TuningError as error:
            failure = str(error)
        finally:
            runner.end(tunable)
    trial = Trial(problem, aten.CONFIG, us, failure=failure, measured_utc=now())
    store_of(device).add(TORCH, trial)
    log_trial(trial)
