"""torch's products of fp8, int8 and groups: which calls it may make, and with which arguments.

Calls are made on host tensors that pass for a GPU's. In the place of torch's operators stand references that
refuse what torch refuses on a GPU: strides, alignment and sizes; and leave NaN where torch writes nothing.
"""

import gc
import itertools
import math
import weakref
from dataclasses import replace

import pytest
import torch

import tritile
from tests.groups import OFFSETS, assert_groups, ends_of, offsets, operands, spoiled
from tests.reference import Sides, assert_fused, frame, guard_intact, placed, values
from tests.scales import assert_block_scaled, blocks_of, scale
from tritile.choose import aten, pick
from tritile.core.device import target_device
from tritile.core.problem import GroupedProblem, MatmulProblem
from tritile.errors import GradientError, UnsupportedError
from tritile.families import torch_kernels
from tritile.ops import aten as ops_aten
from tritile.ops import grouped
from tritile.ops import request as ops_request
from tritile.tune.subject import torch_calls

H200 = target_device("nvidia-h200")
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARED = list(itertools.product((1, 128), repeat=2))
FP8_NT = MatmulProblem(1, 256, 512, 1024, "float8_e4m3fn", "bfloat16", b_layout="column")
INT8_NT = replace(FP8_NT, dtype="int8", out_dtype="int32")
BLOCKS = replace(FP8_NT, block_scales="1x128")
GROUPS = GroupedProblem(8, 256, 512, 1024, "bfloat16", "bfloat16", b_layout="column")
FP8_GROUPS = replace(GROUPS, dtype="float8_e4m3fn", scaled=True)


def demand(condition, what):
    """As torch says what it does not support."""
    if not condition:
        raise ValueError(f"torch wants {what}")


def demand_bytes(a, b, multiple):
    demand(a.stride(-1) == 1 and a.stride(-2) >= a.shape[-1] and b.stride(-2) == 1, "row by column")
    demand(not (a.data_ptr() % 16 or b.data_ptr() % 16), "addresses on 16 bytes")
    demand(a.stride(-2) % 16 == b.stride(-1) % 16 == 0, "rows on 16 bytes")
    demand(b.shape[-1] % multiple == b.shape[-2] % multiple == 0, f"multiples of {multiple}")


