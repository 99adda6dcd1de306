"""Time launches on the GPU.

A CUDA graph runs a launch over copies of its operands that exceed the L2 cache three times, so each run finds
a cold cache. A neutral kernel runs ahead of each launch, as other kernels do in a program: the start of a
launch is then not hidden behind the end of one of its own kind. A graph of the neutral kernel alone is timed
too, and its time subtracted.
"""

import contextlib
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.testing

from tritile.core.config import Config
from tritile.core.of_torch import wait_on_gpu
from tritile.errors import TuningError

Run = Callable[[Any], object]  # launches a config on one copy of a call
_WARMUP_MS, _REPEAT_MS = 5, 25  # of `do_bench`
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 40  # of a race
_HOPELESS = 3.0  # times as slow as the fastest, beyond which a first look is enough
_MAX_COPIES = 400
_WAITS = tuple(500_000 << i for i in range(8))  # cycles that the GPU waits while launches are enqueued
_TIED = 1.01  # times as slow as the fastest, up to which noise may explain a difference
_REPLAYS = 60  # of neutral kernels, and for how long at least: the first of them raise the clocks of an idle
_REPLAYS_S = 0.02  # GPU, and a busy host may slow all of them for some 10 ms


def do_bench(call: Callable[[], object], quantiles: Sequence[float] = (0.5, 0.2, 0.8)) -> list[float]:
    """Return milliseconds of one `call` on the GPU at these quantiles, the L2 cache flushed before each.

    `tritile.autotune` times by this in the calling process, where it is given no `do_bench`.
    """
    times = triton.testing.do_bench(call, warmup=_WARMUP_MS, rep=_REPEAT_MS, quantiles=list(quantiles))
    return list(times) if isinstance(times, list | tuple) else [times]


class Timing(NamedTuple):
    """Hold a launch's median microseconds, and its spread: the 20th to 80th percentile over the median."""

    us: float
    spread: float


def timing_of(samples: Sequence[float]) -> Timing:
    ordered = sorted(samples)
    low, high = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
    median = statistics.median(ordered)
    return Timing(median, (high - low) / median)


def copies_wanted(bytes_each: int, l2_bytes: int) -> int:
    """Return how many copies of operands exceed the L2 cache three times; 400 at most."""
    return min(_MAX_COPIES, max(1, math.ceil(3 * l2_bytes / max(1, bytes_each))))


