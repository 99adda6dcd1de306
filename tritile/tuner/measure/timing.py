"""Time launches on the GPU.

A CUDA graph, or a stream where a launch cannot be captured, runs the launch over copies of its operands that
together are three times the size of the L2 cache, so every run finds a cold cache. A neutral kernel runs
ahead of each launch, as other kernels do in a program; back to back, the start of a launch would hide behind
the end of the one before. The neutral kernels are also timed by themselves, and their time is subtracted.
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
_LEAST_OF = 2  # times on a shared GPU
_FAR_BEHIND = 3.0  # slowdown beyond which one replay is enough
_MAX_COPIES = 400
_COPIES_ON_SHARED_GPU = 2  # few, to take little of the other program's time
_TIED = 1.01  # slowdown up to which noise may explain the difference
# Fewest replays of neutral kernels, and for at least so long: the first ones raise the clocks of an idle GPU,
# and a busy host may slow down all of them for some 10 ms.
_REPLAYS, _REPLAYS_S = 60, 0.02


def do_bench(call: Callable[[], object], quantiles: Sequence[float] = (0.5, 0.2, 0.8)) -> list[float]:
    """Return milliseconds of one `call` on the GPU at these quantiles, the L2 cache flushed before each.

    The default `do_bench` of `tritile.autotune` in the calling process.
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


def copies_for(bytes_each: int, l2_bytes: int, shares_gpu: bool = False) -> int:
    """Return how many copies of operands are three times the size of the L2 cache; 400 at most.

    `shares_gpu`: another program uses the GPU meanwhile.
    """
    most = _COPIES_ON_SHARED_GPU if shares_gpu else _MAX_COPIES
    return min(most, max(1, math.ceil(3 * l2_bytes / max(1, bytes_each))))


@functools.cache
def _idle(device: int) -> torch.Tensor:
    """Return the tensor that the neutral kernel updates."""
    with torch.inference_mode(False):  # else it could only be written in inference mode
        return torch.zeros(1, device=f"cuda:{device}", dtype=torch.float32).add_(1)  # loads the kernel


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for captures on a GPU, of high priority because programs seldom use those.

    torch hands out its few streams round robin, and another thread's launches on it would be captured too.
    """
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _pool_graph(device: int) -> torch.cuda.CUDAGraph:
    """Return a graph that keeps a memory pool alive. All graphs share the pool, as one runs at a time."""
    neutral, graph = _idle(device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(_capture_stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        neutral.add_(1)
        graph.capture_end()
    return graph


class Eager:
    """Times launches on several calls, queued one after the other without a graph.

    `before` runs ahead of them and is not timed.
    """

    def __init__(self, run: Run, calls: Sequence[Any], before: Callable[[], object] = lambda: None) -> None:
        self.launches = len(calls)
        self._run, self._calls, self._before = run, calls, before
        self._load()

    def _load(self) -> None:
        """Set up, untimed."""

    def time_us(self) -> float:
        """Return microseconds of a launch, the mean over all calls.

        Raises TuningError for an impossible time: not finite, or no more than the neutral kernels take.
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
    """Return the least of many times of the neutral kernels, as others may use the host and GPU too."""
    neutral = kind(lambda call: None, range(count))
    until, times = time.monotonic() + _REPLAYS_S, [neutral._all_us()]
    while len(times) < _REPLAYS or time.monotonic() < until:
        times.append(neutral._all_us())
    return min(times)


class Graph(Eager):
    """Times launches on several calls in a CUDA graph."""

    def _load(self) -> None:
        stream = _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(self._calls[0])  # loads modules and makes workspaces, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        device = torch.cuda.current_device()
        neutral, graph = _idle(device), torch.cuda.CUDAGraph()
        stream, pool, collects = _capture_stream(device), _pool_graph(device).pool(), gc.isenabled()
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
            _pool_graph.cache_clear()  # torch may think that a capture into its pool is still under way
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


class Least(Eager):
    """Times by another timer on a GPU that others use: the least of several times.

    Processes take turns on a GPU, of milliseconds each, so most times include somebody else's turn.
    """

    def __init__(self, timer: Eager) -> None:
        self._timer, self.launches = timer, timer.launches

    def time_us(self) -> float:
        return min(self._timer.time_us() for _ in range(_LEAST_OF))


def screen_us(timer: Eager, fastest_us: float = math.inf) -> Timing:
    """Time a few replays, fewer of long ones, and only one if it is far behind the fastest."""
    first = timer.time_us()
    if first > _FAR_BEHIND * fastest_us:
        return Timing(first, 0.0)
    repeats = 2 if first * timer.launches > 20_000 else 4
    return timing_of([timer.time_us() for _ in range(repeats)])


def in_turns(timers: Mapping[K, Eager], rounds: int) -> dict[K, list[float]]:
    """Return each timer's microseconds, interleaved A B A B ..., so that clocks and heat affect all alike."""
    samples: dict[K, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer.time_us())
    return samples


def interleaved(timers: Sequence[Eager], budget_ms: float = 60.0) -> list[list[float]]:
    """Time interleaved, in as many rounds as fit the budget judging by a first one, which is dropped."""
    once_ms = sum(timer.time_us() * timer.launches for timer in timers) / 1e3
    rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(budget_ms / max(once_ms, 1e-3))))
    return list(in_turns(dict(enumerate(timers)), rounds).values())


def slower(a: Sequence[float], b: Sequence[float]) -> bool:
    """True if b is slower than a by more than two standard errors, of interleaved times."""
    ratios = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    if len(ratios) < 2:
        return ratios[0] > 0
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.median(ratios) > 2 * error


def rank_raced(samples: Mapping[Config, Sequence[float]], incumbent: Config | None = None) -> list[Config]:
    """Order raced configs, the best first; `samples` are interleaved times.

    The incumbent stays first unless another config is faster beyond the noise. Ties with the fastest are
    broken by `Config.key`, so that a repeated race has the same winner.
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
