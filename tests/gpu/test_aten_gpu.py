"""Calls that torch's own kernel makes on a GPU: right, into any `out`, and by torch's settings at each call.

Every call that torch may make is planned so here. Answers are compared with float64, never with torch alone.
"""

import itertools
import math

import pytest
import torch

import tritile
from tests.launched import captured, replayed
from tests.reference import (
    DEFAULT_OUT,
    FP8,
    Sides,
    assert_complex,
    assert_fused,
    assert_product,
    frame,
    guard_intact,
    name,
    placed,
    values,
)
from tests.scales import scale
from tritile.choose import aten, gpu_tables, pick
from tritile.core import device as devices
from tritile.core.problem import MatmulProblem
from tritile.families import torch_kernels
from tritile.lab.bench import measured
from tritile.ops import memo

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = FP8
COMPLEX = torch.complex64, torch.complex128


def check(got, a, b):
    assert got.dtype == DEFAULT_OUT.get(a.dtype, a.dtype)
    (assert_complex if a.is_complex() else assert_product)(got, a, b)


KINDS = [BF16, FP16, FP32, FP64, *COMPLEX]
LAYOUTS = [("row", "row"), ("row", "column"), ("column", "row"), ("padded", "column_padded")]
LAID = [*itertools.product(KINDS, LAYOUTS), *((dtype, ("sparse", "strided")) for dtype in COMPLEX)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("dtype", "layouts"), LAID, ids=str)
def test_dtypes_layouts_and_views_of_out(by_torch, dtype, layouts):
    """Complex operands are lazily conjugated, or negated, too."""
    lazy = [lambda x: x, torch.conj, torch._neg_view] if dtype.is_complex else [lambda x: x]
    for m, n, k in ((128, 192, 256), (131, 97, 61), (1, 64, 32), (17, 1, 64)):
        a, b = values((m, k), dtype, 0, "cuda"), values((k, n), dtype, 1, "cuda")
        for seen in lazy:
            x, y = seen(placed(a, layouts[0])), placed(b, layouts[1])
            given = x.resolve_neg()
            for _ in range(2):  # the second call is a remembered one
                check(tritile.matmul(x, y), given, b)
            for layout in ("padded", "column_padded", "sliced", "offset", "sparse"):
                buffer, out = frame((m, n), DEFAULT_OUT.get(dtype, dtype), layout, "cuda")
                for _ in range(2):
                    assert tritile.matmul(x, y, out=out) is out
                    check(out, given, b)
                assert guard_intact(buffer, out), (m, n, k, layout)
    assert bool(by_torch) != dtype.is_complex, "torch computes these before anything is planned"


def test_batches_linear_and_bias(by_torch):
    a, b, w = (
        values((2, 3, 40, 64), BF16, 0, "cuda"),
        values((64, 72), BF16, 1, "cuda"),
        values((72, 64), BF16, 2, "cuda"),
    )
    bias = values((72,), BF16, 3, "cuda")
    for _ in range(2):
        check(tritile.matmul(a, b), a, b)
        check(tritile.matmul(a, b.expand(2, 3, 64, 72).contiguous()), a, b)
        check(tritile.bmm(a[0], b.expand(3, 64, 72).contiguous()), a[0], b)
        check(tritile.linear(a, w), a, w.t())
        wanted = a.double() @ w.double().t() + bias.double()
        torch.testing.assert_close(tritile.linear(a, w, bias).double(), wanted, rtol=2**-7, atol=0.1)
        out = torch.empty(40, 72, dtype=BF16, device="cuda")
        assert tritile.linear(a[0, 0], w, bias, out=out) is out
        torch.testing.assert_close(out.double(), wanted[0, 0], rtol=2**-7, atol=0.1)
    assert len(by_torch) == 12


