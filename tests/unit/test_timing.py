"""Timers, on a GPU that is a clock of numbers."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tritile.core.config import Config
from tritile.errors import TuningError
from tritile.tuner.measure import timing

ENQUEUE_US, NEUTRAL_US, LAUNCH_US = 10.0, 2.0, 7.0


class Gpu:
    """Stand for a host that enqueues and a stream that runs, both in microseconds."""

    def __init__(self):
        self.host = self.stream = 0.0
        self.seen = []  # of what is enqueued, in order

    def enqueue(self, us, what="launch"):
        self.seen.append(what)
        self.host += ENQUEUE_US
        self.stream = max(self.stream, self.host) + us


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            made.enqueue(0.0, "event")
            self.at = made.stream

        def synchronize(self):
            made.host = max(made.host, self.at)

        def elapsed_time(self, end):
            return (end.at - self.at) / 1e3

    class Neutral:
        def add_(self, value):
            made.enqueue(NEUTRAL_US, "neutral")

    class Graph:
        def capture_begin(self, *pool, capture_error_mode):
            self.first = len(made.seen)

        def capture_end(self):
            self.captured = made.seen[self.first :]

        def pool(self):
            return 0

        def replay(self):
            made.enqueue(sum({"neutral": NEUTRAL_US}.get(what, LAUNCH_US) for what in self.captured), "graph")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "Event": Event, "CUDAGraph": Graph, "current_device": lambda: 0, "current_stream": lambda: stream,
        "stream": contextlib.nullcontext,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(timing, "_idle", lambda device: Neutral())
    monkeypatch.setattr(timing, "_capture_stream", lambda device: stream)
    kept = timing._neutral_us, timing._pool_graph
    for cached in kept:
        cached.cache_clear()
    yield made
    for cached in kept:
        cached.cache_clear()


def test_graph_subtracts_neutral_kernel(gpu):
    clock = timing.Graph(gpu.seen.append, range(8))
    assert clock.time_us() == pytest.approx(LAUNCH_US)
    assert clock._graph.captured == [each for call in range(8) for each in ("neutral", call)]


def test_impossible_time_is_refused():
    class Broken(timing.Eager):
        def _all_us(self):
            return 0.0

    with pytest.raises(TuningError, match="it was timed at"):
        Broken(print, range(4)).time_us()


def test_slow_host_leaves_neutral_kernels(monkeypatch):
    """Time neutral kernels for longer than other programs disturb each of them."""
    now = [0.0]

    class Neutral(timing.Eager):
        def _all_us(self):
            now[0] += 1e-4
            return 90.0 if now[0] < 0.012 else 10.0

    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    assert timing._neutral_us(Neutral, 0, 3) == 10.0


def test_timers_take_turns(monkeypatch):
    """The first round says how many there is time for, and does not count."""
    seen = []

    class Timer(timing.Eager):
        def _all_us(self):
            seen.append(self._run)
            return 1e3 * self.launches if seen.count(self._run) > 1 else 4e3 * self.launches

    timers = [Timer(name, range(count)) for name, count in (("a", 1), ("b", 2))]
    samples = timing.interleaved(timers, budget_ms=100.0)
    assert seen == ["a", "b"] * 9  # 12 ms a round
    assert samples == [[1e3] * 8] * 2
    seen.clear()
    assert timing.screen_us(timers[0], fastest_us=1e3) == (4e3, 0.0)
    assert seen == ["a"]


def test_incumbent_stays_within_noise():
    a, b, c = (Config.of(B=value) for value in (1, 2, 3))
    noisy = {a: [10.0, 12, 9, 11, 10], b: [10.1, 11, 9.5, 10.5, 10.4], c: [20.0] * 5}
    assert timing.rank_raced(noisy) == [a, b, c]
    assert timing.rank_raced(noisy, b) == [b, a, c]
    assert timing.rank_raced(noisy, c) == [a, b, c]  # an incumbent that lost
    clear = {a: [9.0, 10.8, 8.1, 9.9, 9.0], b: [10.0, 12, 9, 11, 10]}
    assert timing.slower(clear[a], clear[b])
    assert timing.rank_raced(clear, b) == [a, b]
    tied = {b: [10.0, 10.2, 9.9], a: [10.0, 10.1, 10.0]}
    assert timing.rank_raced(tied)[0] == a  # by text, whichever came first
    assert timing.rank_raced(dict(reversed(tied.items())))[0] == a
