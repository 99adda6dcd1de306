"""Operations with epilogues, scales and gates on a GPU, into any `out`, against float64.

Around results lies poison, which has to stay; around operands lies NaN, which must not be read.
"""

import itertools
import math

import pytest
import torch

import tritile
from tests.groups import assert_groups
from tests.launched import replayed
from tests.reference import (
    ACTIVATIONS,
    FP8,
    Sides,
    assert_fused,
    assert_gated,
    assert_product,
    bytes_of,
    frame,
    guard_intact,
    name,
    placed,
    values,
)
from tests.scales import assert_block_scaled, blocks_of, scale
from tritile.choose import waves
from tritile.core import device as devices
from tritile.families import launching
from tritile.ops import request as ops_request
from tritile.ops.products import matmul_call

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison", "fresh")]
BF16, FP16, FP32, FP64, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8
E4M3, E5M2 = FP8
LAYOUTS = ("padded", "column_padded", "sliced", "offset")
SIZES = [(129, 131, 77), (3, 7, 72), (130, 134, 72), (300, 200, 500), (1, 1024, 512)]


def gpu(shape, dtype=BF16, seed=0, layout="row"):
    found = values(tuple(shape), dtype, seed, "cuda")
    return found if layout == "row" else placed(found, layout)


def operations(m, n, k, dtype):
    """Every operation that takes `out`: its name, its result's shape, the call, and what is right."""
    x, weight, up = (gpu(s, dtype, i, "padded") for i, s in enumerate(((m, k), (n, k), (n, k))))
    bias, residual = gpu((1, n), dtype, 3, "padded")[0], gpu((m, n), dtype, 4, "padded")
    added, a, b = (gpu((3, *shape), dtype, 5, "padded") for shape in ((m, n), (m, k), (k, n)))
    offs = torch.tensor([m // 2, m], dtype=torch.int32, device="cuda")
    w, nothing = weight.mT, torch.full((n,), math.nan, dtype=dtype, device="cuda")

    def fused(got, **sides):
        assert_fused(got, x, w, Sides(**sides))

    yield "matmul", (m, n), lambda **o: tritile.matmul(x, w, **o), lambda y: assert_product(y, x, w)
    yield "vector", (n,), lambda **o: tritile.matmul(x[0], w, **o), lambda y: assert_product(y, x[0], w)
    for activation in ACTIVATIONS:
        how = {"activation": activation or None, "residual": residual}
        yield (
            f"linear {activation}", (m, n),
            lambda how=how, **o: tritile.linear(x, weight, bias, **how, **o),
            lambda y, act=activation: fused(y, bias=bias, activation=act, residual=residual),
        )  # fmt: skip
    for each, beta in ((residual, 0.5), (bias, -2.7), (residual[:, :1], 1), (bias[0], 1), (nothing, 0)):
        yield (
            f"addmm {tuple(each.shape)}", (m, n),
            lambda each=each, beta=beta, **o: tritile.addmm(each, x, w, beta=beta, alpha=2, **o),
            lambda y, each=each, beta=beta: fused(y, bias=each if beta else None, beta=beta, alpha=2),
        )  # fmt: skip
    yield (
        "baddbmm", (3, m, n), lambda **o: tritile.baddbmm(added, a, b, alpha=0.3, **o),
        lambda y: assert_fused(y, a, b, Sides(bias=added, alpha=0.3)),
    )  # fmt: skip
    for activation, biases in (("silu", (None, None)), (None, (bias, bias.flip(0)))):
        how = {"activation": activation, "bias_gate": biases[0], "bias_up": biases[1]}
        yield (
            f"gated {activation}", (m, n),
            lambda how=how, **o: tritile.gated_linear(x, weight, up, **how, **o),
            lambda y, act=activation or "", own=biases: assert_gated(y, x, w, up.mT, act, *own),
        )  # fmt: skip
    if dtype != FP64:
        yield (
            "groups", (m, n), lambda **o: tritile.grouped_matmul(x, b[:2], offs, **o),
            lambda y: assert_groups(y, x, b[:2], offs),
        )  # fmt: skip


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=name)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_operations(dtype, size, part):
    """In parts, which compile side by side."""
    for op, shape, call, assert_right in list(operations(*size, dtype))[part::3]:
        for _ in range(2):  # prepared, and met again
            got = call()
            assert (got.dtype, tuple(got.shape), got.is_contiguous()) == (dtype, shape, True), op
            assert_right(got)
        for layout in LAYOUTS if len(shape) > 1 else ("padded",):
            buffer, out = frame(shape if len(shape) > 1 else (1, *shape), dtype, layout, "cuda")
            out = out if len(shape) > 1 else out[0]
            for _ in range(2):
                assert call(out=out) is out
                assert_right(out)
                assert guard_intact(buffer, out), (op, layout)


@pytest.mark.parametrize("precision", ["ieee", "fp16x3", "tf32"])
@pytest.mark.parametrize("size", SIZES[:4], ids=str)
def test_precisions_of_float32(size, precision):
    m, n, k = size
    x, weight, bias = gpu((m, k), FP32, 0, "padded"), gpu((n, k), FP32, 1, "padded"), gpu((n,), FP32, 2)
    for layout in LAYOUTS:
        buffer, out = frame((m, n), FP32, layout, "cuda")
        tritile.linear(x, weight, bias, activation="gelu", precision=precision, out=out)
        assert_fused(out, x, weight.mT, Sides(bias=bias, activation="gelu"), precision)
        assert guard_intact(buffer, out), layout


def test_calls_met_again_prepare_nothing(monkeypatch):
    x, weight, bias = gpu((130, 260)), gpu((140, 260), seed=1), gpu((140,), seed=2)
    eight, wide = gpu((128, 256), E4M3), gpu((128, 256), E4M3, 1).mT
    scales = scale(128, 1).cuda(), scale(1, 128).cuda()
    whole, one = gpu((128, 256), INT8), torch.ones((), device="cuda")
    doubles, out = gpu((131, 300), FP64), torch.empty(130, 140, dtype=BF16, device="cuda")
    calls = [
        lambda: tritile.linear(x, weight, bias, activation="gelu"),
        lambda: tritile.addmm(bias, x, weight.mT, beta=2),
        lambda: tritile.scaled_matmul(eight, wide, *scales),
        lambda: tritile.scaled_matmul(whole, whole.mT, one, one),
        lambda: tritile.gated_linear(x, weight, weight + 1, bias_gate=bias),
        lambda: tritile.matmul(x, weight.mT, out=out),
        lambda: tritile.matmul(doubles, doubles.mT),
        lambda: tritile.transpose(x),
    ]
    first = [bytes_of(call()) for call in calls]
    monkeypatch.setattr(ops_request, "prepared", lambda *given: pytest.fail("prepared again"))
    for _ in range(3):
        assert all(torch.equal(bytes_of(call()), wanted) for call, wanted in zip(calls, first, strict=True))


QUANTISED = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (INT8, INT8)]


