"""`tritile.plan` of every operation, by itself or by name, and of decorated kernels."""

import json

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.commands import run
from tritile.core.config import Config
from tritile.core.device import HOST, target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError, NotTunedError, ShapeError, UnsupportedError
from tritile.families import launching
from tritile.ops.plan import OPERATIONS
from tritile.tuner.plan import KernelPlan
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import store_of

pytestmark = pytest.mark.interpreted

H200 = target_device("nvidia-h200")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def fp8(*shape):
    return meta(*shape, dtype=torch.float8_e4m3fn)


ONE = meta(1, dtype=torch.float32)
X, A, B, W = meta(64, 32), meta(64, 48), meta(48, 32), meta(32, 48)
CALLS = {
    "matmul": ((A, B), {}, "64x32x48 NN bfloat16"),
    "mm": ((A, B), {}, "64x32x48 NN bfloat16"),
    "bmm": ((meta(3, 64, 48), meta(3, 48, 32)), {}, "3x64x32x48 NN bfloat16"),
    "linear": ((A, W), {"activation": "gelu"}, "64x32x48 NT bfloat16 gelu"),
    "addmm": ((X, A, B), {"alpha": 2}, "64x32x48 NN bfloat16 bias=full weighted"),
    "baddbmm": ((meta(3, 64, 32), meta(3, 64, 48), meta(3, 48, 32)), {}, "3x64x32x48 NN bfloat16 bias=full"),
    "gated_linear": ((A, W, W), {}, "64x32x48 NT bfloat16 gated silu"),
    "grouped_matmul": ((A, meta(2, 48, 32), torch.empty(2, dtype=torch.int32, device="meta")), {}, None),
    "scaled_matmul": (
        (fp8(64, 48), fp8(32, 48).t(), ONE, ONE),
        {},
        "64x32x48 NT float8_e4m3fn ieee scale_a=one scale_b=one",
    ),
    "permute": ((meta(3, 4, 5), (2, 0, 1)), {}, "5x12 from (1,0) 2-byte"),
    "transpose": ((A,), {}, "48x64 from (1,0) 2-byte"),
    "contiguous": ((A.mT,), {}, "48x64 from (1,0) 2-byte"),
}


def test_operations_are_planned():
    assert set(OPERATIONS) == set(CALLS)
    assert all(getattr(tritile, name) is function for name, function in OPERATIONS.items())
    weight = tritile.quantize(meta(32, 128), bits=4)
    assert tritile.plan("linear", meta(64, 128), weight, device=H200).problem.label.endswith("by int4/128")


@pytest.mark.parametrize("name", CALLS)
def test_planned_by_operation_or_name(name):
    args, words, label = CALLS[name]
    found = tritile.plan(name, *args, device=H200, **words)
    assert found == tritile.plan(getattr(tritile, name), *args, device=H200, **words)
    assert label in (None, found.problem.label)
    assert found.device == H200
    assert found.config.family in repr(found)


@pytest.mark.parametrize(("m", "n", "k"), [(2048, 2056, 511), (64, 64, 64)])
def test_unnamed_precision_of_mode(m, n, k, cuda_matmul):
    a, b = (torch.empty(*shape, device="meta") for shape in ((m, k), (k, n)))
    for target, wanted in (("h200", "ieee"), ("h200", "fp16x3"), ("a100", "fp16x3")):
        with tritile.mode(fp32="torch" if wanted == "ieee" else wanted):
            found = tritile.plan("matmul", a, b, device=target)
            assert found.problem.precision == wanted
            told = run("explain", f"{m}x{n}x{k}", "--dtype", "fp32", "--target", target, "--json").stdout
        assert json.loads(told)["config"] == found.config.to_dict()
    for named in ("ieee", "tf32"):
        assert tritile.plan("matmul", a, b, precision=named, device="h200").problem.precision == named
        cuda_matmul.fp32_precision = named
        assert tritile.plan("matmul", a, b, device="h200").problem.precision == named
        cuda_matmul.fp32_precision = "none"


def test_no_launch_no_plan():
    with pytest.raises(InvalidValueError, match="input is contiguous"):
        tritile.plan("contiguous", A, device=H200)
    with pytest.raises(ShapeError, match="launches no kernel"):
        tritile.plan("addmm", meta(0, 32), meta(0, 48), B, device=H200)


@triton.jit
def _double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


BLOCKS = [triton.Config({"BLOCK": block}) for block in (16, 32)]


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    return tritile.autotune(BLOCKS, ["n"])(_double)


def remember(kernel, n, us=7.0):
    problem = kernel.problem((meta(n), meta(n), n), {})
    store_of(H200).add(kernel.digest, Trial(problem, Config.from_triton(BLOCKS[1]), us, error=0.0))


