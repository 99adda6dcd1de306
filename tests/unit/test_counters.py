"""Counters of sums that programs share: who may have the same ones, and when they are zero."""

from types import SimpleNamespace

import pytest
import torch

from tests.configs import tma
from tritile.core.torch_private import is_external
from tritile.families.work import work_of
from tritile.ops.products import matmul_call
from tritile.runtime import counters, launch
from tritile.runtime.counters import Counters


class Stream(SimpleNamespace):
    """A stream: torch numbers its own by odd ids, and others by their handles."""

    def wait_event(self, event):
        self.waited.append(event.on)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that runs nothing: its current stream, and whether that is captured. Counters lie on the host."""
    state = SimpleNamespace(stream=None, capturing=False, made=[])

    def on(handle, own=True):
        stream_id = 0 if handle == 0 else 2 * handle + 1 if own else handle
        state.stream = Stream(cuda_stream=handle, stream_id=stream_id, waited=[])
        return handle

    class Event:
        on = None

        def record(self):
            self.on = state.stream

    def zeros(self, count):
        state.made.append(torch.zeros(count, dtype=torch.int64))
        return state.made[-1]

    state.on = on
    on(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(counters, "capturing", lambda: state.capturing)
    monkeypatch.setattr(counters, "_RESERVE", 64)
    monkeypatch.setattr(Counters, "_zeros", zeros)
    return state


def test_external_streams(gpu):
    found = []
    for handle, own in ((0, True), (4096, True), (4096, False)):
        gpu.on(handle, own)
        found.append(is_external(gpu.stream))
    assert found == [False, False, True]


def test_launches_share_stream_counters(gpu):
    kept = Counters(0)
    for handle in (0, 4096):
        first, second = (kept.take(4, gpu.on(handle)) for _ in range(2))
        assert first == second
        assert first.launched is None
        assert not gpu.stream.waited
    assert len(gpu.made) == 2


def test_reused_stream_handle_waits(gpu):
    """It is given these counters, perhaps before the other's work is done."""
    kept = Counters(0)
    kept.take(4, gpu.on(4096, own=False)).launched.record()
    destroyed = gpu.stream
    kept.take(4, gpu.on(4096, own=False)).launched.record()
    assert gpu.stream.waited == [destroyed]
    following = gpu.stream
    kept.take(4, gpu.on(4096))  # torch may be given the handle, too
    assert gpu.stream.waited == [following]


def test_counters_of_streams_without_end(gpu):
    kept = Counters(0)
    assert kept._eager.most <= 8192
    kept._eager.most = 16
    first = kept.take(4, gpu.on(0))
    for handle in range(1, 41):
        last = kept.take(4, gpu.on(handle))
        assert kept.take(4, handle) is last
    assert kept.take(4, gpu.on(0)) is not first


def places(taken, count):
    return {*range(taken.address, taken.address + 8 * count, 8)}


def test_captures_have_own_counters(gpu):
    """Once none are left, a capture zeroes fresh ones; the next call that is prepared makes more."""
    kept, given = Counters(0), set()
    gpu.capturing = True
    assert kept.take(3, 0).address == gpu.made[-1].data_ptr(), "none were made before"
    kept.make_ready()
    assert len(gpu.made) == 1
    for more in (True, False):
        gpu.capturing = False
        kept.make_ready()
        gpu.capturing, made = True, len(gpu.made)
        for _ in range(16):
            each = kept.take(3, 0)
            assert each.address % 16 == 0
            assert not places(each, 3) & given
            given |= places(each, 3)
        assert len(gpu.made) == made, more
        assert kept.take(3, 0).address == gpu.made[-1].data_ptr()
        assert len(gpu.made[-1]) == 3


def test_failed_launch_leaves_counters(gpu, monkeypatch):
    """They may be other than zero: on that stream, on any other, and in the reserve of captures."""
    kept = Counters(0)
    monkeypatch.setattr(launch, "counters_of", lambda device: kept)
    monkeypatch.setattr(launch, "current_gpu", lambda: 0)
    monkeypatch.setattr(launch, "current_raw_stream", lambda device: gpu.stream.cuda_stream)
    monkeypatch.setattr(launch, "_bound", lambda value, buffers: buffers)
    monkeypatch.setattr(torch, "empty", lambda size, **rest: torch.zeros(size, dtype=torch.uint8))
    used, fails = [], [True]

    class Kernel:
        metadata = SimpleNamespace(tensordesc_meta=None)

        def __getitem__(self, grid):
            return self.run

        def run(self, *args, stream):
            used.append(args[0]["counters"].address)
            if fails.pop():
                raise RuntimeError("an illegal memory access was encountered")
            fails.append(False)

    a, b, out = (torch.zeros(256, 256, dtype=torch.bfloat16) for _ in range(3))
    call = matmul_call(a, b, out, "ieee")
    work = work_of(call, tma(64, 64, 64, 4, 4, split=2), 132, False)
    made = launch.Launch(work, [Kernel() for _ in work.steps], launch.pointers_to(call.buffers), 0)
    kept.make_ready()
    reserve, other = gpu.made[-1], kept.take(4, gpu.on(4096))
    gpu.on(0)
    with pytest.raises(RuntimeError, match="illegal"):
        made(*call.tensors)
    fails.append(False)
    made(*call.tensors)
    made(*call.tensors)
    assert used[0] != used[1] == used[2]
    assert kept.take(4, gpu.on(4096)) is not other
    gpu.capturing = True
    assert kept.take(4, 0).address != reserve.data_ptr()
    assert not any(each.any() for each in gpu.made)