class Torch:
    """Stands for torch's operators, and keeps the arguments of each call."""

    def __init__(self):
        self.calls = []

    def scaled_mm(self, a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False, out=None):
        demand_bytes(a, b, 16)
        demand((a.dtype, b.dtype) != (E5M2, E5M2), "float8_e4m3fn")
        whole = scale_a.numel() == scale_b.numel() == 1
        by_row = scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1])
        demand(whole or (by_row and scale_a.is_contiguous() and scale_b.is_contiguous()), "scales")
        demand(bias is None or (bias.dtype == out_dtype != FP32 and bias.shape == b.shape[1:]), "bias")
        demand(out is None or (out.is_contiguous() and out.dtype == out_dtype), "out")
        self.calls.append((use_fast_accum, scale_a, scale_b))
        made = (a.double() @ b.double()) * scale_a.double() * scale_b.double()
        made = (made if bias is None else made + bias.double()).to(out_dtype)
        return made if out is None else out.copy_(made)

    def int_mm(self, a, b, out=None):
        demand(len(a) > 16, "more than 16 rows")
        demand(a.shape[1] % 8 == b.shape[1] % 8 == 0, "multiples of 8")
        self.calls.append(())
        made = (a.double() @ b.double()).int()
        return made if out is None else out.copy_(made)

    def by_recipe(self, a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
        demand_bytes(a, b, 16)
        demand(a.dtype == b.dtype == E4M3, "float8_e4m3fn")
        blocks, wide = -(-a.shape[1] // 128), []
        kinds = torch.nn.functional.ScalingType
        demand((recipe_a, recipe_b) != (kinds.BlockWise128x128,) * 2, "one of 1x128")
        for x, given, recipe in ((a, scale_a, recipe_a), (b.t(), scale_b, recipe_b)):
            if recipe == kinds.BlockWise1x128:
                shape = (len(x), blocks)
                own = given
            else:
                shape = (-(-blocks // 4) * 4, -(-len(x) // 128))
                own = given.t().repeat_interleave(128, 0)
            demand(given.shape == shape and given.stride() == (1, shape[0]), f"scales as {shape} by columns")
            demand(given.data_ptr() % 16 == shape[0] % 4 == 0, "columns of scales on 16 bytes")
            own = own[: len(x), :blocks].repeat_interleave(128, 1)[:, : x.shape[1]]
            wide.append(x.double() * own.double())
        self.calls.append((scale_a, scale_b))
        return (wide[0] @ wide[1].t()).to(output_dtype)

    def grouped_mm(self, a, b, offs):
        demand(a.dtype == b.dtype == BF16, "bfloat16")
        for x in (a, b):
            lead = x.stride(-2) if x.stride(-1) == 1 else x.stride(-1)
            demand(1 in x.stride()[-2:] and lead % 8 == x.data_ptr() % 16 == 0, "rows on 16 bytes")
        demand(len(offs) < 1024, "fewer groups")
        self.calls.append((a, b))
        if b.ndim == 2:  # an assertion on the GPU, which ends the process's use of it
            demand(a.stride(0) == b.stride(1) == 1, "groups that begin at any row")
            demand(a.shape[0] % 8 == b.shape[1] % 8 == 0, "whole words")
        return self._by_groups(a, b, offs)

    def scaled_grouped_mm(self, a, b, scale_a, scale_b, offs, out_dtype, use_fast_accum):
        demand_bytes(a, b, 16)
        demand(a.dtype == b.dtype == E4M3 and out_dtype == BF16, "float8_e4m3fn")
        demand(scale_a.shape == (len(a),) and scale_b.shape == (len(b), b.shape[2]), "scales")
        self.calls.append((use_fast_accum, a))
        rows = a.double() * scale_a.double()[:, None].nan_to_num(0)
        return self._by_groups(rows, b.double() * scale_b.double()[:, None], offs, BF16)

    def _by_groups(self, a, b, offs, dtype=None):
        ends = [0, *offs.tolist()]
        demand(ends == sorted(ends), "offsets that do not fall")
        shape = (len(offs), len(a), b.shape[1]) if b.ndim == 2 else (len(a), b.shape[2])
        out = torch.full(shape, math.nan, dtype=torch.float64)
        for g, (start, end) in enumerate(itertools.pairwise(ends)):
            if b.ndim == 2:
                out[g] = a[:, start:end].double() @ b[start:end].double()
            else:
                out[start:end] = a[start:end].double() @ b[g].double()
        return out.to(dtype or a.dtype)


@pytest.fixture
def torch_is(monkeypatch):
    """Has every call that torch may make planned so; returns what stands for torch's operators."""
    fake = Torch()
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")

    def is_by_aten(problem, index):
        if problem.needs_torch:
            return pick.plan_for(problem, H200, None, True).config == aten.CONFIG
        return aten.illegal(problem) is None

    def prepared(call, *how):
        pick.plan_for(call.problem, H200, None, False)  # refuses what is torch's alone
        pytest.fail("tritile's kernel was to run")

    for module in (ops_request, grouped):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    monkeypatch.setattr(ops_request, "is_by_aten", is_by_aten)
    monkeypatch.setattr(ops_request, "prepared", prepared)
    monkeypatch.setattr(ops_aten, "scaled_mm", fake.scaled_mm)
    monkeypatch.setattr(ops_aten, "int_mm", fake.int_mm)
    monkeypatch.setattr(torch_kernels, "block_scaled_mm", fake.by_recipe)
    monkeypatch.setattr(torch_kernels, "grouped_mm", fake.grouped_mm)
    monkeypatch.setattr(torch_kernels, "scaled_grouped_mm", fake.scaled_grouped_mm)
    monkeypatch.setattr(torch_kernels, "zero_past", lambda out, ends: out[int(ends[-1]) :].zero_())
    monkeypatch.setattr(torch_kernels, "_ones", {})
    monkeypatch.setattr(ops_aten, "capability", lambda device: (9, 0))
    tritile.forget()
    yield fake
    tritile.forget()


ours = pytest.raises(pytest.fail.Exception, match="tritile's kernel")


def test_torch_predicted_at_swept_products():
    swept = [FP8_NT, INT8_NT, replace(FP8_NT, epilogue="scale_a=one scale_b=one bias=row")]
    others = [replace(FP8_NT, precision="fast"), replace(FP8_NT, epilogue="scale_a=column scale_b=row")]
    assert [aten.matches_sweeps(each) for each in (*swept, *others)] == [True] * 3 + [False] * 2
    kinds = [aten.kind_of(each) for each in (INT8_NT, *others, GROUPS)]
    assert kinds == ["int8 ieee", "float8_e4m3fn fast", "float8_e4m3fn ieee rows", "grouped bfloat16"]


# Products of fp8 and int8.


@pytest.mark.parametrize("b_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_scales_of_fp8(torch_is, b_dtype, by_row, out_dtype):
    m, n, k = 37, 48, 96
    a, b = values((m, k), E4M3), placed(values((k, n), b_dtype, 1), "column")
    scales = (scale(m, 1), scale(1, n, seed=3)) if by_row else (scale(), scale(1, seed=3))
    bias = None if out_dtype == FP32 else values((n,), out_dtype, 2)
    for fast, given in itertools.product((False, True), repeat=2):
        buffer, out = frame((m, n), out_dtype, "row") if given else (None, None)
        for _ in range(2):  # the second one is remembered
            how = {"bias": bias, "out_dtype": out_dtype, "use_fast_accum": fast, "out": out}
            got = tritile.scaled_matmul(a, b, *scales, **how)
            assert got.dtype == out_dtype
            assert_fused(got, a, b, Sides(*scales, bias))
            assert torch_is.calls[-1][0] is fast
        assert out is None or (got is out and guard_intact(buffer, out))


def test_scales_torch_does_not_take(torch_is):
    a, b = values((37, 96), E4M3), placed(values((96, 48), E4M3, 1), "column")
    one, rows, columns, bias = scale(), scale(37, 1), scale(1, 48), values((48,), BF16)
    tritile.scaled_matmul(a, b, one, one, bias=bias)
    for scales, how in (
        ((scale(74, 1)[::2], columns), {}),
        ((one, one), {"bias": bias.float()}),
        ((one, one), {"bias": values((96,), BF16)[::2]}),
        ((one, one), {"bias": bias[None]}),
        ((one, one), {"bias": bias, "out_dtype": FP16}),
        ((rows, columns), {"out": torch.empty(37, 64, dtype=BF16)[:, :48]}),
    ):
        with ours:
            tritile.scaled_matmul(a, b, *scales, **how)
    for x, y in ((values((37, 97), E4M3)[:, 1:], b), (a, b.contiguous())):
        with ours:
            tritile.scaled_matmul(x, y, one, one)
    assert len(torch_is.calls) == 1


def test_shared_scale_of_one(torch_is, monkeypatch):
    a, b = values((37, 96), E4M3), placed(values((96, 48), E4M3, 1), "column")
    monkeypatch.setattr(torch_kernels, "capturing", lambda: True)
    with ours:  # it would be made within a graph, and lost with it
        tritile.matmul(a, b)
    monkeypatch.setattr(torch_kernels, "capturing", lambda: False)
    assert_fused(tritile.matmul(a, b, precision="fast"), a, b, Sides())
    monkeypatch.setattr(torch_kernels, "capturing", lambda: True)
    out = torch.empty(37, 48, dtype=FP32)
    assert_fused(tritile.matmul(a, b, out_dtype=FP32, out=out), a, b, Sides())
    (fast, *ones), (slow, *same) = torch_is.calls
    assert (fast, slow) == (True, False)
    assert all(each is ones[0] for each in (*ones, *same))
    with ours:
        tritile.bmm(a[None], b[None])


def test_int8(torch_is):
    for m in (17, 40):
        a, b = values((m, 64), INT8), placed(values((64, 48), INT8, 1), "column")
        for out in (None, torch.empty(m, 48, dtype=torch.int32)):
            got = tritile.matmul(a, b, out=out)
            assert got.dtype == torch.int32
            assert torch.equal(got.long(), a.long() @ b.long())
    for x, y in ((a[:16], b), (a, b.contiguous()), (a[:, :63], b[:63])):
        with ours:
            tritile.matmul(x, y)
    with ours:
        tritile.scaled_matmul(a, b, scale(), scale())
    assert len(torch_is.calls) == 4


# Scales for each 128 of K: torch's alone.


@pytest.mark.parametrize("shared", SHARED, ids=str)
@pytest.mark.parametrize("size", [(130, 160, 304), (1, 16, 640), (64, 128, 512)], ids=str)
def test_scales_for_each_128_of_k(torch_is, shared, size):
    m, n, k = size
    a, b = values((m, k), E4M3), placed(values((k, n), E4M3, 1), "column")
    scales = blocks_of(m, n, k, shared)
    for layout in ("row", "column", "sparse"):
        lain = [placed(each, layout) for each in scales]
        for _ in range(2):
            assert_block_scaled(tritile.scaled_matmul(a, b, *lain), a, b, *scales, shared)
    calls = len(torch_is.calls)
    bias, residual = values((n,), FP32, 2), values((m, n), BF16, 3)
    for out_dtype in (BF16, FP16, FP32):
        how = {"bias": bias, "residual": residual, "activation": "silu", "out_dtype": out_dtype}
        buffer, out = frame((m, n), out_dtype, "column")
        for given in (None, out, out):
            got = tritile.scaled_matmul(a, b, *scales, **how, out=given)
            assert got.dtype == out_dtype
            assert_block_scaled(got, a, b, *scales, shared, Sides(None, None, bias, residual, "silu"))
        assert guard_intact(buffer, out)
    assert (calls, len(torch_is.calls)) == (6, 15)


def test_torch_layouts_are_not_copied(torch_is):
    a, b = values((64, 512), E4M3), placed(values((512, 128), E4M3, 1), "column")
    of_a, of_b = (placed(each, "column") for each in blocks_of(64, 128, 512, (1, 128)))
    tritile.scaled_matmul(a, b, of_a, of_b)
    rows, columns = placed(values((24, 40), BF16), "column"), values((40, 16), BF16, 1)
    tritile.grouped_matmul(rows, columns, offsets("uneven"))
    for given, got in zip(((of_a, of_b), (rows, columns)), torch_is.calls, strict=True):
        assert [each.data_ptr() for each in got] == [each.data_ptr() for each in given]
    shifted = torch.empty(64 * 4 + 1)[1:].view(4, 64).t().copy_(of_a)
    assert_block_scaled(tritile.scaled_matmul(a, b, shifted, of_b), a, b, of_a, of_b, (1, 128))


def test_a_remembered_call_keeps_no_tensor(torch_is):
    a, b = values((64, 512), E4M3), placed(values((512, 128), E4M3, 1), "column")
    scales, residual = blocks_of(64, 128, 512, (1, 128)), values((64, 128), BF16, 3)
    tritile.scaled_matmul(a, b, *scales, residual=residual)
    seen = [weakref.ref(each) for each in (a, b, *scales, residual)]
    del a, b, scales, residual
    torch_is.calls.clear()
    gc.collect()
    assert [each() for each in seen] == [None] * 5


def test_scales_of_k_are_refused(torch_is, monkeypatch):
    a, b = values((64, 512), E4M3), placed(values((512, 128), E4M3, 1), "column")
    scales = blocks_of(64, 128, 512, (1, 128))
    for x, y, why in (
        (a[:, :500], b[:500], "multiples of 16, not 128 and 500"),
        (a, b.contiguous(), "contiguous rows of a and columns of b"),
        (a, b.to(E5M2), "requires float8_e4m3fn for a and b"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            tritile.scaled_matmul(x, y, *scales)
    with tritile.batch_invariant(), pytest.raises(UnsupportedError, match="depend on the number of rows"):
        tritile.scaled_matmul(a, b, *scales)
    assert not torch_is.calls

    def refused(*given, **how):
        raise ValueError("scaling is only supported on SM90")

    monkeypatch.setattr(torch_kernels, "block_scaled_mm", refused)
    with pytest.raises(UnsupportedError, match=r"only torch computes this, and it fails: .*scaling is only"):
        tritile.scaled_matmul(a, b, *scales)


def test_scaled_additions_have_gradients(torch_is):
    a, b = values((64, 512), E4M3), placed(values((512, 128), E4M3, 1), "column")
    bias, residual = torch.zeros(128, requires_grad=True), torch.zeros(64, 128, requires_grad=True)
    scales = blocks_of(64, 128, 512, (1, 128))
    tritile.scaled_matmul(a, b, *scales, bias=bias, residual=residual, out_dtype=FP32).sum().backward()
    assert torch.equal(bias.grad, torch.full((128,), 64.0))
    assert torch.equal(residual.grad, torch.ones(64, 128))


# Groups.

SIZES = {"rows": (40, 48, 32), "columns": (48, 40, 32), "k": (21, 35, 40)}


def posed(ragged, offs, dtype):
    a, b = operands(ragged, len(offs), SIZES[ragged], dtype)
    spoiled(a, b, offs, ragged)
    return (a, b) if ragged == "k" else (a, placed(b, "column"))


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("ragged", ["rows", "columns"])
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_groups(torch_is, ragged, kind, dtype):
    offs = offsets(kind)
    a, b = posed(ragged, offs, dtype)
    buffer, out = frame((40, 48) if ragged == "rows" else (48, 40), BF16, "column")
    for given in (None, None, out, out):
        got = tritile.grouped_matmul(a, b, offs, out=given)
        assert got.dtype == BF16
        assert given is not None or got.is_contiguous()
        assert_groups(got, a, b, offs)
    assert guard_intact(buffer, out)
    assert len(torch_is.calls) == 4


@pytest.mark.parametrize("ragged", ["rows", "columns", "none"])
@pytest.mark.parametrize("precision", [None, "fast"])
def test_scales_of_groups(torch_is, ragged, precision):
    """Powers of two, whose rounding nothing shows, and NaN where no group reads them."""
    offs, groups = offsets("a rest") if ragged != "none" else None, 4
    a, b = operands(ragged, groups, SIZES.get(ragged, (9, 32, 48)), E4M3)
    b = placed(b, "column")
    of_a, of_b = ((a.shape[:-1]), (*b.shape[:-2], b.shape[-1]))
    scale_a, scale_b = (torch.exp2(values(s, FP32, i).round()) for i, s in enumerate((of_a, of_b)))
    how = {"scale_a": scale_a, "scale_b": scale_b, "precision": precision}
    got = tritile.grouped_matmul(a, b, offs, **how)
    assert got.dtype == BF16
    assert torch_is.calls[-1][0] is (precision == "fast")
    wide = a.float() * scale_a.unsqueeze(-1), b.float() * scale_b.unsqueeze(-2)
    assert_groups(got, *wide, offs)
    if ragged != "none":
        {"rows": scale_a, "columns": scale_b}[ragged][30:] = math.nan
        assert torch.equal(tritile.grouped_matmul(a, b, offs, **how), got)


def test_fp8_groups_are_refused(torch_is):
    offs = offsets("a rest")
    a, b = operands("rows", 4, SIZES["rows"], E4M3)
    lain = placed(b, "column")
    for call, why in (
        (lambda: tritile.grouped_matmul(a, b, offs), "contiguous rows of a and columns of b"),
        (lambda: tritile.grouped_matmul(a.t(), a, offs), "groups share K: expected bfloat16"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            call()
    with tritile.mode(backends="triton"), pytest.raises(UnsupportedError, match="only torch computes"):
        tritile.grouped_matmul(a, lain, offs)
    with tritile.batch_invariant(), pytest.raises(UnsupportedError, match="depend on the number of rows"):
        tritile.grouped_matmul(a, lain, offs)
    with pytest.raises(GradientError):
        tritile.grouped_matmul(a.requires_grad_(), lain, offs)
    assert not torch_is.calls


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    "layouts", [("row", "row"), ("column", "row"), ("column_padded", "padded"), ("offset", "sparse")], ids=str
)
def test_groups_that_share_k(torch_is, dtype, kind, layouts):
    """In bfloat16 by torch's grouped product, on operands widened to 16 bytes; else group by group."""
    offs = offsets(kind)
    a, b = (placed(x, layout) for x, layout in zip(posed("k", offs, dtype), layouts, strict=True))
    buffer, out = frame((len(offs), 21, 35), dtype, "column")
    for given in (None, out):
        got = tritile.grouped_matmul(a, b, offs, out=given)
        assert given is not None or got.is_contiguous()
        assert_groups(got, a, b, offs)
    assert guard_intact(buffer, out)
    assert len(torch_is.calls) == 2 * (dtype == BF16)


def test_host_offsets_are_not_captured(torch_is, monkeypatch):
    offs = offsets("uneven")
    monkeypatch.setattr(grouped, "capturing", lambda: True)
    assert_groups(tritile.grouped_matmul(*(pair := posed("k", offs, BF16)), offs), *pair, offs)
    a, b = posed("k", offs, FP32)
    with pytest.raises(UnsupportedError, match="while a CUDA graph is captured: expected bfloat16"):
        tritile.grouped_matmul(a, b, offs)
    monkeypatch.setattr(ops_aten, "capability", lambda device: (10, 0))  # its empty groups are not zero
    with pytest.raises(UnsupportedError, match="on Hopper"):
        tritile.grouped_matmul(*pair, offs)


def test_groups_sharing_k_follow_torch(torch_is, monkeypatch):
    offs = offsets("uneven")
    a, b = posed("k", offs, BF16)
    monkeypatch.setattr(
        grouped, "run_plain", lambda op, tensors, out, options: out.copy_(tensors[0] @ tensors[1])
    )
    torch.use_deterministic_algorithms(True)
    try:
        assert_groups(tritile.grouped_matmul(a, b, offs), a, b, offs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch_is.calls

    def refused(*given, **how):
        raise RuntimeError("strides should be multiple of 16 bytes")

    monkeypatch.setattr(torch_kernels, "grouped_mm", refused)
    with pytest.raises(UnsupportedError, match=r"torch refuses groups that share K: .*multiple of 16"):
        tritile.grouped_matmul(a, b, offs)


def test_gradients_of_groups_are_torchs(torch_is):
    """Of bfloat16: that of a by groups of rows, that of b by groups of K, zero for an empty group."""
    offs = torch.tensor([0, 7, 7, 33], dtype=torch.int32)
    a, b = operands("rows", 4, (40, 48, 32), BF16)
    a, b = a.requires_grad_(), placed(b, "column").requires_grad_()
    g = values((40, 48), BF16, 5)
    tritile.grouped_matmul(a, b, offs).backward(g)
    assert len(torch_is.calls) == 3
    assert_groups(a.grad, g, b.detach().mT, offs)
    assert_groups(b.grad, a.detach().t(), g, offs)
    assert not b.grad[0].any()
    assert ends_of(offs, 40)[-1] == 33
    assert not a.grad[33:].any()


# What is measured is what is called.


def test_measured_call_is_the_same(torch_is, monkeypatch):
    monkeypatch.setattr(torch_calls.torch_private, "scaled_mm", torch_is.scaled_mm)
    a, b = values((37, 96), E4M3), placed(values((96, 48), E4M3, 1), "column")
    whole, rows = (scale(), scale(seed=3)), (scale(37, 1), scale(1, 48))
    for scales, bias in ((whole, None), (whole, values((48,), BF16)), (rows, values((48,), BF16))):
        wanted = tritile.scaled_matmul(a, b, *scales, bias=bias)
        of, out = (
            ops_request.request_of("scaled_matmul", a, b, *scales, None, bias, None, None, False),
            wanted * 0,
        )
        call = of.call(out, "ieee")
        torch_calls.run_of(call.problem)(call)
        assert torch.equal(out, wanted)
        first, second = torch_is.calls[-2:]
        assert [each.shape.numel() for each in first[1:]] == [each.shape.numel() for each in second[1:]]
    assert torch_calls.run_of(replace(FP8_NT, epilogue="scale_a=one scale_b=one gelu")) is None
    assert torch_calls.run_of(replace(GROUPS, n=516)) is None
    assert torch_calls.run_of(GROUPS) is torch_calls.groups
