"""Products by the tile kernel on host tensors, through Triton's interpreter: dtypes, scales, numerics.

What all families have to do is in test_families_interpreted.py, drawn calls in tests/unit/test_described.py.
"""

import math
from dataclasses import replace

import pytest
import torch

import tritile
from tests.configs import tile
from tests.reference import (
    DEFAULT_OUT,
    FP8,
    MATMUL_DTYPES,
    Sides,
    assert_fused,
    assert_product,
    name,
    placed,
    values,
)
from tests.scales import scale
from tritile.choose import waves
from tritile.core import problem as problems
from tritile.core.call import call_for
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem
from tritile.families import launching
from tritile.families.common.grids import WIDE_FROM
from tritile.families.matmul_tile import family as tile_family
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.ops.products import matmul_call
from tritile.runtime.work import Buffer

pytestmark = pytest.mark.interpreted

E4M3, E5M2, INT8, FP16, FP32 = *FP8, torch.int8, torch.float16, torch.float32
HALF = (FP16, torch.bfloat16, FP32)


@pytest.mark.parametrize("size", [(17, 13, 29), (1, 1, 1), (64, 32, 48), (7, 1, 100)], ids=str)
@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=name)
def test_dtypes(dtype, size):
    m, n, k = size
    a, b = values((m, k), dtype), values((k, n), dtype, 1)
    for out_dtype in (None, *(HALF if dtype in (*HALF, *FP8) and m == 17 else ())):
        got = tritile.matmul(a, b, out_dtype=out_dtype)
        assert got.dtype == (out_dtype or DEFAULT_OUT.get(dtype, dtype))
        assert_product(got, a, b)


QUANTISED = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), (INT8, INT8)]


@pytest.mark.parametrize(("a_dtype", "b_dtype"), QUANTISED, ids=name)
@pytest.mark.parametrize("of_a", [(), (1, 1), (19, 1)], ids=str)
@pytest.mark.parametrize("of_b", [(), (1,), (1, 23)], ids=str)
def test_scales_of_tensor_rows_columns(a_dtype, b_dtype, of_a, of_b):
    """Sums of int8 are exact, however long."""
    for k in (41,) if a_dtype != INT8 else (1, 41, 1100):
        a, b = values((19, k), a_dtype), values((k, 23), b_dtype, 1)
        scales = scale(*of_a) / 64, scale(*of_b, seed=10) / 64
        for out_dtype in HALF if of_a == of_b else HALF[-1:]:
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=out_dtype)
            assert got.dtype == out_dtype
            assert_fused(got, a, b, Sides(*scales))
    added = (None, FP32), ("relu", torch.bfloat16), ("gelu", FP16), ("silu", FP32)
    for activation, kind in added if of_a == of_b else added[2:3]:
        bias, residual = values((23,), kind, 2), values((19, 23), kind, 3)
        got = tritile.scaled_matmul(a, b, *scales, bias=bias, activation=activation, residual=residual)
        assert got.dtype == torch.bfloat16
        assert_fused(got, a, b, Sides(*scales, bias, residual, activation or ""))


def test_int8_sums_exact_before_scaling():
    """By fp32 alone these would cancel to something else: 2^24 and one, minus 2^24."""
    a = torch.tensor([[127] * 1041 + [1]], dtype=INT8)
    b = torch.tensor([[127]] * 1041 + [[-1]], dtype=INT8)
    exact, one = int((a.long() @ b.long()).item()), torch.ones(())
    assert exact > 2**24
    bias = torch.tensor([-float(exact - exact % 2)])
    got = tritile.scaled_matmul(a, b, one, one, out_dtype=FP32)
    assert got.item() == float(torch.tensor(exact, dtype=torch.int64).float())
    assert -1 <= tritile.scaled_matmul(a, b, one, one, bias=bias, out_dtype=FP32).item() <= 2


def test_column_result_is_transpose():
    row, column = values((29,), FP32), values((37, 1), FP32)
    sides = Sides(column, row, row, column, "gelu", 0.5, 2.0)
    a, b, out = torch.empty(37, 51), torch.empty(51, 29), torch.empty(29, 37).mT
    call = matmul_call(a, b, out, "ieee", **sides._asdict())
    assert call.a.buffer == "b"
    assert str(call.problem.epilogue) == "scale_a=column scale_b=row bias=column residual=row weighted gelu"