def _replayed_us(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(1e3 * start.elapsed_time(end))


def _least_us(neutral: Callable[[], float]) -> float:
    """Return the least of many times of neutral kernels, as others may use the host and the GPU too."""
    until, times = time.monotonic() + _REPLAYS_S, [neutral()]
    while len(times) < _REPLAYS or time.monotonic() < until:
        times.append(neutral())
    return min(times)


def _nothing() -> None:
    """Do nothing before a run."""


@functools.cache
def _idle(device: int) -> torch.Tensor:
    """Return the tensor that the neutral kernel works on."""
    with torch.inference_mode(False):  # else it could be written in inference mode alone
        return torch.zeros(1, device=f"cuda:{device}").add_(1)  # loads the kernel


@functools.cache
def _side(device: int) -> torch.cuda.Stream:
    """Return the stream for captures on a GPU: one of high priority, which programs seldom use.

    Torch hands out its few streams in turn. Launches of another thread on this stream would be captured too.
    """
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _kept(device: int) -> torch.cuda.CUDAGraph:
    """Return a graph whose memory pool serves the workspaces of all others: one graph runs at a time.

    A pool lasts as long as one of its graphs.
    """
    neutral, graph = _idle(device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(_side(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        neutral.add_(1)
        graph.capture_end()
    return graph


def _captured(run: Run, calls: Sequence[Any]) -> torch.cuda.CUDAGraph:
    device = torch.cuda.current_device()
    neutral, graph = _idle(device), torch.cuda.CUDAGraph()
    stream, pool, collects = _side(device), _kept(device).pool(), gc.isenabled()
    stream.wait_stream(torch.cuda.current_stream())
    gc.disable()  # `torch.cuda.graph` collects instead, which takes a large program a tenth of a second
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads go on
            try:
                for call in calls:
                    neutral.add_(1)
                    run(call)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that failed
                    graph.capture_end()
                raise
            graph.capture_end()
    except BaseException:
        _kept.cache_clear()  # torch may hold its pool to be captured into still
        raise
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@functools.cache
def _between_us(device: int, count: int) -> float:
    graph = _captured(lambda call: None, range(count))
    return _least_us(lambda: _replayed_us(graph.replay))


def _net_us(us: float, between_us: float) -> float:
    """Subtract the time of the neutral kernels. Raises TuningError unless the difference is positive."""
    net = us - between_us
    if not 0 < net < math.inf:
        raise TuningError(f"it was timed at {net:g} us, less than the kernels between launches")
    return net


class Eager:
    """Time launches on several calls, one after the other, as often as one likes.

    `before` runs ahead of them, and is not timed.
    """

    def __init__(self, run: Run, calls: Sequence[Any], before: Callable[[], object] = _nothing) -> None:
        self.launches = len(calls)
        self._run, self._calls, self._before = run, calls, before

    def time_us(self) -> float:
        """Return microseconds of a launch, the mean over all calls, without a graph or a wait."""
        self._before()
        return _replayed_us(lambda: [self._run(call) for call in self._calls]) / self.launches


class Graph(Eager):
    """Time a launch in a CUDA graph that runs it on several calls."""

    def __init__(self, run: Run, calls: Sequence[Any], before: Callable[[], object] = _nothing) -> None:
        super().__init__(run, calls, before)
        stream = _side(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(calls[0])  # loads modules and makes workspaces, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = _captured(run, calls)
        self._between_us = _between_us(torch.cuda.current_device(), len(calls))

    def time_us(self) -> float:
        """Return microseconds of a launch, the mean over a replay. Raises TuningError unless positive."""
        self._before()
        return _net_us(_replayed_us(self._graph.replay), self._between_us) / self.launches


def _queued_us(launches: Callable[[], object], before: Callable[[], object] = _nothing) -> float:
    """Return microseconds of launches that wait on the GPU until the last is enqueued.

    `before` runs ahead of them, and is not timed.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for cycles in _WAITS:
        before()
        wait_on_gpu(cycles)
        start.record()
        launches()
        end.record()
        waited = not start.query()
        end.synchronize()
        if waited:
            return float(1e3 * start.elapsed_time(end))
    raise TuningError("launches took too long to enqueue to be timed")


def _enqueue(run: Run, calls: Sequence[Any]) -> None:
    """Launch each behind a neutral kernel and an event.

    The event keeps a launch from starting early: in a stream that would hide 1.3 us of each, a third of a
    short product's time, and in a graph hides a quarter of that.
    """
    neutral = _idle(torch.cuda.current_device())
    between = torch.cuda.Event(enable_timing=True)  # without a time to take it holds back nothing
    for call in calls:
        neutral.add_(1)
        between.record()
        run(call)


@functools.cache
def _queued_between_us(device: int, count: int) -> float:
    return _least_us(lambda: _queued_us(lambda: _enqueue(lambda call: None, range(count))))


class Queued(Eager):
    """Time launches in a stream; they wait on the GPU until the last is enqueued.

    Nothing is captured, as during a capture a program's other threads may not wait for the GPU.
    """

    def __init__(self, run: Run, calls: Sequence[Any], before: Callable[[], object] = _nothing) -> None:
        super().__init__(run, calls, before)
        run(calls[0])  # loads modules

    def time_us(self) -> float:
        """Return microseconds of a launch, the mean over all calls. Raises TuningError unless positive."""
        between = _queued_between_us(torch.cuda.current_device(), self.launches)
        us = _queued_us(lambda: _enqueue(self._run, self._calls), self._before)
        return _net_us(us, between) / self.launches


def graph_of(run: Run, calls: Sequence[Any], before: Callable[[], object] = _nothing) -> Eager:
    """Return a Graph; a plain timer where the launch cannot be captured."""
    before()
    try:
        return Graph(run, calls, before)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()  # raises again where the GPU, not the capture, is at fault
        return Eager(run, calls, before)


def _timed_us(graph: Eager) -> float:
    """Time a launch. Raises TuningError for a time that no launch takes, as a broken clock tells."""
    us = graph.time_us()
    if not 0 < us < math.inf:
        raise TuningError(f"it was timed at {us:g} us")
    return us


def screen_us(graph: Eager, fastest_us: float = math.inf) -> Timing:
    """Time a few replays, fewer of long ones, and one where it is hopelessly behind the fastest."""
    first = _timed_us(graph)
    if first > _HOPELESS * fastest_us:
        return Timing(first, 0.0)
    repeats = 2 if first * graph.launches > 20_000 else 4
    return timing_of([_timed_us(graph) for _ in range(repeats)])


def interleaved(graphs: Sequence[Eager], budget_ms: float = 60.0) -> list[list[float]]:
    """Return each graph's microseconds, in turns A B A B ..., so that clocks and heat affect all alike."""
    once_ms = sum(_timed_us(graph) * graph.launches for graph in graphs) / 1e3
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(budget_ms / max(once_ms, 1e-3))))
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, times in zip(graphs, samples, strict=True):
            times.append(_timed_us(graph))
    return samples


def slower(a: Sequence[float], b: Sequence[float]) -> bool:
    """True if b is slower than a by over two standard errors, of times that were taken in turns."""
    ratios = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    if len(ratios) < 2:
        return ratios[0] > 0
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.median(ratios) > 2 * error


def settled(samples: Mapping[Config, Sequence[float]], incumbent: Config | None = None) -> list[Config]:
    """Order raced configs, best first; `samples` are times that were taken in turns.

    The incumbent stays first unless another config is faster beyond the noise. Ties with the fastest break by
    the config's key, so that a repeated race chooses the same.
    """
    middle = {config: statistics.median(times) for config, times in samples.items()}
    order = sorted(samples, key=lambda config: (middle[config], config.key))
    fastest = order[0]
    tied = [
        config
        for config in order
        if middle[config] <= _TIED * middle[fastest] and not slower(samples[fastest], samples[config])
    ]
    first = min(tied, key=lambda config: config.key)
    if incumbent is not None and incumbent in samples and not slower(samples[fastest], samples[incumbent]):
        first = incumbent
    return [first, *(config for config in order if config != first)]
