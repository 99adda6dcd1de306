"""Products of fp8 and int8 with scales, in Triton's interpreter."""

import pytest
import torch

import tritile
from tests.configs import tile, tma
from tests.reference import FP8, Sides, assert_fused, frame, guard_intact, name, values
from tests.scales import assert_exact, scale
from tritile.families.common.work import Buffer
from tritile.families.work import work_of
from tritile.ops.products import matmul_call
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

E4M3, E5M2, INT8, FP32 = *FP8, torch.int8, torch.float32
QUANTISED = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
HALF = (torch.bfloat16, torch.float16, FP32)


@pytest.mark.parametrize(("a_dtype", "b_dtype"), [*QUANTISED, (INT8, INT8)], ids=name)
@pytest.mark.parametrize("of_a", [(), (1, 1), (19, 1)], ids=str)
@pytest.mark.parametrize("of_b", [(), (1,), (1, 23)], ids=str)
def test_scales_of_a_tensor_and_of_rows_and_columns(a_dtype, b_dtype, of_a, of_b):
    """Sums of int8 are exact, however long."""
    for k in (41,) if a_dtype != INT8 else (1, 41, 1100):
        a, b = values((19, k), a_dtype), values((k, 23), b_dtype, 1)
        scales = scale(*of_a) / 64, scale(*of_b, seed=10) / 64
        for out_dtype in HALF if of_a == of_b else HALF[-1:]:
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=out_dtype)
            assert got.dtype == out_dtype
            if a_dtype == INT8:
                assert_exact(got, a, b, Sides(*scales))
            else:
                assert_fused(got, a, b, Sides(*scales))


@pytest.mark.parametrize(("a_dtype", "b_dtype"), [*QUANTISED[:2], (INT8, INT8)], ids=name)
def test_what_follows_the_scales(a_dtype, b_dtype):
    a, b = values((19, 41), a_dtype), values((41, 23), b_dtype, 1)
    scales = scale(19, 1) / 64, scale(1, 23) / 64
    for activation, kind in ((None, FP32), ("relu", HALF[0]), ("gelu", HALF[1]), ("silu", FP32)):
        bias, residual = values((23,), kind, 2), values((19, 23), kind, 3)
        got = tritile.scaled_matmul(a, b, *scales, bias=bias, activation=activation, residual=residual)
        assert got.dtype == torch.bfloat16
        assert_fused(got, a, b, Sides(*scales, bias, residual, activation or ""))


CONFIGS = [
    tile(32, 64, 128, group=2),
    tma(32, 32, 64, persistent=True, group=2),
    tma(32, 32, 64, split=4, group=2),
]


def test_sums_of_int8_are_exact_before_they_are_scaled():
    """By fp32 alone these would cancel to something else: 2^24 and one, minus 2^24."""
    a = torch.tensor([[127] * 1041 + [1]], dtype=INT8)
    b = torch.tensor([[127]] * 1041 + [[-1]], dtype=INT8)
    exact = int((a.long() @ b.long()).item())
    assert exact > 2**24
    bias = torch.tensor([-float(exact - exact % 2)])
    got = tritile.scaled_matmul(a, b, scale(1) * 0 + 1, scale(1) * 0 + 1, out_dtype=FP32)
    assert got.item() == float(torch.tensor(exact, dtype=torch.int64).float())
    one = torch.ones(())
    assert -1 <= tritile.scaled_matmul(a, b, one, one, bias=bias, out_dtype=FP32).item() <= 2


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("layout", ["row", "column"])
def test_every_family_takes_int8(config, layout):
    m, n, k = 19, 23, 300
    a, b = values((m, k), INT8), values((k, n), INT8, 1)
    scales, bias = (scale(m, 1), scale(1, n)), values((n,), FP32, 2)
    buffer, out = frame((m, n), FP32, layout)
    call = matmul_call(a, b, out, "ieee", scale_a=scales[0], scale_b=scales[1], bias=bias)
    assert (call.a.buffer == "b") == (layout == "column")
    launch.run_interpreted(call, config)
    assert_exact(out, a, b, Sides(*scales, bias))
    assert guard_intact(buffer, out)


def test_one_tensor_as_both_operands():
    a = values((23, 23), INT8)
    got = tritile.scaled_matmul(a, a, scale(), scale(), out_dtype=FP32)
    assert_exact(got, a, a, Sides(scale(), scale()))
    extras = {"scale_a": scale(), "scale_b": scale()}
    call = matmul_call(a, a, torch.empty(23, 23), "ieee", **extras)
    step = work_of(call, CONFIGS[0], 1, False).steps[-1]
    assert step.values[:3] == (Buffer("a"), Buffer("b"), Buffer("out"))  # not one buffer for both
