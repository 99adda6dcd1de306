"""Calls that were met before: what tells them apart, and when Triton itself must look at them."""

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from tritile.tune import recall


@triton.jit
def kernel(x_ptr, N, scale, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    tl.store(x_ptr, tl.load(x_ptr) * scale + BLOCK + N)


class OnGpu(torch.nn.Parameter):
    """A tensor that says it is on a GPU, at an address of its own choice."""

    is_cuda = True
    address = 4096

    def data_ptr(self):
        return self.address


def on_gpu(dtype=torch.float16, address=4096):
    tensor = torch.empty(4, dtype=dtype).as_subclass(OnGpu)
    tensor.address = address
    return tensor


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch):
    monkeypatch.setattr(recall, "_TENSORS", (torch.Tensor, OnGpu))
    monkeypatch.setattr(recall, "current_gpu", lambda: 0)
    monkeypatch.setattr(recall, "current_raw_stream", lambda index: 7)


CALL = {"grid": (3,), "warmup": False}


def key(*args, mode="cached", **kwargs):
    return recall.key_of(mode, args, CALL | kwargs)


def test_calls_that_are_alike_have_one_key():
    assert key(on_gpu(), 5, 1.0) == key(on_gpu(address=8192), 5, 1.0)
    assert hash(key(on_gpu(), 5, 1.0)) == hash(key(on_gpu(address=8192), 5, 1.0))


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(on_gpu(torch.float32), 5, 1.0),
        lambda: key(on_gpu(address=4098), 5, 1.0),
        lambda: key(on_gpu(), 6, 1.0),
        lambda: key(on_gpu(), 5, 2.0),
        lambda: key(on_gpu(), 5, 1),
        lambda: key(on_gpu(), 5, True),
        lambda: key(on_gpu(), 5, None),
        lambda: key(on_gpu(), 5),
        lambda: key(on_gpu(), 5, 1.0, mode="off"),
    ],
)
def test_what_triton_may_specialize_on_tells_calls_apart(other):
    assert other() != key(on_gpu(), 5, 1.0)


def test_the_current_gpu_tells_calls_apart(monkeypatch):
    first = key(on_gpu(), 5)
    monkeypatch.setattr(recall, "current_gpu", lambda: 1)
    assert key(on_gpu(), 5) != first


@pytest.mark.parametrize(
    "made",
    [
        lambda: key(torch.empty(4), 5),
        lambda: key(5, 6),
        lambda: key(on_gpu(), torch.empty(2)),
        lambda: key(on_gpu(), 5, scale=1.0),
        lambda: key(on_gpu(), 5, warmup=True),
        lambda: recall.key_of("cached", (on_gpu(),), {"grid": (1,)}),
    ],
)
def test_calls_that_are_not_told_by_a_key(made):
    assert made() is None


class Compiled(CompiledKernel):
    """A compiled kernel whose launches are written down."""

    def __init__(self, backend="cuda"):
        self.launches = []
        self.metadata = type("Metadata", (), {"target": type("Target", (), {"backend": backend})})
        self.function, self.packed_metadata = 1234, (4, 1, 0)
        self._run = lambda *args: self.launches.append(args)

    run = property(lambda self: self._run)

    def launch_metadata(self, grid, stream, *args):
        return grid


def made(args, options=None, compiled=None):
    return recall.launch_of(
        kernel, compiled or Compiled(), args, {"BLOCK": 64, "num_warps": 8} if options is None else options
    )


def test_a_launch_is_what_triton_launched():
    compiled = Compiled()
    x, again = on_gpu(), on_gpu(address=8192)
    launch = made((x, 5, 1.0), compiled=compiled)
    assert launch((again, 5, 1.0), lambda meta: (meta["N"], meta["BLOCK"])) is compiled
    (only,) = compiled.launches
    assert only[:7] == (5, 64, 1, 7, 1234, (4, 1, 0), (5, 64))
    assert only[9] is again
    assert only[10:] == (5, 1.0, 64, False)  # the config's, and the default


@pytest.mark.parametrize(
    ("args", "more"),
    [
        ((on_gpu(), 5, float("nan")), {}),
        ((on_gpu(), [5], 1.0), {}),
        ((on_gpu(), 5, 1.0), {"options": {"num_warps": 4}}),  # no BLOCK
        ((on_gpu(), 5, 1.0), {"compiled": Compiled("hip")}),
    ],
    ids=["NaN", "a list", "not bound", "AMD"],
)
def test_calls_that_are_not_kept(args, more):
    assert made(args, **more) is None


def test_heuristics_and_what_is_not_compiled_are_not_kept():
    values = {"EVEN": lambda args: True}
    assert (
        recall.launch_of(triton.heuristics(values)(kernel), Compiled(), (on_gpu(), 5, 1.0), {"BLOCK": 4})
        is None
    )
    assert recall.launch_of(kernel, None, (on_gpu(), 5, 1.0), {"BLOCK": 4}) is None


def test_triton_itself_looks_where_it_is_watched_or_a_global_changed(monkeypatch):
    compiled = Compiled()
    launch = made((on_gpu(), 5, 1.0), compiled=compiled)
    call = ((on_gpu(), 5, 1.0), (1,))
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "debug", True)
        assert launch(*call) is None
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "pre_run_hooks", [print])
        assert launch(*call) is None
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "used_global_vals", {("FACTOR", 1): (3, {"FACTOR": 4})})
        assert launch(*call) is None
    assert compiled.launches == []
    assert launch(*call) is compiled
