"""Tune problems of tritile's own: many by search, or one at its first call in mode "tune"."""

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, Final

import torch

from tritile.core import settings
from tritile.core.call import Call
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.core.threads import at_fork
from tritile.errors import TuningError, brief
from tritile.families import launching
from tritile.families.registry import FAMILIES
from tritile.planning import aten, plans
from tritile.planning.portfolio import RACED
from tritile.planning.store import store_of
from tritile.planning.trial import TORCH, Trial, best_of
from tritile.runtime.compiles import asking, compiles_heard
from tritile.tune.calibrate.sweep import compile_at
from tritile.tune.measure import engine
from tritile.tune.measure.engine import Keep, Rules, Tuned, logged, now
from tritile.tune.measure.timing import Queued, settled, timing_of
from tritile.tune.measure.workers import Workshop, borrowed
from tritile.tune.subject import answers, torch_calls
from tritile.tune.subject.operands import run_of
from tritile.tune.subject.problem import task_of
from tritile.tune.subject.race import calls_of, flusher, raced

_racing: Final[dict[int, Any]] = {}  # by GPU
_fp32: Final = threading.RLock()  # held while torch computes in a precision of ours: one setting for all GPUs
at_fork(_fp32)


def tuned_now(problem: Tiled, device: Device, gpu: int) -> Config:
    """Return the fastest config of a problem: a race of its portfolio's likeliest, else a search.

    Trials are remembered. Raises TuningError, with the reasons, where no config works.
    """
    likely, fastest = plans.likely(problem, device, RACED), None
    if likely:
        with _alone(gpu):
            try:
                fastest = _fastest(problem, likely, device, gpu)
            except (TuningError, RuntimeError):  # as for lack of memory: a search needs less
                fastest = None
    return fastest or searched_now(problem, device, gpu)


def tune(
    problems: Iterable[Tiled], device: Device, shop: Workshop, keep: Keep, rules: Rules,
    force: bool = False, keep_on: Callable[[], bool] = lambda: True,
) -> Iterator[Tuned]:  # fmt: skip
    """Search for the best config of each problem; yield each problem as it is done.

    Trials in the store are used, unless `force`; `keep` takes every new one. Stops before the next problem
    once `keep_on()` is false. A problem that runs out of GPU memory, or whose every config fails, is yielded
    with its failure.
    """
    for tuned in engine.tune((task_of(each, device, force) for each in problems), shop, rules, keep, keep_on):
        yield tuned
        plans.forget()


def searched_now(
    problem: Tiled, device: Device, gpu: int, rules: Rules | None = None, force: bool = False
) -> Config:
    """Return the fastest config of a problem by a search, within the seconds of `TRITILE_TUNE_BUDGET`.

    Trials are remembered. Raises TuningError, with the reasons, where no config works.
    """
    rules = rules or Rules(problem_s=settings.tune_budget_s(Rules.problem_s))
    with borrowed(gpu) as shop:
        (tuned,) = tune([problem], device, shop, logged(store_of(device).add), rules, force)
    if tuned.best is None:
        raise TuningError(f"{problem.label}: {tuned.failure}") from tuned.cause
    return tuned.best.config


def time_torch(problem: Tiled, device: Device, gpu: int) -> None:
    """Time torch and a problem's fastest measured config by turns, and remember torch's time.

    A failure is remembered, too. Nothing is where torch has no single call for the problem, or no config of
    it was measured.
    """
    best = best_of(plans.trials(problem, device))
    if torch_calls.run_of(problem) is None or best is None or not best.us:
        return
    both, us, failures = (best.config, aten.CONFIG), None, list[str]()
    precision = "tf32" if getattr(problem, "precision", "") == "tf32" else "ieee"
    try:
        with _alone(gpu), _fp32, answers.torch_fp32(precision):
            flush, calls = flusher(device), calls_of(problem, device)
            samples = raced(problem, calls, both, flush, Queued, lambda _, why: failures.append(why))
        if not failures:
            pairs = zip(*map(samples.__getitem__, both), strict=True)
            us = best.us * statistics.median(torchs / own for own, torchs in pairs)
    except (TuningError, RuntimeError) as error:
        failures.append(brief(error))
    failure = failures[0] if failures else None
    logged(store_of(device).add)(TORCH, Trial(problem, aten.CONFIG, us, failure=failure, measured_utc=now()))


@contextlib.contextmanager
def _alone(gpu: int) -> Iterator[None]:
    """Measure alone: one thread at a time on a GPU, the program's random state kept."""
    with _racing.setdefault(gpu, threading.RLock()), torch.cuda.device(gpu), torch.random.fork_rng([gpu]):
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def _fastest(problem: Tiled, likely: list[Config], device: Device, gpu: int) -> Config | None:
    """Time configs side by side in this process; None where none is right."""
    keep, calls = logged(store_of(device).add), calls_of(problem, device)
    _compile(calls[0], likely, device, gpu)
    samples = raced(problem, calls, likely, flusher(device), Queued)
    trials = {
        config: Trial(problem, config, *timing_of(times), measured_utc=now())
        for config, times in samples.items()
    }
    winner = None
    for config in settled(samples) if samples else ():
        try:
            error = answers.check(run_of(launching.prepare(calls[0], config)), calls[0], every=False)
        except TuningError as wrong:
            trials[config] = replace(trials[config], us=None, failure=str(wrong))
            continue
        winner, trials[config] = config, replace(trials[config], error=error)
        break
    for config, trial in trials.items():
        keep(FAMILIES[problem.op][config.family].digest, trial)
    return winner


def _compile(call: Call, configs: list[Config], device: Device, gpu: int) -> None:
    """Put all kernels into Triton's cache: once one is missing, the rest are compiled in parallel."""
    for index, config in enumerate(configs):
        # A config that does not compile is reported by the race.
        at = asking(call.problem.label, str(config))
        with at, compiles_heard() as seconds, contextlib.suppress(TuningError):
            launching.prepare(call, config)
        if seconds:
            with borrowed(gpu) as shop:
                rest = configs[index + 1 :]
                wait([shop.submit(compile_at, each, [call.problem], device) for each in rest])
            return