@pytest.mark.parametrize(("a_dtype", "b_dtype"), QUANTISED, ids=name)
@pytest.mark.parametrize(
    "size", [(256, 320, 512), (77, 515, 259), (16, 256, 1024), (129, 131, 77), (3, 7, 72)], ids=str
)
@pytest.mark.parametrize("turned", [True, False])
def test_scales(a_dtype, b_dtype, size, turned):
    m, n, k = size
    a, b = gpu((m, k), a_dtype, 0, "padded"), gpu((k, n), b_dtype, 1, "column_padded" if turned else "row")
    for shapes in (((), ()), ((m, 1), (1,)), ((m, 1), (1, n))):
        scales = scale(*shapes[0]).cuda() / 64, scale(*shapes[1]).cuda() / 64
        for out_dtype in (BF16, FP16, FP32):
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=out_dtype)
            assert_fused(got, a, b, Sides(*scales))
    for layout in LAYOUTS:
        buffer, out = frame((m, n), BF16, layout, "cuda")
        tritile.scaled_matmul(a, b, *scales, out=out)
        assert_fused(out, a, b, Sides(*scales))
        assert guard_intact(buffer, out), layout
    bias, residual = gpu((n,), FP32, 2), gpu((m, n), BF16, 3)
    how = {"bias": bias, "residual": residual, "activation": "gelu"}
    exact = tritile.scaled_matmul(a, b, *scales, **how)
    assert_fused(exact, a, b, Sides(*scales, bias, residual, "gelu"))
    if a_dtype != INT8:  # sums by the fast way have no bound of fp32's
        fast = tritile.scaled_matmul(a, b, *scales, **how, use_fast_accum=True)
        assert ((fast - exact).float().norm() / exact.float().norm()).item() < 1e-2


@pytest.mark.parametrize("size", [(256, 320, 512), (77, 515, 259), (16, 256, 4100)], ids=str)
@pytest.mark.parametrize("of_a", ["row", "column"])
def test_int8_sums_exact(size, of_a):
    m, n, k = size
    a, b = gpu((m, k), INT8, 0, of_a), gpu((k, n), INT8, 1, "row" if of_a == "column" else "column")
    scales, bias = (scale(m, 1).cuda() / 64, scale(1, n).cuda() / 64), gpu((n,), FP32, 2)
    out = torch.empty(n, m, dtype=FP32, device="cuda").mT
    for given in (None, out):
        got = tritile.scaled_matmul(a, b, *scales, out_dtype=FP32, bias=bias, out=given)
        assert_fused(got, a, b, Sides(*scales, bias))
    call = matmul_call(a, b, torch.empty(m, n, device="cuda"), "ieee", scale_a=scales[0], scale_b=scales[1])
    for config in waves.screened(call.problem, devices.gpu(0), 6):
        launching.prepare(call, config)(*call.tensors)
        assert_fused(call.out.tensor, a, b, Sides(*scales))


@pytest.mark.parametrize("shared", list(itertools.product((1, 128), repeat=2)), ids=str)
@pytest.mark.parametrize("size", [(256, 384, 512), (77, 528, 272), (4, 144, 640), (1, 48, 256)], ids=str)
def test_scales_for_each_128_of_k(shared, size):
    """torch's alone, on Hopper: of any number of rows, and of K and N that are multiples of 16."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch has these on Hopper alone")
    m, n, k = size
    a, b = gpu((m, k), E4M3), placed(gpu((k, n), E4M3, 1), "column")
    scales = tuple(s.cuda() for s in blocks_of(m, n, k, shared))
    bias, residual = gpu((n,), FP32, 2), gpu((m, n), BF16, 3)
    sides, how = Sides(None, None, bias, residual, "gelu"), {"bias": bias, "residual": residual}
    with tritile.mode(backends="triton,aten"):
        for layout in ("row", "column", "sparse"):
            lain = [placed(each, layout) for each in scales]
            for out in (None, None, torch.empty(n, m, dtype=BF16, device="cuda").mT):
                got = tritile.scaled_matmul(a, b, *lain, out=out)
                assert_block_scaled(got, a, b, *scales, shared)
        for dtype in (BF16, FP16, FP32):
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=dtype)
            assert_block_scaled(got, a, b, *scales, shared)
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=dtype, activation="gelu", **how)
            assert got.dtype == dtype
            assert_block_scaled(got, a, b, *scales, shared, sides)
        again = replayed(lambda: tritile.scaled_matmul(a, b, *scales))
        assert_block_scaled(again, a, b, *scales, shared)
