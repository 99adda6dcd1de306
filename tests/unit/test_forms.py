"""Calls on a GPU: which share a config, what `cache` says of them, and how they are compiled and launched.

Tensors say that they are on a GPU. Launches are written down, by a stand-in for the kernel or for the driver.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import cache
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

import tritile
from tests import mock_gpu
from tests.unit.test_like_triton import Bench, of_blocks
from tritile.core import device
from tritile.errors import NotCompiledError
from tritile.tuner import autotuner

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")
REFUSED = r"no kernel runs without a GPU: set TRITON_INTERPRET=1|cannot be accessed from Triton"


def on_gpu(dtype=torch.float16, size=4):
    return mock_gpu.on_gpu(size, dtype=dtype)


@triton.jit
def kernel(x_ptr, out_ptr, N, scale, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.load(x_ptr) * scale + BLOCK + N)


class Recorder:
    """Stands for the kernel; like Triton, it looks into Triton's cache for what it has not met before."""

    def __init__(self):
        self.launches, self.compiled = [], set()

    def run(self, *args, **kwargs):
        form = kwargs["BLOCK"], *[value for value in args if isinstance(value, int)]
        if form not in self.compiled:
            cache.get_cache_manager("00").get_group("kernel.json")
        self.compiled.add(form)
        self.launches.append({"args": args} | {"warmup": False} | kwargs)

    def __getattr__(self, name):
        return getattr(kernel, name)


class Tuned:
    """The kernel under tritile.autotune, which never measures but in mode "tune": then 128 is the fastest."""

    def __init__(self, key=("N",)):
        self.measured = 0
        configs = [triton.Config({"BLOCK": block}, num_warps=8) for block in (64, 128)]
        self.tuner = tritile.autotune(configs, list(key), do_bench=self.bench, mode="cached")(kernel)
        self.recorder = self.tuner.fn = Recorder()

    def bench(self, call, quantiles):
        call()
        self.measured += 1
        return [1.0 / self.recorder.launches[-1]["BLOCK"]] * 3

    def __call__(self, *args, **kwargs):
        self.tuner[(3,)](*args, **kwargs)
        return self.recorder.launches[-1]

    def is_new(self, *args, **kwargs):
        """Call; return True if a config was chosen for it, False if the call was met before."""
        self.tuner.best_config, before = None, len(self.tuner.cache)
        self(*args, **kwargs)
        assert self.tuner.best_config in self.tuner.configs
        return len(self.tuner.cache) == before + 1


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    h200 = device.target_device("nvidia-h200")
    monkeypatch.setattr(device, "gpu", lambda index: h200)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return Tuned()


def test_met_call_launches_alike(tuned):
    x, out = on_gpu(), on_gpu()
    launch = {
        "grid": (3,), "warmup": False, "BLOCK": 64, "num_warps": 8, "num_stages": 3, "num_ctas": 1
    }  # fmt: skip
    for scale in (0.5, 0.25):
        assert tuned(x, out, 50, scale) == launch | {"args": (x, out, 50, scale)}


