"""Time launches on the GPU.

A CUDA graph, or a queue in a stream, runs a launch over copies of its operands that exceed the L2 cache three
times, so each run finds a cold cache. A neutral kernel runs ahead of each launch, as other kernels do in a
program: the start of a launch is then not hidden behind the end of one of its own kind. The neutral kernels
are timed alone too, and their time is subtracted.
"""

import contextlib
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton.testing

from tritile.core.config import Config
from tritile.errors import TuningError

K = TypeVar("K")
Run = Callable[[Any], object]  # launches a config on one copy of a call
_WARMUP_MS, _REPEAT_MS = 5, 25  # of `do_bench`
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 40  # of a race
_HOPELESS = 3.0  # times as slow as the fastest, beyond which one replay is enough
_MAX_COPIES = 400
_TIED = 1.01  # times as slow as the fastest, up to which noise may explain a difference
# Least number and seconds of replays of neutral kernels: the first raise the clocks of an idle GPU, and a
# busy host may slow down all of them for some 10 ms.
_REPLAYS, _REPLAYS_S = 60, 0.02


def do_bench(call: Callable[[], object], quantiles: Sequence[float] = (0.5, 0.2, 0.8)) -> list[float]:
    """Return milliseconds of one `call` on the GPU at these quantiles, the L2 cache flushed before each.

    `tritile.autotune` times by this in the calling process, where it is given no `do_bench`.
    """
    times = triton.testing.do_bench(call, warmup=_WARMUP_MS, rep=_REPEAT_MS, quantiles=list(quantiles))
    return list(times) if isinstance(times, list | tuple) else [times]


class Timing(NamedTuple):
    """A launch's median microseconds, and its spread: the 20th to 80th percentile over the median."""

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


@functools.cache
def _idle(device: int) -> torch.Tensor:
    """Return the tensor that the neutral kernel works on."""
    with torch.inference_mode(False):  # else it could be written in inference mode alone
        return torch.zeros(1, device=f"cuda:{device}", dtype=torch.float32).add_(1)  # loads the kernel


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


class Eager:
    """Time launches on several calls, one after the other, as often as one likes, without a graph or a wait.

    `before` runs ahead of them, and is not timed.
    """

    def __init__(self, run: Run, calls: Sequence[Any], before: Callable[[], object] = lambda: None) -> None:
        self.launches = len(calls)
        self._run, self._calls, self._before = run, calls, before
        self._load()

    def _load(self) -> None:
        """Set up, untimed."""

    def time_us(self) -> float:
        """Return microseconds of a launch, the mean over all calls.

        Raises TuningError for a time that no launch takes: a broken clock, or less than the neutral kernels.
        """
        between = self._between_us()
        us = (self._all_us() - between) / self.launches
        if not 0 < us < math.inf:
            raise TuningError(f"it was timed at {us:g} us")
        return us

    def _all_us(self) -> float:
        self._before()
        return _elapsed_us(lambda: [self._run(call) for call in self._calls])

    def _between_us(self) -> float:
        return 0.0


def _elapsed_us(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(1e3 * start.elapsed_time(end))


@functools.cache
def _neutral_us(kind: type[Eager], device: int, count: int) -> float:
    """Return the least of many times of neutral kernels, as others may use the host and the GPU too."""
    alone = kind(lambda call: None, range(count))
    until, times = time.monotonic() + _REPLAYS_S, [alone._all_us()]
    while len(times) < _REPLAYS or time.monotonic() < until:
        times.append(alone._all_us())
    return min(times)


class Graph(Eager):
    """Time a launch in a CUDA graph that runs it on several calls."""

    def _load(self) -> None:
        stream = _side(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(self._calls[0])  # loads modules and makes workspaces, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        device = torch.cuda.current_device()
        neutral, graph = _idle(device), torch.cuda.CUDAGraph()
        stream, pool, collects = _side(device), _kept(device).pool(), gc.isenabled()
        stream.wait_stream(torch.cuda.current_stream())
        gc.disable()  # `torch.cuda.graph` collects instead, which takes a large program a tenth of a second
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads go on
                try:
                    for call in self._calls:
                        neutral.add_(1)
                        self._run(call)
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

    def _all_us(self) -> float:
        self._before()
        return _elapsed_us(self._graph.replay)

    def _between_us(self) -> float:
        return _neutral_us(Graph, torch.cuda.current_device(), self.launches)


def graph_of(run: Run, calls: Sequence[Any], before: Callable[[], object] = lambda: None) -> Eager:
    """Return a Graph; a plain timer where the launch cannot be captured."""
    before()
    try:
        return Graph(run, calls, before)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()  # raises again where the GPU, not the capture, is at fault
        return Eager(run, calls, before)


def screen_us(timer: Eager, fastest_us: float = math.inf) -> Timing:
    """Time a few replays, fewer of long ones, and one where it is hopelessly behind the fastest."""
    first = timer.time_us()
    if first > _HOPELESS * fastest_us:
        return Timing(first, 0.0)
    repeats = 2 if first * timer.launches > 20_000 else 4
    return timing_of([timer.time_us() for _ in range(repeats)])


def in_turns(timers: Mapping[K, Eager], rounds: int) -> dict[K, list[float]]:
    """Return each timer's microseconds, in turns A B A B ..., so that clocks and heat affect all alike."""
    samples: dict[K, list[float]] = {key: [] for key in timers}
    for _ in range(rounds):
        for key, timer in timers.items():
            samples[key].append(timer.time_us())
    return samples


def interleaved(timers: Sequence[Eager], budget_ms: float = 60.0) -> list[list[float]]:
    """Time in turns, as many rounds as fit the budget by a first one, which is dropped."""
    once_ms = sum(timer.time_us() * timer.launches for timer in timers) / 1e3
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(budget_ms / max(once_ms, 1e-3))))
    return list(in_turns(dict(enumerate(timers)), rounds).values())


def slower(a: Sequence[float], b: Sequence[float]) -> bool:
    """True if b is slower than a by over two standard errors, of times that were taken in turns."""
    ratios = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    if len(ratios) < 2:
        return ratios[0] > 0
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.median(ratios) > 2 * error


def rank_raced(samples: Mapping[Config, Sequence[float]], incumbent: Config | None = None) -> list[Config]:
    """Order raced configs, the best first; `samples` are times that were taken in turns.

    The incumbent stays first unless another config is faster beyond the noise. Ties with the fastest break by
    the config's key, so that a repeated race chooses the same.
    """
    middle = {config: statistics.median(times) for config, times in samples.items()}
    order = sorted(samples, key=lambda config: (middle[config], config.key))
    fastest = order[0]
    near = [config for config in order if middle[config] <= _TIED * middle[fastest]]
    tied = [config for config in near if not slower(samples[fastest], samples[config])]
    first = min(tied, key=lambda config: config.key)
    if incumbent is not None and incumbent in samples and not slower(samples[fastest], samples[incumbent]):
        first = incumbent
    return [first, *(config for config in order if config != first)]
