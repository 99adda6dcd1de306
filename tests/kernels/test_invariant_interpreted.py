"""Batch-invariant products in the interpreter: a row gives the same bits in any company, at any place."""

import pytest
import torch

import tritile
from tests.invariant_calls import calls
from tests.reference import Sides, assert_fused, assert_product, placed, values
from tests.scales import scale

pytestmark = pytest.mark.interpreted

TOTAL, N, K = 40, 21, 37
COMPANY = ((0, 1), (3, 1), (3, 2), (8, 9), (23, 17), (0, 40))  # the first row of a part, and how many it has
CALLS = calls(K, torch.float32)
LAID = [
    *((call, dtype, "row") for call, dtype in CALLS.values()),
    *((CALLS["matmul"][0], torch.float32, layout) for layout in ("sparse", "column")),
    *((CALLS["fp16"][0], torch.float16, layout) for layout in ("column",)),
    (calls(K)["matmul"][0], torch.float64, "column"),
]


@pytest.fixture(autouse=True)
def _mode(summed_in_order):
    with tritile.batch_invariant():
        yield


@pytest.mark.parametrize(
    ("call", "dtype", "layout"), LAID, ids=[*CALLS, "sparse", "columns", "fp16 columns", "fp64"]
)
def test_rows_in_any_company(call, dtype, layout):
    x = placed(values((TOTAL, K), dtype), layout)
    whole = call(x)
    assert whole.isfinite().all()
    for start, count in COMPANY:
        assert torch.equal(call(x[start : start + count]), whole[start : start + count]), (start, count)


def test_added_rows_and_row_scales():
    x, residual, scales = (
        values((TOTAL, K), torch.bfloat16),
        values((TOTAL, N), torch.bfloat16, 3),
        scale(TOTAL, 1),
    )
    weight, bias = values((N, K), torch.bfloat16, 1), values((N,), torch.bfloat16, 2)
    a, b = values((TOTAL, K), torch.int8), values((K, N), torch.int8, 1)

    def linear(rows):
        return tritile.linear(x[rows], weight, bias, activation="silu", residual=residual[rows])

    def scaled(rows):
        return tritile.scaled_matmul(a[rows], b, scales[rows], scale(1, N), bias=bias.float())

    for call in (linear, scaled):
        whole = call(slice(None))
        for start, count in COMPANY:
            rows = slice(start, start + count)
            assert torch.equal(call(rows), whole[rows]), (start, count)
    assert_fused(linear(slice(None)), x, weight.t(), Sides(None, None, bias, residual, "silu"))


def test_products_are_added_in_order():
    """Products of fp16 numbers are exact in fp32, so that only the order of the sum decides its bits."""
    a, b = values((TOTAL, 130), torch.float16), values((130, N), torch.float16, 1)
    wanted = torch.zeros(TOTAL, N)
    for k in range(130):
        wanted += a[:, k, None].float() * b[k].float()
    assert torch.equal(tritile.matmul(a, b, out_dtype=torch.float32), wanted)


def test_rows_of_groups_move():
    a, b = values((TOTAL, K), torch.float16), values((3, K, N), torch.float16, 1)
    found = []
    for ends, start in (([5, 12, 40], 5), ([0, 40, 40], 0), ([20, 27, 27], 20), ([39, 40, 40], 39)):
        rows = values((TOTAL, K), torch.float16, 7)
        count = ends[1] - ends[0]
        rows[start : start + min(count, 7)] = a[: min(count, 7)]
        offs = torch.tensor(ends, dtype=torch.int32)
        found.append(tritile.grouped_matmul(rows, b, offs)[start : start + min(count, 7)])
    for made in found:
        assert torch.equal(made, found[0][: len(made)])
    assert_product(found[0], a[:7], b[1])


@pytest.mark.parametrize("invariant", [False, True])
def test_torch_deterministic_algorithms(invariant):
    """Operations run under it, with fresh memory full of NaN, and give the same bits as without."""
    x, weight, up = (values(shape, torch.float16, i) for i, shape in enumerate(((9, 64), (N, 64), (N, 64))))
    offs = torch.tensor([4, 9], dtype=torch.int32)

    def calls():
        packed = tritile.quantize(weight, bits=4, group_size=32)
        yield packed.packed
        yield tritile.matmul(x, weight.t())
        yield tritile.linear(x, weight, weight[:, 0], activation="silu", residual=weight[0, :N])
        yield tritile.linear(x, packed)
        yield tritile.gated_linear(x, weight, up)
        yield tritile.grouped_matmul(x, torch.stack([weight.t(), up.t()]), offs)
        yield tritile.matmul(x.float(), up.t().float(), precision="tf32")
        yield tritile.permute(x, (1, 0))

    with tritile.batch_invariant(invariant):
        without = list(calls())
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.utils.deterministic.fill_uninitialized_memory
            under = list(calls())
        finally:
            torch.use_deterministic_algorithms(False)
    assert [torch.equal(one, other) for one, other in zip(under, without, strict=True)] == [True] * 8
