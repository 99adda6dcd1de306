"""Calls on a GPU: which share a config, what `cache` says of them, and how they are launched.

Tensors say that they are on a GPU, and a launch is written down: BLOCK, and what else the kernel is given.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import cache
from triton.tools.tensor_descriptor import TensorDescriptor

import tritile
from tests import mock_gpu
from tritile.core import device
from tritile.errors import NotCompiledError
from tritile.tune import autotuner

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")


def on_gpu(dtype=torch.float16):
    return mock_gpu.on_gpu(4, dtype=dtype)


class Recorder:
    """Stands for a compiled kernel."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def run(self, *args, **kwargs):
        self.launches.append({"args": args} | {"warmup": False} | kwargs)


@triton.jit
def kernel(x_ptr, out_ptr, N, scale, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.load(x_ptr) * scale + BLOCK + N)


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch):
    h200 = device.target_device("nvidia-h200")
    monkeypatch.setattr(device, "gpu", lambda index: h200)


class Tuned:
    """The kernel under tritile.autotune, whose launches and problems are counted."""

    def __init__(self, monkeypatch, blocks=(64, 128), key=("N",), times=None, **rest):
        configs = [triton.Config({"BLOCK": block}, num_warps=8, **rest) for block in blocks]
        self.measured, self.times = 0, times or {64: 2.0, 128: 1.0}
        self.tuner = tritile.autotune(configs, list(key), do_bench=self.bench, mode="cached")(kernel)
        self.record(monkeypatch, Recorder(kernel))
        self.problems, problem = [], self.tuner.problem
        monkeypatch.setattr(
            self.tuner, "problem", lambda *given: self.problems.append(problem(*given)) or self.problems[-1]
        )

    def record(self, monkeypatch, recorder):
        """Have launches, on the GPU and in host memory, go to a recorder."""
        self.recorder = self.tuner.fn = recorder

    def bench(self, call, quantiles):
        call()
        self.measured += 1
        return [self.times[self.recorder.launches[-1]["BLOCK"]]] * 3

    def __call__(self, *args, **kwargs):
        """Call, and return the launch and how many problems it took to make out."""
        before = len(self.problems)
        self.tuner[(3,)](*args, **kwargs)
        return self.recorder.launches[-1], len(self.problems) - before


@pytest.fixture
def tuned(monkeypatch):
    return Tuned(monkeypatch)


def test_a_call_met_before_is_launched_alike_and_at_once(tuned):
    x, out = on_gpu(), on_gpu()
    first, problems = tuned(x, out, 50, 0.5)
    assert problems == 1
    assert first == {
        "args": (x, out, 50, 0.5), "grid": (3,), "warmup": False,
        "BLOCK": 64, "num_warps": 8, "num_stages": 3, "num_ctas": 1,
    }  # fmt: skip
    tuned.tuner.best_config = None
    again, problems = tuned(x, out, 50, 0.25)
    assert (again, problems) == (first | {"args": (x, out, 50, 0.25)}, 0)
    assert tuned.tuner.best_config is tuned.tuner.configs[0]


