"""Measuring a problem at its first call in mode "tune"."""

import contextlib
import threading
from dataclasses import replace
from typing import Final

import torch

from tritile.core import settings
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem, Tiled
from tritile.core.threads import at_fork
from tritile.core.views import Call
from tritile.errors import TuningError
from tritile.families.registry import FAMILIES
from tritile.planning import plans
from tritile.planning.portfolio import RACED
from tritile.planning.store import store_of
from tritile.planning.trial import AS_TORCH, TORCH, Trial
from tritile.runtime import launch
from tritile.runtime.compiles import compiles_heard
from tritile.tune.calibrate.sweep import compile_at, flusher, launches, raced, timed_again
from tritile.tune.measure.log import keeper
from tritile.tune.measure.settling import settled
from tritile.tune.measure.tasks import now
from tritile.tune.measure.timing import Queued, timing_of
from tritile.tune.measure.workshop import borrowed
from tritile.tune.subject import answers, searched_now, torch_calls
from tritile.tune.subject.elements import torch_fp32
from tritile.tune.subject.operands import copies_of, run_of

_racing: Final = threading.RLock()
at_fork(_racing)


def tuned_now(problem: Tiled, device: Device, gpu: int) -> Config:
    """Return the fastest config of a problem: of the likeliest of its class's portfolio, else by a search.

    Trials are remembered. Raises TuningError, with the reasons, where no config works.
    """
    likely, fastest = plans.likely(problem, device, RACED), None
    if likely:
        # One race at a time, with random numbers that the program's own do not feel.
        with _racing, torch.cuda.device(gpu), torch.random.fork_rng([gpu]):
            try:
                fastest = _fastest(problem, likely, device, gpu)
            except (TuningError, RuntimeError):  # no memory: the search makes do with less, elsewhere
                fastest = None
            torch.cuda.empty_cache()
    found = fastest or searched_now(problem, device, gpu)
    if isinstance(problem, MatmulProblem | PermuteProblem):
        with (
            _racing,
            torch.cuda.device(gpu),
            torch.random.fork_rng([gpu]),
            contextlib.suppress(TuningError, RuntimeError),
        ):
            _beside_torch(problem, device)
    return found


def _fastest(problem: Tiled, likely: list[Config], device: Device, gpu: int) -> Config | None:
    """Time configs side by side in this process; None where none is right."""
    keep, known = keeper(store_of(device)), FAMILIES[problem.op]
    calls = copies_of(problem, device, launches(problem))
    _compile(calls[0], likely, device, gpu)
    samples = raced(calls, likely, flusher(device), Queued)
    trials = {}
    for config, times in samples.items():
        timing = timing_of(times)
        trials[config] = Trial(problem, config, timing.us, timing.spread, measured_utc=now())
    winner = None
    for config in settled(samples) if samples else ():
        try:
            error = answers.check(run_of(launch.prepare(calls[0], config)), calls[0], every=False)
        except TuningError as wrong:
            trials[config] = replace(trials[config], us=None, failure=str(wrong))
            continue
        winner, trials[config] = config, replace(trials[config], error=error)
        break
    for config, trial in trials.items():
        keep(known[config.family].digest, trial)
    return winner


def _beside_torch(problem: MatmulProblem | PermuteProblem, device: Device) -> None:
    """Time torch on the same problem, and remember it. Raises RuntimeError where torch does not offer it."""
    run = torch_calls.run_of(problem)
    if run is None:
        return
    calls = copies_of(problem, device, launches(problem))
    setting = "tf32" if getattr(problem, "precision", "") == "tf32" else "ieee"
    with settings.torch_alone(), torch_fp32(setting):
        timing = timing_of(timed_again(Queued(run, calls, flusher(device))))
    keeper(store_of(device))(TORCH, Trial(problem, AS_TORCH, timing.us, timing.spread, measured_utc=now()))


def _compile(call: Call, configs: list[Config], device: Device, gpu: int) -> None:
    """Have all kernels in Triton's cache: once one was missing, the rest are compiled in parallel."""
    for place, config in enumerate(configs):
        with compiles_heard() as seconds, contextlib.suppress(TuningError):  # it is met again, and told
            launch.prepare(call, config)
        if seconds:
            with borrowed(gpu) as shop:
                rest = [shop.pool.submit(compile_at, c, [call.problem], device) for c in configs[place + 1 :]]
                for future in rest:
                    future.exception()
            return
