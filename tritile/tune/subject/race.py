"""Time configs of one of tritile's own problems, and torch's kernel, in turns on the same operands."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from tritile.core.call import Call
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import TuningError, brief
from tritile.families import launching
from tritile.planning import aten
from tritile.tune.subject import torch_calls
from tritile.tune.subject.operands import copies_of, run_of
from tritile.tuner.measure.timing import Graph, Run, in_turns

_ROUNDS: Final = 4  # how often a config near the fastest is timed again
_BEHIND: Final = 1.3  # times the fastest in a first round, up to which a config is timed again
_GRAPH_US: Final = 250.0  # the least time of all launches in a graph
_LAUNCHES: Final = 40  # the most launches in a graph
_FLUSHED: Final = 3  # times the size of the L2 cache, read between replays


def calls_of(problem: Tiled, device: Device) -> list[Call]:
    """Return as many calls of a problem as fill a graph, so that starting it hardly counts."""
    guess = problem.bytes / 3e6 + getattr(problem, "flops", 0) / 6e8 + 4  # microseconds
    count = max(1 if guess > 2 * _GRAPH_US else 2, min(_LAUNCHES, round(_GRAPH_US / guess)))
    return copies_of(problem, device, count)


def flusher(device: Device) -> Callable[[], object]:
    """Return a function that fills the L2 cache with memory that needs no writing back."""
    memory = torch.ones(_FLUSHED * device.l2_bytes // 4, dtype=torch.float32, device="cuda")
    return memory.sum


def _run(problem: Tiled, call: Call, config: Config) -> Run:
    if config != aten.CONFIG:
        return run_of(launching.prepare(call, config))
    run = torch_calls.run_of(problem)
    if run is None:
        raise TuningError("torch has no single call for it")
    return run


def raced(
    problem: Tiled,
    calls: Sequence[Call],
    configs: Iterable[Config],
    flush: Callable[[], object],
    failed: Callable[[Config, str], object] = lambda config, why: None,
) -> dict[Config, list[float]]:
    """Return microseconds of configs, and of torch for `aten.CONFIG`, on the same calls of a problem.

    Those near the fastest config are timed several times, in turns, and so is torch. What does not run is
    reported to `failed`, and left out. `flush` empties the L2 cache.
    """
    timers: dict[Config, Graph] = {}
    first: dict[Config, float] = {}
    for config in configs:
        try:
            timers[config] = Graph(_run(problem, calls[0], config), calls, flush)
            # A graph's first replay uploads it: the second counts, unless the host held that up for longer.
            first[config] = min(timers[config].time_us(), timers[config].time_us())
        except (TuningError, RuntimeError) as error:  # torch multiplies no int8 of 16 rows and fewer
            failed(config, brief(error))
    limit = _BEHIND * min((us for config, us in first.items() if config != aten.CONFIG), default=math.inf)
    near = {config: timers[config] for config, us in first.items() if us <= limit or config == aten.CONFIG}
    again = in_turns(near, _ROUNDS)
    return {config: [us, *again.get(config, ())] for config, us in first.items()}