@pytest.mark.parametrize(
    "change",
    [{"N": 51}, {"x_ptr": on_gpu(torch.float32)}, {"out_ptr": on_gpu(torch.bfloat16)}, {"scale": on_gpu()}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("by_name", [False, True])
def test_other_key_other_form(tuned, change, by_name):
    given = {"x_ptr": on_gpu(), "out_ptr": on_gpu(), "N": 50, "scale": 0.5}
    calls = (given, given, given | change, given | change, given)
    new = [tuned.is_new(**call) if by_name else tuned.is_new(*call.values()) for call in calls]
    assert new == [True, False, True, False, False]


def descriptor(columns=8, dtype=torch.float32):
    return TensorDescriptor(torch.zeros(16, 16, dtype=dtype), [16, 16], [16, 1], [16, columns])


# Three values in the key, of which the first two are one.
VALUES = {
    "list": ([1, 2], [1, 2], [1, 3]),
    "dict": ({"a": 1}, {"a": 1}, {"a": 2}),
    "tuple": ((1, torch.float16), (1, torch.float16), (2, torch.float16)),
    "nan": (float("nan"), float("nan"), 0.0),
    "numpy": (np.int64(3), np.int64(3), np.int64(4)),
    "tensor": (torch.ones(2, 3), torch.zeros(2, 3), torch.ones(3, 2)),
    "str": ("a", "a", "b"),
    "None": (None, None, 0),
    "descriptor": (descriptor(8), descriptor(8), descriptor(16)),
    "descriptor's dtype": (descriptor(), descriptor(), descriptor(dtype=torch.float16)),
    "dtype in a tuple": ((3, torch.ones(2)), (3, torch.ones(2)), (3, torch.ones(2, dtype=torch.float16))),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_key_may_hold_any_value(tuned, name):
    tuned, (x, out) = Tuned(key=("N", "scale")), (on_gpu(), on_gpu())
    new = [tuned.is_new(x, out, 50, value) for value in VALUES[name] * 2]
    assert new == [True, False, True, False, False, False]


@pytest.mark.parametrize("made", [descriptor, lambda dtype: (3, torch.zeros(2, dtype=dtype))])
def test_descriptor_and_tuple_dtypes(tuned, made):
    calls = [(on_gpu(), made(dtype=dtype), 3) for dtype in (torch.float16, torch.float32)]
    half, single = (tuned.tuner.problem(args, {}) for args in calls)
    assert (half.dtypes[0], half.dtypes[1][1]) == (("x_ptr", "float16"), "float16")
    assert half != single
    assert [tuned.is_new(*args, 0.5) for args in calls] == [True, True]


def test_cache_of_latest_mode_and_gpu(tuned, monkeypatch):
    call = on_gpu(), on_gpu(), 50, 0.5
    tuned(*call)
    guessed = tuned.tuner.cache
    tuned.tuner.mode = "tune"
    assert tuned(*call)["BLOCK"] == 128
    assert tuned.measured == 2
    assert list(tuned.tuner.cache.values()) == [tuned.tuner.configs[1]]
    assert not guessed  # the guess is made anew
    tuned.tuner.mode = "cached"
    assert tuned(*call)["BLOCK"] == 128
    here = tuned.tuner.cache
    monkeypatch.setattr(mock_gpu.OnGpu, "get_device", lambda self: 1)
    tuned(*call)
    assert tuned.tuner.cache == here
    assert tuned.tuner.cache is not here


def test_cache_is_bounded(tuned, monkeypatch):
    monkeypatch.setattr(autotuner, "MAX_CACHED", 8)
    tuned.tuner.cache, (x, out) = {}, (on_gpu(), on_gpu())
    for n in range(20):
        tuned(x, out, n, 0.5)
        assert len(tuned.tuner.cache) <= 8
    assert not any(tuned.is_new(x, out, 19, scale) for scale in range(20))  # not in the key


def test_strict_raises_before_compiling(tuned):
    call, compiled = (on_gpu(), on_gpu(), 50, 0.5), tuned.recorder.compiled
    tuned.tuner.mode = "tune"
    tuned(*call)
    launches = len(tuned.recorder.launches)
    tuned.tuner.mode = "strict"
    tuned(*call)
    assert len(tuned.recorder.launches) == launches + 1
    compiled.clear()
    tuned(*call)  # a call that was launched so before is not looked into
    compiled.clear()
    tritile.forget()
    for _ in range(2):
        with pytest.raises(NotCompiledError, match=r"kernel with BLOCK: 128.*another mode"):
            tuned(*call)
    for mode in ("cached", "strict"):
        tuned.tuner.mode = mode
        tuned(*call)


# What a compiler or a driver says, under Triton's decorator and tritile's.


def copied(out, x, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < N), mask=at < N)


def staged(x, N, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for _ in tl.range((N + BLOCK - 1) // BLOCK, num_stages=STAGES):
        tl.store(x + at, tl.load(x + at, mask=at < N), mask=at < N)
        at += BLOCK


def test_hooks_see_what_the_compiler_refuses(autotune, gpu):
    """256 KiB of shared memory are 64 stages of 1024 floats."""
    begun, failures, bench = [], [], Bench()
    kernel = autotune(
        of_blocks(1024, 32),
        ["N"],
        pre_hook=lambda named, reset_only=False: begun.append(reset_only),
        post_hook=lambda named, exception: failures.append(exception),
        do_bench=bench,
    )(triton.heuristics({"STAGES": lambda named: 64 if named["N"] == 4096 else 4})(triton.jit(staged)))
    kernel[(1,)](on_gpu(torch.float32, 4096), 4096)
    refused, taken = failures
    assert begun.count(False) == 2
    assert isinstance(refused, OutOfResources)
    assert "shared memory" in str(refused)
    assert taken is None
    assert gpu.launches[-1].args["BLOCK"] == 32


TTIR = """
module {
  tt.func public @copied(%out: !tt.ptr<f32>, %x: !tt.ptr<f32>, %n: i32) attributes {noinline = false} {
    %ten = arith.constant 1.000000e+01 : f32
    tt.store %out, %ten : !tt.ptr<f32>
    tt.return
  }
}
"""


@pytest.mark.parametrize("is_own", [True, False])
def test_config_brings_own_code(autotune, gpu, tmp_path, is_own):
    path = tmp_path / "own.ttir"
    path.write_text(TTIR)
    configs = [triton.Config({"BLOCK": 32, **({"ir_override": str(path)} if is_own else {})})]
    kernel = autotune(configs, ["N"])(triton.jit(copied))
    x, out = on_gpu(torch.float32, 1024), on_gpu(torch.float32, 1024)
    assert ("ld.global" in kernel[(32,)](out, x, N=1024).asm["ptx"]) != is_own


def test_compiled_ahead_for_each_config(autotune, gpu):
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((64, 2), (128, 4))]
    kernel = autotune(configs, ["N"], do_bench=Bench())(triton.jit(copied))
    compiled = kernel.warmup(torch.float32, torch.float32, 100, grid=(1,))
    assert [each.metadata.num_warps for each in compiled] == [2, 4]
    assert gpu.launches == []


@pytest.mark.parametrize("blocks", [(32,), (32, 64)], ids=["one config", "two"])
@pytest.mark.parametrize("mode", ["tune", "cached", "strict", "off"])
def test_host_tensors_refused_as_triton(mode, blocks):
    """There is no driver for them, or the driver refuses their address."""
    kernel, out = tritile.autotune(of_blocks(*blocks), ["N"], mode=mode)(triton.jit(copied)), torch.zeros(40)
    for _ in range(2):  # what was chosen before the error is no other
        with pytest.raises((RuntimeError, ValueError), match=REFUSED):
            kernel[(2,)](out, torch.ones(40), N=40)
    assert not out.any()
