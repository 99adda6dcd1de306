"""Run a ladder on a GPU: tune, check and time its steps side by side."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import torch

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.settings import mode
from tritile.errors import InvalidValueError, brief
from tritile.lab.ladder.launching import failed, planned, reading_of, run_compiled
from tritile.lab.ladder.matrices import Matrices, error_of, matrices
from tritile.lab.ladder.reading import Reading
from tritile.lab.ladder.steps import Kernel, Step
from tritile.tune.autotuner import autotune
from tritile.tune.measure.timing import Run, Timed, Timing, copies_wanted, graph_of, interleaved, timing_of

DEFAULT_N: Final = 8192
LARGEST: Final = 46340  # n * n, an offset, has 31 bits
_SLOW_US: Final = 2e5  # slower steps are timed alone, a few times
_SLOWEST_US: Final = 2e6  # slower steps are timed once
_BUDGET_MS: Final = 60.0  # for timing each step that is not slow
_Found = tuple[Reading, Timing | Timed | None]  # a step's reading; its time, or the graph to time


def _copies(n: int, device: Device) -> int:
    return copies_wanted(3 * n * n * 2, device.l2_bytes)


def check_size(n: int, device: Device) -> None:
    """Raise InvalidValueError where offsets need over 32 bits or memory cannot hold the matrices."""
    if not 1 <= n <= LARGEST:
        raise InvalidValueError(f"n = {n}: wanted 1 to {LARGEST:,}, where offsets have 32 bits")
    free = torch.cuda.mem_get_info()[0]
    # Copies that fill the L2 cache three times (fp32 takes 12 bytes where copies are counted at 6), a call in
    # fp32, an operand in float64 to check the answer, and what tuning and torch keep.
    cold, each = 6 * device.l2_bytes, 36
    wanted = cold + each * n * n
    if wanted > free:
        raise InvalidValueError(
            f"n = {n} takes {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device.name}: "
            f"wanted at most {math.isqrt(max(0, free - cold) // each):,}"
        )


def _chosen(step: Step, given: Matrices, device: Device) -> Config | None:
    """Return the config that a step runs with: of several, the fastest by `tritile.autotune`."""
    n, kernel = given[0].shape[0], step.runs
    if not isinstance(kernel, Kernel) or len(kernel.configs) == 1:
        return planned(step, n, device)
    tuner = autotune([config.to_triton() for config in kernel.configs], key=["n"])(kernel.jitted)
    grid, processors = kernel.grid, device.processors  # all that the measuring process is sent
    with mode("tune"):
        tuner[lambda values: grid(n, values, processors)](*given, n)
    return Config.from_triton(tuner.best_config)


def _once_us(run: Run, given: Matrices) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(given)
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def _checked(step: Step, calls: Sequence[Matrices], device: Device) -> _Found:
    """Run a step and check its answer; return its reading, with its time if slow, else a graph to time.

    Raises whatever the step raises.
    """
    config = _chosen(step, calls[0], device)
    reading = reading_of(step, calls[0][0].shape[0], config, device)

    def run(given: Matrices) -> None:
        run_compiled(step, given, config, device.processors)

    calls[0][-1].fill_(math.nan)
    run(calls[0])
    torch.cuda.synchronize()
    if step.checked:
        reading = replace(reading, error=error_of(step.op, calls[0]))
    us = _once_us(run, calls[0])
    if us < _SLOW_US:
        return reading, graph_of(run, calls)
    more = 0 if us > _SLOWEST_US else 4
    return reading, timing_of([us, *(_once_us(run, calls[0]) for _ in range(more))])


def _lost(since: str) -> str | None:
    """Return a note if the GPU is lost: after some errors every later call of this process raises."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return f"the GPU no longer answers since {since}"
    return None


def _timed(found: Sequence[_Found], lost: str | None) -> tuple[list[Reading], str | None]:
    """Time the graphs by turns; return the readings with times, and `lost`, a note if the GPU is lost."""
    graphs = {i: timed for i, (_, timed) in enumerate(found) if timed and not isinstance(timed, Timing)}
    timings = {i: timing for i, (_, timing) in enumerate(found) if isinstance(timing, Timing)}
    why = lost
    if graphs and not lost:
        try:
            samples = interleaved(list(graphs.values()), _BUDGET_MS * len(graphs))
            timings |= {i: timing_of(times) for i, times in zip(graphs, samples, strict=True)}
        except Exception as error:
            names = " and ".join(found[i][0].name for i in graphs)
            why, lost = brief(error), _lost(f"steps {names} were timed side by side")
    readings = [reading for reading, _ in found]
    for i, timing in timings.items():
        readings[i] = replace(readings[i], us=timing.us, spread=timing.spread)
    for i in graphs.keys() - timings.keys():
        readings[i] = failed(readings[i], why or "not timed")
    return readings, lost


def timed_climb(steps: Iterable[Step], n: int, device: Device, done: Callable[[str], None]) -> list[Reading]:
    """Check and time every step on the current GPU, those of one dtype side by side.

    `done` is called with each step's name. A step that fails has the reason in its note; so have all later
    ones if it leaves the GPU unusable. Raises InvalidValueError for an n that is too large.
    """
    check_size(n, device)
    readings: list[Reading] = []
    lost: str | None = None
    for (op, dtype), together in itertools.groupby(steps, key=lambda step: (step.op, step.dtype)):
        group, calls, found, why = list(together), list[Matrices](), list[_Found](), lost
        if not lost:
            try:
                calls += (matrices(op, n, dtype, "cuda", seed) for seed in range(_copies(n, device)))
            except Exception as error:  # other processes may use the memory
                why, lost = brief(error), _lost(f"step {group[0].name}")
        for step in group:
            try:
                if step.unfit(device, n):
                    found.append((reading_of(step, n, planned(step, n, device), device), None))
                elif why:
                    found.append((failed(reading_of(step, n, None, device), why), None))
                else:
                    found.append(_checked(step, calls, device))
            except Exception as error:  # a step that raises costs itself alone
                found.append((failed(reading_of(step, n, None, device), brief(error)), None))
                lost = _lost(f"step {step.name}")
                why = why or lost
            done(step.name)
        timed, lost = _timed(found, lost)
        readings += timed
        del calls, found
        if not lost:
            torch.cuda.empty_cache()
    return readings
