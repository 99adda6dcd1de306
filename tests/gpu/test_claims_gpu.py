"""A GPU that is busy, in whatever stream, is not measured on: its kernels may wait for another rank."""

import time

import pytest
import torch
import triton
import triton.language as tl

import tritile
from tritile.tuner.store import claims

pytestmark = [pytest.mark.gpu, pytest.mark.serial, pytest.mark.usefixtures("forgotten")]
BUSY_CYCLES = 8_000_000_000  # four seconds and more


@triton.jit
def noted(used, N, BLOCK: tl.constexpr):
    tl.store(used, BLOCK)


def occupy():
    """Set another stream of the GPU to work, and return it."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
    return stream


def test_kernel_on_a_busy_gpu_is_measured_later():
    kernel = tritile.autotune([triton.Config({"BLOCK": block}) for block in (16, 32)], ["N"])(noted)
    used = torch.zeros(1, dtype=torch.int32, device="cuda")

    def called(mode):
        with tritile.mode(mode):
            kernel[(1,)](used, 5)
        return dict(kernel.cache)

    called("off")  # loads what runs below: loading may wait for the GPU
    stream, started = occupy(), time.monotonic()
    assert called("tune") == {}, "tentative"
    assert time.monotonic() - started < 3
    assert not stream.query(), "the call did not wait for the GPU"
    torch.cuda.synchronize()
    time.sleep(claims.RETRY_S)
    assert len(called("tune")) == 1


def test_product_on_a_busy_gpu_is_measured_later():
    a, b = (torch.randn(200, 200, device="cuda", dtype=torch.float16) for _ in range(2))
    tritile.matmul(a, b)
    stream = occupy()
    with tritile.mode("tune"):
        tritile.matmul(a, b)
        assert not stream.query(), "the call did not wait for the GPU"
        assert tritile.plan(tritile.matmul, a, b).source != "exact"
        torch.cuda.synchronize()
        time.sleep(claims.RETRY_S)
        tritile.matmul(a, b)
    assert tritile.plan(tritile.matmul, a, b).source == "exact"