def test_one_tensor_as_both_operands():
    a, one = values((23, 23), INT8), scale()
    assert_fused(tritile.scaled_matmul(a, a, one, one, out_dtype=FP32), a, a, Sides(one, one))
    call = matmul_call(a, a, torch.empty(23, 23), "ieee", scale_a=one, scale_b=one)
    step = work_of(call, tile(32, 64, 128, group=2), 1, False).steps[-1]
    assert step.values[:3] == (Buffer("a"), Buffer("b"), Buffer("out"))  # not one buffer for both


def test_results_too_large_become_inf():
    a = torch.full((3, 17), 200.0, dtype=FP16)
    got = tritile.matmul(a, -a.mT)
    assert torch.equal(got, torch.full((3, 3), -math.inf, dtype=FP16))
    assert torch.equal(tritile.matmul(a, a.mT, out_dtype=FP32), torch.full((3, 3), 680000.0))


def test_gelu_far_below_zero():
    x = torch.linspace(-6, 14, 2001)[:, None]
    got = tritile.linear(x, torch.ones(1, 1), activation="gelu").double()
    wanted = torch.special.ndtr(x.double()) * x.double()
    # Each of three roundings of the exponent of e^(-x^2 / 2) moves the share by up to eps x^2 / 4.
    allowed = 6e-7 + torch.where(x < 0, 0.75 * torch.finfo(FP32).eps * x**2, 0.0)
    assert ((got - wanted).abs() <= allowed * wanted.abs()).all()


BLOCKS = [(16, 16, 16, 1), (16, 64, 32, 8), (32, 16, 128, 8), (64, 64, 128, 1)]
TILED = [*((FP16, blocks) for blocks in BLOCKS), *((FP32, blocks) for blocks in BLOCKS[:2])]


@pytest.mark.parametrize(("dtype", "blocks"), TILED, ids=str)
@pytest.mark.parametrize("k", [100, 512, 600])
def test_blocks_of_any_shape(blocks, k, dtype):
    config = tile(*blocks[:3], warps=16, stages=1, group=blocks[3])
    a, b = placed(values((37, k), dtype), "sliced"), placed(values((k, 41), dtype, 1), "column_sliced")
    out = torch.empty(37, 41, dtype=dtype)
    call = matmul_call(a, b, out, "ieee")
    assert illegal(config, call.problem, TARGETS["sm_90"]) is None
    launching.run_interpreted(call, config)
    assert_product(out, a, b)


def test_rounding_losses_are_added():
    """One block adds up to 1, each of 127 others to a fourth of the step of fp32 at 1."""
    step = torch.finfo(FP32).eps
    a, b, out = torch.zeros(16, 128 * 32), torch.ones(128 * 32, 16), torch.empty(16, 16)
    a[:, 0], a[:, 32::32] = 1.0, step / 4
    launching.run_interpreted(matmul_call(a, b, out, "ieee"), tile(16, 16, 32, group=1))
    assert float((out.double() - (1 + 127 * step / 4)).abs().max()) <= step


def test_sizes_near_32_bits():
    assert WIDE_FROM + 2**12 < 2**31
    for m, k, wide in ((WIDE_FROM, 1, True), (WIDE_FROM - 1, 1, False), (1, WIDE_FROM, True)):
        a = torch.empty((), dtype=INT8).expand(m, k)
        call = matmul_call(a, a[:1].mT, torch.empty((), dtype=torch.int32).expand(m, 1), "ieee")
        assert tile_family.work(call, tile(16, 16, 16)).steps[0].args["WIDE"] is wide
    one = torch.empty((), dtype=FP16).expand(64, 64)
    call = matmul_call(one, one, one, "ieee", activation="silu", up=one)
    for step, wide in ((64, False), (2**26, True)):  # rows of the second matrix that lie far apart
        far = replace(call, up=replace(call.up, strides=(step, 1)))
        assert tile_family.work(far, tile(16, 16, 16)).steps[0].args["WIDE"] is wide


