"""Calls on a GPU that were met before: launched at once, and never with what was chosen for others.

Tensors say that they are on a GPU, and a launch is written down: BLOCK, and what else the kernel is given.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import cache
from triton.tools.tensor_descriptor import TensorDescriptor

import tritile
from tritile.core import device
from tritile.errors import InvalidValueError, NotCompiledError
from tritile.tune import recall

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")


class OnGpu(torch.Tensor):
    """A tensor that says it is on GPU 0."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self):
        return 0


def on_gpu(dtype=torch.float16):
    return torch.Tensor._make_subclass(OnGpu, torch.empty(4, dtype=dtype, device="meta"))


class Recorder:
    """Stands for a compiled kernel."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def run(self, *args, **kwargs):
        self.launches.append({"args": args} | kwargs)


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
        self.tuner = tritile.autotune(configs, list(key), do_bench=self.bench)(kernel)
        self.record(monkeypatch, Recorder(kernel))
        self.problems, problem = [], self.tuner.problem
        monkeypatch.setattr(
            self.tuner, "problem", lambda *given: self.problems.append(problem(*given)) or self.problems[-1]
        )

    def record(self, monkeypatch, recorder):
        """Have launches, on the GPU and in host memory, go to a recorder."""
        self.recorder = recorder
        for holder in (self.tuner, self.tuner.host_aware):
            monkeypatch.setattr(holder, "fn", recorder)

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


def test_names_and_places_are_told_apart(tuned):
    x, out = on_gpu(), on_gpu()
    assert tuned(x, out, 50, 0.5)[1] == 1
    assert tuned(x, out, 50, scale=0.5)[1] == 1
    assert tuned(x, out, scale=0.5, N=50)[1] == 1
    assert tuned(x, out, scale=0.5, N=50)[1] == 0
    assert len(set(tuned.problems)) == 1


def test_the_gpu_is_part_of_a_form(tuned, monkeypatch):
    given = on_gpu(), on_gpu(), 50, 0.5
    tuned(*given)
    monkeypatch.setattr(OnGpu, "get_device", lambda self: 1)
    assert tuned(*given)[1] == 1


def test_the_first_tensor_may_stand_anywhere(tuned):
    host = torch.empty(4, dtype=torch.float16)
    assert [tuned(host, on_gpu(), 50, 0.5)[1] for _ in range(2)] == [1, 0]
    assert [tuned(50, 0.5, N=7, scale=on_gpu())[1] for _ in range(2)] == [1, 0]


def test_what_is_captured_is_not_kept(tuned, monkeypatch):
    monkeypatch.setattr("tritile.tune.autotuner.capturing", lambda: True)
    given = on_gpu(), on_gpu(), 50, 0.5
    assert [tuned(*given)[1] for _ in range(2)] == [1, 1]
    assert tuned.tuner.cache == {}


def test_a_tuned_parameter_is_refused_however_often_the_call_was_met(tuned):
    given = on_gpu(), on_gpu(), 50, 0.5
    for _ in range(2):
        tuned(*given)
        with pytest.raises(InvalidValueError, match="BLOCK given, but the tuner sets it"):
            tuned(*given, BLOCK=64)


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, float("nan")], ids=str)
def test_a_key_that_may_change_or_is_no_number_is_looked_at_each_time(monkeypatch, value):
    tuned = Tuned(monkeypatch, key=("N", "scale"))
    assert [tuned(on_gpu(), on_gpu(), 50, value)[1] for _ in range(2)] == [1, 1]
    assert tuned.tuner.cache == {}
    assert [tuned(on_gpu(), on_gpu(), 50, scale)[1] for scale in (math.inf, math.inf)] == [1, 0]


def test_dtypes_of_descriptors_tell_problems_and_forms_apart():
    tuned = tritile.autotune([triton.Config({"BLOCK": 16})], ["N"])(kernel)
    given = [
        (on_gpu(), TensorDescriptor(torch.zeros(16, 16, dtype=dtype), [16, 16], [16, 1], [16, 16]), 3)
        for dtype in (torch.float16, torch.float32)
    ]
    half, single = (tuned.problem(args, {}) for args in given)
    assert half.dtypes == (("x_ptr", "float16"), ("out_ptr", "float16"))
    assert half != single
    assert len({recall.form_of("tune", {"N": 2}, args, {}) for args in given}) == 2


class Compiling(Recorder):
    """Looks into Triton's cache, as Triton does, for what it has not met before."""

    def __init__(self, kernel):
        super().__init__(kernel)
        self.compiled = set()

    def run(self, *args, **kwargs):
        super().run(*args, **kwargs)
        form = kwargs["BLOCK"], *[value for value in args if isinstance(value, int)]
        if form not in self.compiled:
            cache.get_cache_manager("00").get_group("kernel.json")
        self.compiled.add(form)


def test_strict_raises_where_it_would_have_to_compile_ahead_of_a_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tuned = Tuned(monkeypatch)
    tuned.record(monkeypatch, Compiling(kernel))
    given = on_gpu(), on_gpu(), 50, 0.5
    with tritile.mode("tune"):
        tuned(*given)
    tuned.recorder.launches.clear()
    with tritile.mode("strict"):
        tuned(*given)
        tuned(*given)
    assert [launch["warmup"] for launch in tuned.recorder.launches] == [True, False, False]
    tuned.recorder.compiled.clear()
    tuned.recorder.launches.clear()
    tritile.forget()
    with tritile.mode("strict"), pytest.raises(NotCompiledError, match=r"kernel N=50.*another mode"):
        tuned(*given)
    assert [launch["warmup"] for launch in tuned.recorder.launches] == [True]  # nothing was launched
    with tritile.mode("cached"):
        tuned(*given)
    with tritile.mode("strict"):
        tuned(*given)