@pytest.mark.parametrize(
    "change",
    [{"N": 51}, {"x_ptr": on_gpu(torch.float32)}, {"out_ptr": on_gpu(torch.bfloat16)}, {"scale": on_gpu()}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("by_name", [False, True])
def test_another_key_or_dtype_is_another_form(tuned, change, by_name):
    given = {"x_ptr": on_gpu(), "out_ptr": on_gpu(), "N": 50, "scale": 0.5}

    def problems(given):
        return tuned(**given)[1] if by_name else tuned(*given.values())[1]

    assert (problems(given), problems(given)) == (1, 0)
    assert (problems(given | change), problems(given | change)) == (1, 0)
    assert problems(given) == 0


def test_the_gpu_is_part_of_a_form(tuned, monkeypatch):
    given = on_gpu(), on_gpu(), 50, 0.5
    tuned(*given)
    monkeypatch.setattr(mock_gpu.OnGpu, "get_device", lambda self: 1)
    assert tuned(*given)[1] == 1


def descriptor(block):
    return TensorDescriptor(torch.zeros(16, 16), [16, 16], [16, 1], [16, block])


@pytest.mark.parametrize(
    "values",
    [
        ([1, 2], [1, 2], [1, 3]),
        ({"a": 1}, {"a": 1}, {"a": 2}),
        ((1, torch.float16), (1, torch.float16), (2, torch.float16)),
        (float("nan"), float("nan"), 0.0),
        (np.int64(3), np.int64(3), np.int64(4)),
        (torch.ones(2, 3), torch.zeros(2, 3), torch.ones(3, 2)),
        ("a", "a", "b"),
        (None, None, 0),
        (descriptor(8), descriptor(8), descriptor(16)),
    ],
    ids=["list", "dict", "tuple", "nan", "numpy", "tensor", "str", "None", "descriptor"],
)
def test_a_key_may_hold_any_value(monkeypatch, values):
    tuned = Tuned(monkeypatch, key=("N", "scale"))
    x, out = on_gpu(), on_gpu()
    assert [tuned(x, out, 50, value)[1] for value in (*values, *values)] == [1, 0, 1, 0, 0, 0]
    assert len(tuned.tuner.cache) == 2


def test_cache_is_of_the_mode_and_gpu_of_the_latest_call(tuned, monkeypatch):
    x, out = on_gpu(), on_gpu()
    tuned(x, out, 50, 0.5)
    cached = tuned.tuner.cache
    tuned.tuner.mode = "tune"
    assert tuned(x, out, 50, 0.5)[0]["BLOCK"] == 128
    assert tuned.measured == 2
    assert list(tuned.tuner.cache.values()) == [tuned.tuner.configs[1]]
    assert not cached  # the guess is made anew
    tuned.tuner.mode = "cached"
    assert tuned(x, out, 50, 0.5)[0]["BLOCK"] == 128


def test_cache_is_bounded(tuned, monkeypatch):
    monkeypatch.setattr(autotuner, "_MOST_CACHED", 8)
    tuned.tuner.cache, (x, out) = {}, (on_gpu(), on_gpu())
    for n in range(20):
        tuned(x, out, n, 0.5)
        assert len(tuned.tuner.cache) <= 8
    for scale in range(20):  # not in the key
        assert tuned(x, out, 19, scale)[1] == 0
    assert len(tuned.tuner.cache) <= 8


def test_dtypes_of_descriptors_and_in_tuples_tell_problems_apart():
    tuned = tritile.autotune([triton.Config({"BLOCK": 16})], ["N"])(kernel)

    def descriptor(dtype):
        return TensorDescriptor(torch.zeros(16, 16, dtype=dtype), [16, 16], [16, 1], [16, 16])

    for made in (descriptor, lambda dtype: (3, torch.zeros(2, dtype=dtype))):
        given = [(on_gpu(), made(dtype), 3) for dtype in (torch.float16, torch.float32)]
        half, single = (tuned.problem(args, {}) for args in given)
        assert half.dtypes[0] == ("x_ptr", "float16")
        assert half.dtypes[1][1] == "float16"
        assert half != single
        assert len({tuned.key_of(args, {}) for args in given}) == 2


class Compiling(Recorder):
    """Looks into Triton's cache, as Triton does, for what it has not met before."""

    def __init__(self, kernel):
        super().__init__(kernel)
        self.compiled = set()

    def run(self, *args, **kwargs):
        form = kwargs["BLOCK"], *[value for value in args if isinstance(value, int)]
        if form not in self.compiled:
            cache.get_cache_manager("00").get_group("kernel.json")
        self.compiled.add(form)
        super().run(*args, **kwargs)


def test_strict_raises_where_it_would_have_to_compile_ahead_of_a_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tuned = Tuned(monkeypatch)
    tuned.record(monkeypatch, Compiling(kernel))
    given = on_gpu(), on_gpu(), 50, 0.5
    tuned.tuner.mode = "tune"
    tuned(*given)
    tuned.recorder.launches.clear()
    tuned.tuner.mode = "strict"
    tuned(*given)
    assert len(tuned.recorder.launches) == 1
    tuned.recorder.compiled.clear()
    tuned(*given)  # a call that was launched so before is not looked into
    tuned.recorder.compiled.clear()
    tritile.forget()
    for _ in range(2):
        with pytest.raises(NotCompiledError, match=r"kernel with BLOCK: 128.*another mode"):
            tuned(*given)
    tuned.tuner.mode = "cached"
    tuned(*given)
    tuned.tuner.mode = "strict"
    tuned(*given)