def test_epilogues_that_torch_launches_for(by_torch):
    x, w = values((1000, 520), FP32, 0, "cuda"), values((1030, 520), FP32, 1, "cuda")
    row, full = values((1030,), FP32, 2, "cuda"), values((1000, 1030), FP32, 3, "cuda")
    sums = x.double() @ w.double().t()
    for _ in range(2):
        got = [
            tritile.linear(x, w, row, activation="silu", residual=full),
            tritile.addmm(full, x, w.t(), alpha=2, beta=-1),
            tritile.addmm(row, x, w.t()),
            tritile.addmm(full * torch.nan, x, w.t(), beta=0, activation="relu"),
            tritile.linear(x.view(10, 100, 520), w, residual=row).view(1000, 1030),
            tritile.addmm(out := full.clone(), x, w.t(), out=out),
        ]
        wanted = [
            torch.nn.functional.silu(sums + row) + full, 2 * sums - full, row + sums, sums.relu(), sums + row,
            full + sums,
        ]  # fmt: skip
        for mine, right in zip(got, wanted, strict=True):
            assert mine.dtype == FP32
            torch.testing.assert_close(mine.double(), right.double(), rtol=1e-4, atol=1e-3)
    a, b, c = (values((3, 600, 600), FP32, seed, "cuda") for seed in range(3))
    torch.testing.assert_close(
        tritile.baddbmm(c, a, b).double(), c.double() + a.double() @ b.double(), rtol=1e-4, atol=1e-3
    )
    assert len(by_torch) == 13


def test_nan_and_empty(by_torch):
    a, b = values((64, 32), BF16, 0, "cuda"), values((32, 48), BF16, 1, "cuda")
    a[3, 5] = torch.nan
    got = tritile.matmul(a, b)
    assert got[3].isnan().all()
    assert not got[torch.arange(64, device="cuda") != 3].isnan().any()
    assert tritile.matmul(a[:, :0], b[:0]).eq(0).all()
    assert tritile.matmul(a[:0], b).shape == (0, 48)


def test_settings_between_calls_of_one_problem(by_torch, cuda_matmul):
    a, b = values((256, 512), FP32, 0, "cuda"), values((512, 256), FP32, 1, "cuda")
    for _ in range(2):
        for setting, precision in (("ieee", "ieee"), ("tf32", "tf32")):
            cuda_matmul.fp32_precision = setting
            assert_product(tritile.matmul(a, b), a, b, precision)
            before = len(by_torch)
            for named in ("ieee", "tf32"):
                assert_product(tritile.matmul(a, b, precision=named), a, b, named)
            assert len(by_torch) - before <= 1, "torch makes the one that it is set to"
    tight = (tritile.matmul(a, b, precision="ieee").double() - a.double() @ b.double()).abs().max()
    assert tight < 1e-3, "plain fp32 while torch is set to TF32"
    before = len(by_torch)
    torch.use_deterministic_algorithms(True)
    try:
        assert_product(tritile.matmul(a, b), a, b, "tf32")
    finally:
        torch.use_deterministic_algorithms(False)
    with tritile.batch_invariant():
        tritile.matmul(a.bfloat16(), b.bfloat16())
    with tritile.mode(backends="triton"):
        tritile.matmul(a.bfloat16(), b.bfloat16())
    assert len(by_torch) == before


