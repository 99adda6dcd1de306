"""Launches enqueued behind a wait, on a GPU that is a clock of numbers."""

import contextlib

import pytest
import torch

from tritile.errors import TuningError
from tritile.tune.measure import timing

ENQUEUE_US, NEUTRAL_US, LAUNCH_US = 10.0, 2.0, 7.0
CYCLES_A_US = 1000.0


class Gpu:
    """Stand for a host that enqueues and a stream that runs, both in microseconds."""

    def __init__(self):
        self.host = self.stream = 0.0
        self.waits = []
        self.seen = []  # of what is enqueued, in order

    def enqueue(self, us, what="launch"):
        self.seen.append(what)
        self.host += ENQUEUE_US
        self.stream = max(self.stream, self.host) + us

    def wait(self, cycles):
        self.waits.append(cycles)
        self.enqueue(cycles / CYCLES_A_US, "wait")


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            made.enqueue(0.0, "event")
            self.at = made.stream

        def query(self):
            return made.host >= self.at

        def synchronize(self):
            made.host = max(made.host, self.at)

        def elapsed_time(self, end):
            return (end.at - self.at) / 1e3

    class Neutral:
        def add_(self, value):
            made.enqueue(NEUTRAL_US, "neutral")

    monkeypatch.setattr(timing, "wait_on_gpu", made.wait)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(timing, "_idle", lambda device: Neutral())
    timing._neutral_us.cache_clear()
    yield made
    timing._neutral_us.cache_clear()


def test_launches_that_wait_for_the_last_take_what_the_gpu_takes(gpu):
    calls = []
    clock = timing.Queued(lambda call: (calls.append(call), gpu.enqueue(LAUNCH_US)), range(5))
    assert calls == [0]
    assert clock.time_us() == pytest.approx(LAUNCH_US)
    assert calls == [0, *range(5)]


def test_an_event_ahead_of_each_launch_keeps_it_from_starting_early(gpu):
    clock = timing.Queued(lambda call: gpu.enqueue(LAUNCH_US), range(2))
    clock.time_us()
    gpu.seen.clear()
    clock.time_us()
    assert gpu.seen == ["wait", "event", *["neutral", "event", "launch"] * 2, "event"]


def test_a_wait_that_ends_too_soon_is_made_longer(gpu):
    """Enqueue launches again behind a longer wait where they take the host longer than the first."""

    def run(call):
        gpu.host += 400.0
        gpu.enqueue(LAUNCH_US)

    assert timing.Queued(run, range(4)).time_us() == pytest.approx(LAUNCH_US)
    assert gpu.waits[-1] > timing._WAITS[0]


def test_what_never_waits_long_enough_is_told(gpu):
    def run(call):
        gpu.host += 1e9
        gpu.enqueue(LAUNCH_US)

    with pytest.raises(TuningError, match="too long to enqueue"):
        timing.Queued(run, range(4)).time_us()


def test_what_takes_no_time_is_no_time(gpu):
    with pytest.raises(TuningError, match="it was timed at"):
        timing.Queued(lambda call: gpu.enqueue(0.0), range(3)).time_us()


def test_a_graph_has_the_neutral_kernel_ahead_of_each_launch(monkeypatch):
    """Record what is captured: with calls, and with none, whose time is subtracted."""
    captured = []

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode=None):
            captured.append([])
            self.own = captured[-1]

        def capture_end(self):
            pass

        def pool(self):
            return 0

        def replay(self):
            return sum({"neutral": NEUTRAL_US}.get(what, LAUNCH_US) for what in self.own)

    class Stream:
        def wait_stream(self, other):
            pass

    class Neutral:
        def add_(self, value):
            captured[-1].append("neutral")

    monkeypatch.setattr(timing, "_idle", lambda device: Neutral())
    monkeypatch.setattr(timing, "_side", lambda device: Stream())
    monkeypatch.setattr(timing, "_kept", lambda device: Graph())
    monkeypatch.setattr(timing, "_elapsed_us", lambda work: work())
    for name, made in (("CUDAGraph", Graph), ("current_stream", Stream), ("current_device", lambda: 0)):
        monkeypatch.setattr(torch.cuda, name, made)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    timing._neutral_us.cache_clear()
    assert (
        timing.Graph(lambda call: captured and captured[-1].append(call), ["a", "b"]).time_us() == LAUNCH_US
    )
    timing._neutral_us.cache_clear()
    assert captured == [["neutral", "a", "neutral", "b"], ["neutral", "neutral"]]


def test_a_host_that_is_slow_for_a_while_does_not_lengthen_neutral_kernels(monkeypatch):
    """Time neutral kernels for longer than other programs disturb each of them."""
    now = [0.0]

    class Neutral(timing.Eager):
        def _all_us(self):
            now[0] += 1e-4
            return 90.0 if now[0] < 0.012 else 10.0

    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    assert timing._neutral_us(Neutral, 0, 3) == 10.0


def test_timers_take_turns_as_long_as_the_budget_lasts(monkeypatch):
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