def test_decorated_planned_by_remembered(kernel):
    args = meta(40), meta(40), 40
    first = tritile.plan(kernel, *args, device=H200)
    assert (type(first), first.source, first.config, first.us) == (KernelPlan, "model", BLOCKS[0], None)
    assert "nothing was measured" in first.why
    remember(kernel, 64)
    near = tritile.plan(kernel, *args, grid=(1,), device="nvidia-h200")
    assert (near.source, near.config) == ("predicted", BLOCKS[1])
    remember(kernel, 40)
    exact = tritile.plan(kernel, *args, device=H200)
    assert (exact.source, exact.config, exact.us) == ("exact", BLOCKS[1], 7.0)
    assert repr(exact).startswith("Plan for _double n=40 on NVIDIA H200\n  config  BLOCK: 32")
    assert "exact, 7.0 us" in exact._repr_html_()
    with tritile.mode("off"):
        assert tritile.plan(kernel, *args, device=H200).source == "model"


def test_a_kernel_without_a_measurement(kernel):
    args = meta(40), meta(40), 40
    with tritile.mode("strict"):
        with pytest.raises(NotTunedError, match="_double n=40"):
            tritile.plan(kernel, *args, device=H200)
        only = tritile.autotune(BLOCKS[:1], ["n"])(_double)
        assert "only config" in tritile.plan(only, *args, device=H200).why
    own = {"perf_model": lambda BLOCK, **rest: -BLOCK, "top_k": 1}
    plan = tritile.plan(tritile.autotune(BLOCKS, ["n"], own)(_double), *args, device=H200)
    assert (plan.config, "performance model" in plan.why) == (BLOCKS[1], True)


def test_host_plan_of_interpreter(kernel):
    plan = tritile.plan(kernel, torch.zeros(8), torch.zeros(8), 8)
    assert (plan.source, plan.device, plan.config) == ("interpreter", HOST, BLOCKS[0])


def test_host_tensors_interpreted(monkeypatch):
    seen, run = [], launching.run_interpreted
    monkeypatch.setattr(
        launching, "run_interpreted", lambda call, config: seen.append(call.op) or run(call, config)
    )
    a = torch.arange(12.0, dtype=torch.bfloat16).view(3, 4)
    assert torch.equal(tritile.matmul(a, a.t()), a @ a.t())
    assert torch.equal(tritile.transpose(a), a.t())
    assert tritile.plan(tritile.matmul, a, a.t()).source == "interpreter"
    assert seen == ["matmul", "permute"]


def test_torch_only_not_interpreted(monkeypatch):
    monkeypatch.setattr(MatmulProblem, "needs_torch", True)
    monkeypatch.setattr(launching, "run_interpreted", lambda *args: pytest.fail("it was interpreted"))
    a = torch.arange(12.0).view(3, 4)
    assert torch.equal(tritile.matmul(a, a.mT), a @ a.mT)
    assert tritile.plan(tritile.matmul, a, a.mT).source == "host"


@pytest.mark.parametrize("who", ["plan", "explain", "warm", "tune", "bench"])
def test_tensor_for_function_and_misspelling(who, kernel):
    call, x = getattr(tritile, who), torch.zeros(4, 4)
    with pytest.raises(InvalidValueError) as caught:
        call(x)
    expected = f"pass the function, then its arguments: tritile.{who}(tritile.matmul, a, b)"
    assert str(caught.value) == f"{who}: what is a tensor: {expected}"
    own = {"tune": ("bugdet", "budget"), "bench": ("precison", "precision")}
    wrong, right = own.get(who, ("dvice", "device"))
    with pytest.raises(InvalidValueError) as caught:
        call(tritile.matmul, x, x, **{wrong: 1})
    assert str(caught.value) == f"{who}: matmul has no argument {wrong!r} (did you mean {right!r}?)"
    if who != "explain":  # which takes no kernel
        meant = {"N": "n", "gird": "grid"} | ({} if who == "bench" else {wrong: right})
        for name, meaning in meant.items():
            with pytest.raises(InvalidValueError) as caught:
                call(kernel, meta(8), meta(8), **{name: 300})
            assert str(caught.value) == f"_double has no argument {name!r} (did you mean {meaning!r}?)"


def test_missing_arguments_named(kernel):
    with pytest.raises(
        InvalidValueError, match=r"^_double: missing a required argument: 'out': expected x, out, n$"
    ):
        tritile.plan(kernel, meta(8))
    with pytest.raises(InvalidValueError, match="_double: BLOCK given, but configs set it"):
        tritile.plan(kernel, *[meta(8)] * 6)
    even = triton.heuristics({"n": lambda named: 8})(_double)
    assert tritile.plan(tritile.autotune(BLOCKS, [])(even), meta(8), meta(8), maxnreg=64, device=H200)


def test_a_decorated_kernel_is_not_explained(kernel):
    with pytest.raises(UnsupportedError, match="expected a product or permutation"):
        tritile.explain(kernel, meta(8), meta(8), 8, device=H200)