@pytest.mark.parametrize("dtype", COMPLEX, ids=name)
def test_sums_with_complex_weights(by_torch, dtype):
    a, b, added = (
        values(shape, dtype, i, "cuda") for i, shape in enumerate([(3, 131, 75), (3, 75, 66), (131, 66)])
    )
    words = {"beta": 0.5 - 2j, "alpha": 1 + 3j}
    wide = [x.to(torch.complex128, copy=True) for x in (added, a, b)]
    wanted = (words["beta"] * wide[0].conj() + words["alpha"] * (wide[1] @ wide[2])).to(dtype)
    near = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.complex64 else {"rtol": 1e-12, "atol": 1e-11}
    nothing = torch.full_like(added, math.nan)
    for _ in range(2):
        torch.testing.assert_close(tritile.baddbmm(added.conj(), a, b, **words), wanted, **near)
        buffer, out = frame((131, 66), dtype, "sliced", "cuda")
        assert tritile.addmm(added.conj(), a[0], b[0], out=out, **words) is out
        torch.testing.assert_close(out, wanted[0], **near)
        assert guard_intact(buffer, out)
        got = tritile.linear(a, b[0].mT, added[0], residual=added)
        torch.testing.assert_close(got, (wide[1] @ wide[2][0] + wide[0][0] + wide[0]).to(dtype), **near)
        got = tritile.addmm(nothing, a[0], b[0], beta=0, alpha=1j)
        torch.testing.assert_close(got, (1j * (wide[1][0] @ wide[2][0])).to(dtype), **near)
    for alpha in (1, 2j):  # what is not read may overlap out
        flat = torch.empty(2 * added.numel(), dtype=dtype, device="cuda")
        out, unread = (flat[i : i + added.numel()].view(added.shape) for i in (0, 100))
        tritile.addmm(unread, a[0], b[0], beta=0, alpha=alpha, out=out)
        torch.testing.assert_close(out, (alpha * (wide[1][0] @ wide[2][0])).to(dtype), **near)
    out = added.clone()
    assert tritile.addmm(out, a[0], b[0], out=out, alpha=0, beta=2) is out
    assert torch.equal(out, 2 * added)
    graph, got = captured(lambda: tritile.addmm(added.conj(), a[0], b[0], **words))
    a.neg_()
    graph.replay()
    torch.cuda.synchronize()
    again = words["beta"] * wide[0].conj() - words["alpha"] * (wide[1] @ wide[2])[0]
    torch.testing.assert_close(got, again.to(dtype), **near)


def test_captured_on_another_stream_and_differentiated(by_torch):
    a, b = values((64, 128), BF16, 0, "cuda"), values((128, 96), BF16, 1, "cuda")
    tritile.matmul(a, b)
    graph, got = captured(lambda: tritile.matmul(a, b))
    a.neg_()
    graph.replay()
    torch.cuda.synchronize()
    check(got, a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = tritile.matmul(a, b)
    stream.synchronize()
    assert torch.equal(there, got), "repeats bit for bit"
    x = a.clone().requires_grad_()
    tritile.matmul(x, b).sum().backward()
    torch.testing.assert_close(x.grad.double(), b.double().sum(1).expand_as(x), rtol=2**-6, atol=0.2)
    assert by_torch
    a, b = (values(s, COMPLEX[0], i, "cuda").requires_grad_() for i, s in enumerate(((33, 64), (64, 35))))
    for call in (tritile.matmul, torch.compile(tritile.matmul, fullgraph=True)):
        y = call(a, b)
        g = values(tuple(y.shape), COMPLEX[0], 2, "cuda")
        of_a, of_b = torch.autograd.grad(y, (a, b), g)
        assert_complex(of_a, g, b.detach().mH)
        assert_complex(of_b, a.detach().mH, g)


@pytest.mark.parametrize("trains", [False, True])
def test_a_compiled_call_is_torchs_own(by_torch, monkeypatch, trains):
    torch.compiler.reset()
    graphs = []

    def noted(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._inductor.compile(graph, inputs) if not trains else graph

    def block(x, y, w, bias):
        return tritile.linear(tritile.matmul(x, y) + 1, w, bias) * 2

    a, b = values((96, 64), BF16, 0, "cuda"), values((64, 128), BF16, 1, "cuda")
    w, bias = values((32, 128), BF16, 2, "cuda"), values((32,), BF16, 3, "cuda")
    given = [each.requires_grad_(trains) for each in (a, b, w, bias)]
    wanted = block(*given)
    compiled = torch.compile(block, backend=noted, fullgraph=True, dynamic=False)
    got = compiled(*given)
    torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-6 * float(wanted.detach().abs().max()))
    assert graphs
    assert not any("tritile" in name for name in graphs[0]), graphs
    if trains:
        for mine, theirs in zip(
            torch.autograd.grad(got.sum(), given), torch.autograd.grad(wanted.sum(), given), strict=True
        ):
            scale = float(theirs.abs().max())
            torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-6 * scale)
    with tritile.batch_invariant():
        compiled(*given)
    compiled(*given)
    assert len(graphs) == 2
    assert sum("tritile" in name for name in graphs[1]) == 2
    torch.compiler.reset()


