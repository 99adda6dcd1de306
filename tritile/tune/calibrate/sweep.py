"""Time many configs at many sizes, in one process, with kernels that were compiled ahead.

At each size the configs predicted to come near the fastest are timed. The sweep learns as it goes how far
predictions are off for each kind of config.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch

from tritile.choose import aten, waves
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import TuningError, brief
from tritile.families import launching
from tritile.families.launching import compiled_for
from tritile.families.space import unbanded, worthwhile
from tritile.tune.subject import torch_calls
from tritile.tune.subject.answers import torch_fp32
from tritile.tune.subject.operands import copies_of, run_of
from tritile.tuner.measure.timing import Graph, in_turns
from tritile.tuner.measure.workers import WorkerPool

_WITHIN: Final = 2.0  # predicted slowdown up to which a config is timed
_LEARNT: Final = 0.1  # weight of a new size in the mean error of a kind's predictions
_ROUNDS: Final = 4  # how often a config near the fastest is timed again
_BEHIND: Final = 1.3  # slowdown in a first round up to which a config is timed again
_GRAPH_US: Final = 250.0  # least time of all launches in a graph
_LAUNCHES: Final = 40  # most launches in a graph
_FLUSHED: Final = 3  # times the size of the L2 cache that are read between replays

Times = dict[Config, float]
Log = Callable[[str], None]


def banded(config: Config) -> Config:
    """Return a product's config with GROUP_M=8; with a single row of tiles it makes no difference."""
    if "BLOCK_K" not in dict(config.kwargs):
        return config
    return replace(config, kwargs=tuple((name, 8 if name == "GROUP_M" else v) for name, v in config.kwargs))


def kind_of(config: Config) -> tuple[Any, ...]:
    """Return the kind of a config, within which prediction errors are alike; PERSISTENT comes last."""
    kwargs: dict[str, Any] = dict(config.kwargs)
    flags = (kwargs.get(name, False) for name in ("SPLIT_TAIL", "PAIR", "PERSISTENT"))
    return config.family, kwargs.get("SPLIT_K", 1) > 1, *flags


def useful(configs: Iterable[Config], problem: Tiled, device: Device) -> list[Config]:
    """Return the configs that are legal for a problem and not dominated, in either order of tiles."""
    return [config for config in configs if worthwhile((config, unbanded(config)), problem, device)]


class Chooser:
    """Chooses the configs worth timing at a size, and learns from the times."""

    def __init__(self, configs: Sequence[Config], device: Device) -> None:
        self._configs, self._device = configs, device
        self._off: dict[Any, float] = {}  # logarithm of measured over predicted time, by kind
        self._times: dict[Tiled, Times] = {}

    def _predicted(self, problem: Tiled) -> Times:
        if problem not in self._times:
            own = useful(self._configs, problem, self._device)
            self._times[problem] = {c: waves.predict_us(c, problem, self._device) for c in own}
        return self._times[problem]

    def choose(self, problem: Tiled) -> list[Config]:
        """Return the configs to time: those predicted to come near the fastest."""
        predicted = self._predicted(problem).items()
        times = {config: us * math.exp(self._off.get(kind_of(config), 0.0)) for config, us in predicted}
        limit = _WITHIN * min(times.values(), default=0.0)
        return [config for config, us in times.items() if us <= limit]

    def learn(self, problem: Tiled, times: Times) -> None:
        predicted = self._predicted(problem)
        kinds: dict[Any, list[float]] = {}
        for config, us in times.items():
            kinds.setdefault(kind_of(config), []).append(math.log(us / predicted[config]))
        for kind, logs in kinds.items():
            mean, before = statistics.fmean(logs), self._off.get(kind)
            self._off[kind] = mean if before is None else before + _LEARNT * (mean - before)


def compile_at(config: Config, problems: Sequence[Tiled], device: Device) -> None:
    """Compile what a config launches at these sizes. Raises TuningError if the compiler refuses it."""
    for problem in problems:
        compiled_for(problem, config, device)


def compile_all(sizes: dict[Config, list[Tiled]], device: Device, log: Log) -> set[Config]:
    """Compile configs at sizes in parallel; return the configs that the compiler refused."""
    refused, longest_first = set(), sorted(sizes.items(), key=lambda item: -len(item[1]))
    with WorkerPool() as pool:
        futures = {pool.submit(compile_at, config, at, device): config for config, at in longest_first}
        for future in as_completed(futures):
            if error := future.exception():
                log(f"{futures[future]}: {error}")
                refused.add(futures[future])
    return refused


class Row(NamedTuple):
    """Microseconds at a size, of the configs near the fastest and of torch."""

    problem: Tiled
    times: Times
    torch_us: float | None = None


def flusher(device: Device) -> Callable[[], object]:
    """Return a function that fills the L2 cache with clean lines."""
    memory = torch.ones(_FLUSHED * device.l2_bytes // 4, dtype=torch.float32, device="cuda")
    return memory.sum


def timed(
    problem: Tiled, configs: Sequence[Config], device: Device, flush: Callable[[], object], log: Log
) -> Row:
    """Time the configs that run, and torch, on the same calls; `flush` empties the L2 cache.

    torch and the configs near the fastest are timed several times, interleaved. Failures are logged.
    """
    guess = problem.bytes / 3e6 + getattr(problem, "flops", 0) / 6e8 + 4  # microseconds
    count = max(1 if guess > 2 * _GRAPH_US else 2, min(_LAUNCHES, round(_GRAPH_US / guess)))
    calls = copies_of(problem, device, count)  # enough that the start of a graph hardly counts
    by_torch = torch_calls.run_of(problem) if problem.op in torch_calls.RUNS else None
    timers: dict[Config, Graph] = {}
    first: Times = {}
    with torch_fp32():
        for config in [*configs, *[aten.CONFIG] * (by_torch is not None)]:
            try:
                run = by_torch if config == aten.CONFIG else run_of(launching.prepare(calls[0], config))
                assert run is not None
                timers[config] = Graph(run, calls, flush)
                # A graph's first replay uploads it, so the second is faster unless the host delayed it.
                first[config] = min(timers[config].time_us(), timers[config].time_us())
            except (TuningError, RuntimeError) as error:  # torch multiplies no int8 of 16 rows and fewer
                log(f"{problem.label}: {config}: {brief(error)}")
        limit = _BEHIND * min((us for config, us in first.items() if config != aten.CONFIG), default=math.inf)
        near = {c: timers[c] for c, us in first.items() if us <= limit or c == aten.CONFIG}
        again = in_turns(near, _ROUNDS)
    times = {config: statistics.median([us, *again.get(config, ())]) for config, us in first.items()}
    torch_us = times.pop(aten.CONFIG, None)
    return Row(problem, times, torch_us)


def ready(problems: Sequence[Tiled], configs: Sequence[Config], device: Device, log: Log) -> Chooser:
    """Compile all that a sweep of these sizes launches; return a chooser of the configs that compiled."""
    chooser = Chooser(configs, device)
    sizes: dict[Config, list[Tiled]] = {}
    for problem in problems:
        for config in chooser.choose(problem):
            sizes.setdefault(config, []).append(problem)
    compiled = sizes.keys() - compile_all(sizes, device, log)
    return Chooser([config for config in configs if config in compiled], device)


def sweep(problems: Sequence[Tiled], chooser: Chooser, device: Device, log: Log) -> Iterator[Row]:
    """Yield the times at each size."""
    flush = flusher(device)
    for problem in problems:
        row = timed(problem, chooser.choose(problem), device, flush, log)
        if row.times:
            chooser.learn(problem, row.times)
            yield row
