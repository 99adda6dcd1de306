"""Climbing on a GPU: rungs are tuned, checked and timed side by side."""

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
from tritile.lab.rungs.climb import Kernel, Rung
from tritile.lab.rungs.launching import described, failed, planned, run_compiled
from tritile.lab.rungs.matrices import Matrices, error_of, matrices
from tritile.lab.rungs.reading import Reading
from tritile.tune.autotuner import autotune
from tritile.tune.measure.timing import Run, Timed, Timing, copies_wanted, graph_of, interleaved, timing_of

DEFAULT_N: Final = 8192
LARGEST: Final = 46340  # of which n * n, an offset, has 31 bits
_SLOW_US: Final = 2e5  # from which on launches are timed alone, a few times
_SLOWEST_US: Final = 2e6  # from which on one is enough
_BUDGET_MS: Final = 60.0  # of timing, for each rung that is not slow
_Found = tuple[Reading, Timing | Timed | None]  # of a rung: and its time, or what can be timed


def _copies(n: int, device: Device) -> int:
    return copies_wanted(3 * n * n * 2, device.l2_bytes)


def check_size(n: int, device: Device) -> None:
    """Raises InvalidValueError for an n whose offsets have over 32 bits, or that memory does not hold."""
    if not 1 <= n <= LARGEST:
        raise InvalidValueError(f"n = {n}: wanted 1 to {LARGEST:,}, where offsets have 32 bits")
    free = torch.cuda.mem_get_info()[0]
    # What fills the L2 cache three times, at 12 bytes where copies are counted at 6; a call in fp32, an
    # operand in float64 as its answer is checked, and what tuning and torch keep.
    cold, each = 6 * device.l2_bytes, 36
    wanted = cold + each * n * n
    if wanted > free:
        raise InvalidValueError(
            f"n = {n} takes {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device.name}: "
            f"wanted at most {math.isqrt(max(0, free - cold) // each):,}"
        )


def _chosen(rung: Rung, given: Matrices, device: Device) -> Config | None:
    """The config that a rung runs with: of several, the fastest by `tritile.autotune`."""
    n, kernel = given[0].shape[0], rung.runs
    if not isinstance(kernel, Kernel) or len(kernel.configs) == 1:
        return planned(rung, n, device)
    tuner = autotune([config.to_triton() for config in kernel.configs], key=["n"])(kernel.jitted)
    grid, processors = kernel.grid, device.processors  # what goes to another process with the call
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


def _checked(rung: Rung, calls: Sequence[Matrices], device: Device) -> _Found:
    """What is known of a rung, its answer checked; and its time where it is slow, else what can be timed.

    Raises whatever it raises.
    """
    config = _chosen(rung, calls[0], device)
    reading = described(rung, calls[0][0].shape[0], config, device)

    def run(given: Matrices) -> None:
        run_compiled(rung, given, config, device.processors)

    calls[0][-1].fill_(math.nan)
    run(calls[0])
    torch.cuda.synchronize()
    if rung.checked:
        reading = replace(reading, error=error_of(rung.op, calls[0]))
    us = _once_us(run, calls[0])
    if us < _SLOW_US:
        return reading, graph_of(run, calls)
    more = 0 if us > _SLOWEST_US else 4
    return reading, timing_of([us, *(_once_us(run, calls[0]) for _ in range(more))])


def _lost(since: str) -> str | None:
    """What to say where the GPU is lost: some errors make every later call of this process raise."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return f"the GPU no longer answers since {since}"
    return None


def _timed(found: Sequence[_Found], lost: str | None) -> tuple[list[Reading], str | None]:
    """The readings with times: those that can be timed again take turns. And `lost`, where the GPU is."""
    graphs = {i: timed for i, (_, timed) in enumerate(found) if timed and not isinstance(timed, Timing)}
    timings = {i: timing for i, (_, timing) in enumerate(found) if isinstance(timing, Timing)}
    why = lost
    if graphs and not lost:
        try:
            samples = interleaved(list(graphs.values()), _BUDGET_MS * len(graphs))
            timings |= {i: timing_of(times) for i, times in zip(graphs, samples, strict=True)}
        except Exception as error:
            names = " and ".join(found[i][0].name for i in graphs)
            why, lost = brief(error), _lost(f"rungs {names} were timed side by side")
    readings = [reading for reading, _ in found]
    for i, timing in timings.items():
        readings[i] = replace(readings[i], us=timing.us, spread=timing.spread)
    for i in graphs.keys() - timings.keys():
        readings[i] = failed(readings[i], why or "not timed")
    return readings, lost


def timed_climb(rungs: Iterable[Rung], n: int, device: Device, done: Callable[[str], None]) -> list[Reading]:
    """Check and time every rung on the current GPU, those of one dtype side by side; `done` hears of each.

    A rung that fails has its reason in its note; from one that leaves the GPU unusable on, all do.
    Raises InvalidValueError for an n that is too large.
    """
    check_size(n, device)
    readings: list[Reading] = []
    lost: str | None = None
    for (op, dtype), together in itertools.groupby(rungs, key=lambda rung: (rung.op, rung.dtype)):
        group, calls, found, why = list(together), list[Matrices](), list[_Found](), lost
        if not lost:
            try:
                calls += (matrices(op, n, dtype, "cuda", seed) for seed in range(_copies(n, device)))
            except Exception as error:  # memory may be short, by what others take
                why, lost = brief(error), _lost(f"rung {group[0].name}")
        for rung in group:
            try:
                if rung.unfit(device, n):
                    found.append((described(rung, n, planned(rung, n, device), device), None))
                elif why:
                    found.append((failed(described(rung, n, None, device), why), None))
                else:
                    found.append(_checked(rung, calls, device))
            except Exception as error:  # what one rung raises is not the others'
                found.append((failed(described(rung, n, None, device), brief(error)), None))
                lost = _lost(f"rung {rung.name}")
                why = why or lost
            done(rung.name)
        timed, lost = _timed(found, lost)
        readings += timed
        del calls, found
        if not lost:
            torch.cuda.empty_cache()
    return readings