@pytest.mark.parametrize("size", [(256, 320, 512), (77, 528, 272), (17, 48, 96), (1, 256, 1024)], ids=str)
def test_bytes(by_torch, size):
    """fp8 without scales, with one for each operand and with one for each row and column; int8."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8")
    m, n, k = size
    for a_dtype, b_dtype in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)):
        a, b = values((m, k), a_dtype, 0, "cuda"), placed(values((k, n), b_dtype, 1, "cuda"), "column")
        pairs = [(scale(), scale(seed=3)), (scale(m, 1), scale(1, n, seed=3))]
        for _ in range(2):
            assert_fused(tritile.matmul(a, b), a, b, Sides())
            for scales, kind in itertools.product(pairs, (BF16, FP16, FP32)):
                scales = tuple(each.cuda() for each in scales)
                bias = None if kind == FP32 else values((n,), kind, 2, "cuda")
                out = torch.full((m, n), torch.nan, dtype=kind, device="cuda")
                for given in (None, out):
                    got = tritile.scaled_matmul(a, b, *scales, out_dtype=kind, bias=bias, out=given)
                    assert_fused(got, a, b, Sides(*scales, bias))
            fast = tritile.matmul(a, b, precision="fast").double()
            exact = a.double() @ b.double()
            assert (fast - exact).norm() <= 2e-2 * exact.norm()
    a, b = values((m, k), torch.int8, 0, "cuda"), placed(values((k, n), torch.int8, 1, "cuda"), "column")
    for _ in range(2):
        got = tritile.matmul(a, b)
        assert torch.equal(got.long(), (a.double() @ b.double()).long())
    assert torch.equal(replayed(lambda: tritile.matmul(a, b)), got)
    assert by_torch


def test_scale_of_one_outside_graphs(by_torch, monkeypatch):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8")
    monkeypatch.setattr(torch_kernels, "_ones", {})
    a, b = values((64, 96), E4M3, 0, "cuda"), placed(values((96, 48), E4M3, 1, "cuda"), "column")
    with tritile.mode(backends="triton"):
        tritile.matmul(a, b)  # so that tritile's kernel is compiled
    for by in (False, True):  # a call that was prepared within a graph stays as it is
        assert_fused(replayed(lambda: tritile.matmul(a, b)), a, b, Sides())
        assert bool(by_torch) == by
        tritile.forget()
        assert_fused(tritile.matmul(a, b), a, b, Sides())
        assert by_torch


def test_drawn_call_planned_and_tuned(monkeypatch):
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    device = devices.gpu(0)
    if gpu_tables.predictor("bf16_nn", device) is None:
        pytest.skip("no table of this GPU has torch's times")
    a, b = values((4096, 4096), BF16, 0, "cuda"), values((4096, 4096), BF16, 1, "cuda")
    assert tritile.plan(tritile.matmul, a, b).other_us, "both are known"
    a, b = values((300, 777), BF16, 0, "cuda"), values((777, 500), BF16, 1, "cuda")
    with tritile.mode("tune"):
        assert_product(tritile.matmul(a, b), a, b)
        plan = tritile.plan(tritile.matmul, a, b)
    assert plan.source == "exact"
    assert plan.other_us, "both were timed"
    (ready,) = (each for known in memo.CALLS.values() for each in known)
    assert ready.by_torch == (plan.config == aten.CONFIG)
    found = measured(MatmulProblem(1, 256, 512, 384, "float64", "float64"))
    assert found.config == aten.CONFIG, "by the rule of the table"
    assert found.triton_us != found.tritile_us, "both columns are timed"
    pick.forget()
