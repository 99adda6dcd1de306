"""The tuner on a GPU: what hangs, crashes, spills over or answers wrongly costs itself alone."""

import threading

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tritile.core.device import current_gpu
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem
from tritile.errors import IsolationWarning
from tritile.tune import now
from tritile.tune.subject import answers
from tritile.tuner.measure.engine import Rules
from tritile.tuner.measure.workers import PoolRunner
from tritile.tuner.store.trials import store_of

pytestmark = [pytest.mark.gpu, pytest.mark.serial, pytest.mark.usefixtures("forgotten")]


@pytest.fixture(autouse=True)
def _budget(monkeypatch):
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "30")


@triton.jit
def faulty(x, out, N, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    """Adds one; goes wrong as FAULT says."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < N)
    if FAULT == 1:  # hangs
        while tl.load(x).to(tl.float32) < 1e30:
            tl.atomic_add(out, 0.0)
    if FAULT == 2:  # an illegal address
        tl.store(out + at + (1 << 40), value)
    if FAULT == 3:  # a little further than its output
        tl.store(out + at + N, value, mask=at < 8)
    if FAULT == 4:  # the wrong answer
        value += 1
    if FAULT == 5:  # the last element is not written
        tl.store(out + at, value + 1, mask=at < N - 1)
    else:
        tl.store(out + at, value + 1, mask=at < N)


REASONS = {
    1: "hung",
    2: "illegal memory access",
    3: "outside the memory",
    4: "wrong answer",
    5: "wrong answer",
}


def plus_one(x, N):
    return {"out": x + 1}


def run_faulty(kernel, n=4099):
    x = torch.randn(n, device="cuda")
    out = torch.full_like(x, float("nan"))
    with tritile.mode("tune"):
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    torch.cuda.synchronize()
    assert torch.equal(out, x + 1)


@pytest.mark.parametrize("fault", REASONS)
def test_bad_config_costs_itself(fault):
    configs = [triton.Config({"BLOCK": 256, "FAULT": fault}), triton.Config({"BLOCK": 128, "FAULT": 0})]
    kernel = tritile.autotune(configs, ["N"], reference=plus_one)(faulty)
    run_faulty(kernel, 4099 + fault)
    assert kernel.best_config.kwargs["FAULT"] == 0
    problem = kernel.problem((torch.empty(1), torch.empty(1), 4099 + fault), {})
    found = {t.config["FAULT"]: t for t in store_of(current_gpu()).trials(kernel.digest, problem)}
    assert found[0].failure is None
    assert found[0].error == 0
    if found[fault].failure is None:  # no faster, but for noise, and so never asked for an answer
        assert found[fault].us > 0.95 * found[0].us
    else:
        assert REASONS[fault] in found[fault].failure


def test_a_space_is_searched_and_remembered():
    space = tritile.Space({"BLOCK": (64, 128, 256, 512, 1024), "FAULT": (0,), "num_warps": (1, 2, 4, 8)})
    kernel = tritile.autotune(space, ["N"], reference=plus_one)(faulty)
    run_faulty(kernel, 1_000_003)
    first = kernel.best_config
    assert first.kwargs["FAULT"] == 0
    again = tritile.autotune(space, ["N"], reference=plus_one)(faulty)
    x = torch.randn(1_000_003, device="cuda")
    out = torch.empty_like(x)
    with tritile.mode("strict"):
        again[lambda meta: (triton.cdiv(1_000_003, meta["BLOCK"]),)](x, out, 1_000_003)
    assert again.best_config == first
    assert torch.equal(out, x + 1)


@triton.jit
def accumulate(x, total, N, BLOCK: tl.constexpr):
    """Adds x to total, where it lies, and x to itself."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < N, other=0.0)
    tl.store(x + at, value * 2, mask=at < N)
    tl.atomic_add(total, tl.sum(value))


@pytest.mark.parametrize("isolate", [True, False])
def test_changed_inputs_are_restored(isolate):
    configs = [triton.Config({"BLOCK": block}) for block in (128, 256, 512)]
    kernel = tritile.autotune(
        configs, ["N"], reset_to_zero=["total"], restore_value=["x"], isolate=isolate,
        reference=lambda x, total: {"x": 2 * x, "total": x.sum(dtype=torch.float64).float().reshape(1)},
        tolerance=1e-4,
    )(accumulate)  # fmt: skip
    x = torch.rand(5000 + isolate, device="cuda")
    before, total = x.clone(), torch.zeros(1, device="cuda")
    with tritile.mode("tune"):
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, total, x.numel())
    assert torch.equal(x, 2 * before)
    torch.testing.assert_close(total[0], before.sum(), rtol=1e-4, atol=0)


def test_unsendable_call_measured_here():
    lock = threading.Lock()
    configs = [triton.Config({"BLOCK": b, "FAULT": 0}) for b in (128, 256)]
    kernel = tritile.autotune(configs, ["N"])(faulty)
    x = torch.randn(777, device="cuda")
    out = torch.empty_like(x)
    with tritile.mode("tune"), pytest.warns(IsolationWarning, match="lock"):
        kernel[lambda meta: (triton.cdiv(777, meta["BLOCK"]) if lock else 0,)](x, out, 777)
    assert torch.equal(out, x + 1)


MATMUL = MatmulProblem(1, 512, 384, 640, "bfloat16", "bfloat16", b_layout="column")
PERMUTE = PermuteProblem.transposed(1, 1023, 1025, 2)


def test_own_problems_searched_and_kept():
    device, kept = current_gpu(), []
    with PoolRunner(0) as shop:
        keep = lambda digest, trial: kept.append(trial)  # noqa: E731
        done = list(now.tune([MATMUL, PERMUTE], device, shop, keep, Rules(), force=True))
    assert {outcome.problem for outcome in done} == {MATMUL, PERMUTE}
    for outcome in done:
        assert outcome.best is not None, outcome.failure
        assert outcome.best.error is not None
        assert outcome.best.registers > 0
    assert len(kept) >= sum(outcome.trials for outcome in done)
    assert {trial.problem for trial in kept} == {MATMUL, PERMUTE}


def test_checked_in_fp32_under_autocast(cuda_matmul):
    cuda_matmul.fp32_precision = "tf32"
    a = torch.ones(64, 64, device="cuda") + 2.0**-12  # more digits than TF32 and 16-bit types have
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with answers.torch_fp32():
            found = a @ a
        assert (a @ a).dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert (found.double() - a.double() @ a.double()).abs().max().item() < 1e-3
    assert cuda_matmul.fp32_precision == "tf32"
