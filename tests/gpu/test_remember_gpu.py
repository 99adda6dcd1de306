"""What is measured on a GPU is remembered: by the next process, and without measuring or compiling more."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tests.reference import assert_product, values
from tritile.choose.pick import trials
from tritile.core.device import current_gpu
from tritile.errors import NotTunedError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgotten")]


@pytest.fixture(autouse=True)
def _budget(monkeypatch):
    monkeypatch.setenv("TRITILE_TUNE_BUDGET", "5")


def measured(problem):
    return [trial for trial in trials(problem, current_gpu()) if trial.us is not None]


def test_measured_product_is_remembered(monkeypatch):
    a, b = values((200, 136), torch.float16, 0, "cuda"), values((136, 72), torch.float16, 1, "cuda")
    assert_product(tritile.matmul(a, b), a, b)
    assert tritile.plan(tritile.matmul, a, b).source in ("predicted", "model")
    with tritile.mode("strict"), pytest.raises(NotTunedError, match="200x72"):
        tritile.matmul(a.float(), b.float(), precision="tf32")  # no GPU was timed at these
    with tritile.mode("tune"), warnings.catch_warnings():
        warnings.simplefilter("error")  # it is measured in another process, or else said not to be
        assert_product(tritile.matmul(a, b), a, b)
        assert torch.equal(tritile.transpose(a), a.mT)
    plan = tritile.plan(tritile.matmul, a, b)
    assert plan.source == tritile.plan(tritile.transpose, a).source == "exact"
    assert plan.us > 0
    assert len(measured(plan.problem)) >= 2
    (winner,) = (t for t in measured(plan.problem) if t.config == plan.config)
    assert winner.error is not None  # its answer was checked
    assert plan.us == winner.us
    monkeypatch.setattr("tritile.tune.now.tuned_now", lambda *args: pytest.fail("measured again"))
    for mode in ("tune", "cached", "strict"):
        tritile.forget()
        with tritile.mode(mode):
            assert_product(tritile.matmul(a, b), a, b)
            assert torch.equal(tritile.transpose(a), a.mT)


def test_measuring_keeps_operands_fills_out():
    a, b = values((130, 64), torch.float32, 0, "cuda"), values((64, 70), torch.float32, 1, "cuda")
    before = a.clone(), b.clone()
    buffer = torch.full((130, 200), float("nan"), device="cuda")
    with tritile.mode("tune"):
        tritile.matmul(a, b, out=buffer[:, 50:120])
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    assert_product(buffer[:, 50:120], a, b)
    assert buffer[:, :50].isnan().all()
    assert buffer[:, 120:].isnan().all()


SCRIPT = """
import sys
import torch, triton, tritile
from tritile.tune import now
from tritile.tuner.measure import timing
from tritile.ops import request as ops_request

mode, forbidden = sys.argv[1], sys.argv[2] == "forbidden"
counted = []

def refuse(*args, **kwargs):
    raise SystemExit("measured in mode " + mode)

if forbidden:
    triton.testing.do_bench = timing.do_bench = now.tuned_now = refuse
torch.manual_seed(0)
a, b = torch.randn(104, 96, device="cuda").half(), torch.randn(96, 80, device="cuda").half()
with tritile.mode(mode):
    got = tritile.matmul(a, b)
    again = tritile.matmul(a, b)
assert torch.equal(got, again)
error = (got.double() - a.double() @ b.double()).abs().max().item()
assert error < 0.05, error
print(tritile.plan(tritile.matmul, a, b).source)
"""


def process(folder, mode, bench, compiled):
    """Run the script in a process of its own; its last word, and how many kernels it compiled."""
    env = dict(os.environ, TRITON_CACHE_DIR=str(folder / compiled))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, bench],
        capture_output=True, text=True, timeout=240, env=env, cwd=Path(tritile.__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernels = [path for ending in ("cubin", "hsaco") for path in (folder / compiled).rglob(f"*.{ending}")]
    return done.stdout.split()[-1], len(kernels)


def test_second_process_compiles_one(tmp_path):
    source, compiled = process(tmp_path, "tune", "allowed", "first")
    assert source == "exact"
    assert compiled >= 2
    assert process(tmp_path, "cached", "forbidden", "second") == ("exact", 1)
    assert process(tmp_path, "strict", "forbidden", "second") == ("exact", 1)  # on disk by now


@triton.jit
def strided(x_ptr, out_ptr, N, step, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at * step, mask=at < N)
    tl.store(out_ptr + at, value * scale, mask=at < N)


WARM = ((0, 1, 512, 2.0), (1, 1, 512, 2.0), (0, 16, 512, 2), (0, 3, 1, 0.5), (4, 2, 77, 3.0))


@pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")
def test_warm_calls_told_apart():
    kernel = tritile.autotune([triton.Config({"BLOCK": b}) for b in (128, 256)], [])(strided)
    base = torch.randn(9000, device="cuda")
    for _ in range(3):
        for offset, step, n, scale in WARM:
            x, out = base[offset:], torch.full((n,), float("nan"), device="cuda")
            for grid in (lambda meta: (triton.cdiv(meta["N"], meta["BLOCK"]),), (8,)):
                out.fill_(float("nan"))
                kernel[grid](x, out, n, step, scale)
                assert torch.equal(out, x[: n * step : step][:n] * scale)
    assert len(kernel.cache) == 1


FACTOR = tl.constexpr(3)


@triton.jit
def by_factor(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * FACTOR)


@pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")
def test_changed_global_as_triton(monkeypatch):
    kernel = tritile.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], [])(by_factor)
    x = torch.ones(64, device="cuda")
    for _ in range(3):
        kernel[(1,)](x)
    assert x[0] == 27
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(5))
    with pytest.raises(RuntimeError, match="FACTOR has changed"):
        kernel[(1,)](x)
    assert x[0] == 27


@triton.jit
def added_by_address(addresses, out, n, count: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of `count` tensors, whose addresses lie in memory of the GPU."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(count):
        x = tl.load(addresses + i).to(tl.pointer_type(tl.float32))
        total += tl.load(x + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


def test_addresses_as_numbers_measured_here():
    """Another process lacks that memory: there every config fails."""
    n, configs = 5000, [triton.Config({"BLOCK": block}) for block in (256, 512, 1024)]
    kernel = tritile.autotune(configs, ["n"])(added_by_address)
    tensors = [torch.randn(n, device="cuda") for _ in range(3)]
    addresses = torch.tensor([x.data_ptr() for x in tensors], device="cuda")
    out = torch.empty(n, device="cuda")
    with pytest.warns(tritile.errors.IsolationWarning, match=r"measured in this process.*every config"):
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](addresses, out, n, 3)
    torch.testing.assert_close(out, tensors[0] + tensors[1] + tensors[2])
    with tritile.mode("strict"):
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](addresses, out, n, 3)


@triton.jit
def beyond_the_view(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, at.to(tl.float32), mask=at < n)


def test_overwritten_view_measured_here():
    n, configs = 3000, [triton.Config({"BLOCK": block}) for block in (256, 1024)]
    kernel = tritile.autotune(configs, ["n"])(beyond_the_view)
    memory = torch.zeros(n, device="cuda")
    with pytest.warns(tritile.errors.IsolationWarning, match="outside the memory"):
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](memory[:1], n)
    assert torch.equal(memory, torch.arange(float(n), device="cuda"))
