"""Products of complex numbers, which torch computes: what tritile checks, refuses and writes.

Calls are made on host tensors that pass for a GPU's, where backends count.
"""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import tritile
from tests.drawn import linear, product, weighted, whole
from tritile.errors import InvalidValueError, OverlapError, UnsupportedError
from tritile.ops import aten as ops_aten
from tritile.ops import memo
from tritile.ops import products as ops_products
from tritile.ops import request as ops_request

C64, C128 = torch.complex64, torch.complex128


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    monkeypatch.setattr(ops_products, "on_host", lambda tensor: False)
    monkeypatch.setattr(ops_request, "planned", lambda *given: pytest.fail("planned"))
    tritile.forget()
    yield
    assert not memo.CALLS
    tritile.forget()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("made", "dtype", "times"),
    [(product, C64, 5), (product, C128, 5), (linear, C64, 2), (weighted, C128, 2)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_products(made, dtype, times, seed):
    draw = random.Random(f"{made.__name__} {dtype} {seed}")
    for _ in range(times):
        made(draw, dtype)


@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
def test_bits_of_torch_and_gradients(dtype):
    a, b, c, g = torch.randn(4, 3, 17, 17, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for ours, theirs, values in (
        (tritile.matmul, torch.matmul, (a, b.mH)),
        (tritile.mm, torch.mm, (a[0].conj(), b[0].mT)),
        (tritile.bmm, torch.bmm, (a, torch._neg_view(b))),
        (tritile.matmul, torch.matmul, (a[0, 0].conj(), b)),
        (tritile.linear, F.linear, (a, b[0], c[0, 0])),
        (tritile.linear, F.linear, (a, b[0])),
        (partial(tritile.addmm, alpha=2j), partial(torch.addmm, alpha=2j), (c[0, 0], a[0], b[0])),
        (partial(tritile.baddbmm, beta=1 - 1j), partial(torch.baddbmm, beta=1 - 1j), (c, a, b)),
    ):  # fmt: skip
        wanted = theirs(*values)
        assert torch.equal(ours(*values), wanted)
        leaves = [[x.detach().requires_grad_() for x in values] for _ in range(2)]
        grads = [
            torch.autograd.grad(call(*xs), xs, g.flatten()[: wanted.numel()].view(wanted.shape))
            for call, xs in zip((ours, theirs), leaves, strict=True)
        ]
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected)


def test_overlapping_out_is_refused():
    base = whole((3, 16, 16), C64, random.Random(1))
    a, b, out = base
    flat = base.flatten()
    for other in (a, b, flat[500:756].view(16, 16), out[:1].expand(16, 16)):
        with pytest.raises(OverlapError):
            tritile.matmul(a, b, out=other)
    with pytest.raises(OverlapError):
        tritile.addmm(flat[500:756].view(16, 16), a.clone(), b.clone(), out=out)
    c, d = a.clone(), b.clone()
    for alpha in (1, 2j):
        found = tritile.addmm(flat[500:756].view(16, 16), c, d, beta=0, alpha=alpha, out=out)
        assert torch.equal(found, alpha * (c @ d))


def test_nothing_to_plan_tune_explain():
    a, b = torch.empty(64, 32, dtype=C64), torch.empty(32, 48, dtype=C64)
    for what in (("matmul", a, b), ("addmm", torch.empty(48, dtype=C64), a, b), ("linear", a, b.t())):
        for ask, words in (
            (tritile.plan, {"device": "h200"}), (tritile.explain, {"device": "h200"}),
            (tritile.warm, {"device": "h200"}), (tritile.tune, {}), (tritile.bench, {}),
        ):  # fmt: skip
            with pytest.raises(UnsupportedError, match=f"{what[0]}: torch computes complex products"):
                ask(*what, **words)


def test_refused_before_any_launch(monkeypatch):
    a, b = (whole((4, 4), C64, random.Random(seed)) for seed in (1, 2))
    monkeypatch.setattr(ops_aten, "_MULTIPLY", lambda *given: pytest.fail("torch was called"))
    with (
        tritile.mode(backends="triton"),
        pytest.raises(UnsupportedError, match=r'backends is "triton": expected "triton,aten"'),
    ):
        tritile.matmul(a, b)
    for device in ("cpu", "meta"):
        with tritile.batch_invariant(), pytest.raises(UnsupportedError, match="expected real operands"):
            tritile.matmul(a.to(device), b.to(device))
    with pytest.raises(InvalidValueError, match="precision is 'ieee' for complex64 operands: expected None"):
        tritile.matmul(a, b, precision="ieee")


def test_what_torch_refuses_is_said(monkeypatch):
    a = torch.ones(4, 4, dtype=C64)
    for error, expected in (
        (RuntimeError("not today"), UnsupportedError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
    ):

        def refuse(*given, error=error):
            raise error

        monkeypatch.setattr(ops_aten, "_MULTIPLY", refuse)
        with pytest.raises(expected, match=str(error)):
            tritile.matmul(a, a)


def test_any_of_torchs_settings_will_do(cuda_matmul):
    a, b = (whole((4, 4), C64, random.Random(seed)) for seed in (1, 2))
    torch.use_deterministic_algorithms(True)
    try:
        for setting in ("ieee", "tf32"):
            cuda_matmul.fp32_precision = setting
            assert torch.equal(tritile.matmul(a, b), a @ b)
    finally:
        torch.use_deterministic_algorithms(False)