def test_gated_problem_counts_both_matrices():
    plain = MatmulProblem(1, 64, 48, 32, "float16", "float16")
    gated = replace(plain, epilogue="gated silu")
    assert gated.flops == 2 * plain.flops
    assert gated.bytes == plain.bytes + 32 * 48 * 2
    call = call_for(gated, lambda dtype, elements: torch.zeros(elements, dtype=getattr(torch, dtype)))
    assert call.problem == gated
    assert call.up.shape == call.b.shape
    assert len({id(tensor) for tensor in call.tensors}) == 4


NT = MatmulProblem(1, 512, 512, 512, "float32", "float32", b_layout="column")


def test_which_products_copy_b():
    assert NT.by_rows
    assert (NT.core.b_layout, NT.core.b_align) == ("row", 16)
    assert NT.core.core == NT.core
    others = (
        {"m": 127}, {"b_layout": "row"}, {"precision": "tf32"}, {"precision": "fp16x3"},
        {"dtype": "float64", "out_dtype": "float64"}, {"dtype": "bfloat16", "out_dtype": "bfloat16"},
        {"epilogue": "gated silu"},
    )  # fmt: skip
    for fields in others:
        assert not replace(NT, **fields).by_rows


def test_a_stretched_b_is_copied_once(monkeypatch):
    monkeypatch.setattr(problems, "_BY_ROWS_FROM", 1)
    a, b = values((3, 5, 7), FP32), placed(values((7, 9), FP32, 1), "column")
    call = matmul_call(a.mT.contiguous().mT, b.expand(3, 7, 9), torch.empty(3, 5, 9), "ieee")
    config = waves.pick(call.problem, TARGETS["nvidia-h200"])
    work = work_of(call, config, 132, False)
    assert [section.elements for section in work.scratch.values()] == [7 * 32]
    launching.run_interpreted(call, config)
    assert_product(call.out.tensor, a, b)


HALVES = [(FP16, False), (FP32, False)]
FACTORS = [*((dtype, True) for dtype in (torch.bfloat16, torch.float64, torch.complex64)), *HALVES]


@pytest.mark.parametrize(("dtype", "batched"), FACTORS, ids=str)
@pytest.mark.parametrize("beta", [1, 0.5, 0])
def test_factors_unread_if_alpha_is_0(dtype, batched, beta):
    """They hold NaN and infinities; their gradients are zeros."""
    op, batch = (tritile.baddbmm, (2,)) if batched else (tritile.addmm, ())
    sizes = (3, 5), (3, 4), (4, 5)
    added, a, b = (values((*batch, *size), torch.float64, i).to(dtype) for i, size in enumerate(sizes))
    a[..., 0, 0], b[..., 1, 1] = math.nan, math.inf
    wanted = beta * added
    added = added if beta else added * math.nan
    for alpha in (0, 0.0, -0.0) + (0j,) * dtype.is_complex:
        assert torch.equal(op(added, a, b, beta=beta, alpha=alpha), wanted)
    out = torch.full_like(added, math.nan)
    assert op(added, a, b, beta=beta, alpha=0, out=out) is out
    assert torch.equal(out, wanted)
    if not dtype.is_complex:
        active = op(added, a, b, beta=beta, alpha=0, activation="relu")
        assert torch.equal(active, wanted.relu())

    def product(added, a, b):
        return op(added, a, b, beta=beta, alpha=0)

    compiled = torch.compile(product, backend="aot_eager")
    operator = getattr(torch.ops.tritile, op.__name__)(added, a, b, beta=beta, alpha=0)
    batches = torch.vmap(lambda x: product(added, x, b))(torch.stack([a, a]))
    assert all(torch.equal(got, wanted) for got in (operator, *batches))
    tensors = [tensor.requires_grad_() for tensor in (added, a, b)]
    for call in (product, compiled):
        y = call(*tensors)
        assert torch.equal(y, wanted)
        of_added, *of_factors = torch.autograd.grad(y, tensors, torch.ones_like(y))
        assert torch.equal(of_added, torch.full_like(added, beta))
        assert not any(gradient.any() for gradient in of_factors)
    _, tangent = torch.func.jvp(product, (added, a, b), (torch.ones_like(added), a, b))
    assert torch.equal(tangent, torch.full_like(added, beta))
    with pytest.raises(tritile.errors.ShapeError, match="K is 4"):
        product(added, a, b[..., :3, :])
