"""Batch-invariant products in the interpreter: a row gives the same bits in any company, at any place."""

import pytest
import torch

import tritile
from tests.reference import Sides, assert_fused, assert_product, placed, values

pytestmark = pytest.mark.interpreted

TOTAL, N, K = 40, 21, 37
COMPANY = ((0, 1), (3, 1), (3, 2), (8, 9), (23, 17), (0, 40))  # the first row of a part, and how many it has


@pytest.fixture(autouse=True)
def _mode(summed_in_order):
    with tritile.batch_invariant():
        yield


def assert_rows(call, *by_row):
    """The rows of every part are those of the whole, bit for bit. `by_row`: operands that have rows."""
    whole = call(*by_row)
    for start, count in COMPANY:
        part = call(*(x[start : start + count] for x in by_row))
        assert torch.equal(part, whole[start : start + count]), (start, count)
    return whole


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        *((torch.float32, layout) for layout in ("row", "sparse")),
        *((dtype, "column") for dtype in (torch.float32, torch.float16, torch.float64)),
        (torch.float16, "row"),
    ],
    ids=str,
)
def test_matmul(dtype, layout):
    a, b = placed(values((TOTAL, K), dtype), layout), values((K, N), dtype, 1)
    whole = assert_rows(lambda rows: tritile.matmul(rows, b), a)
    assert_product(whole, a, b)
    assert torch.equal(tritile.matmul(a[3], b), whole[3])
    assert torch.equal(tritile.matmul(a, b[:, 2]), whole[:, 2])
    batch = a.view(4, 10, K) if layout == "row" else a[None]
    assert torch.equal(tritile.matmul(batch, b).view(TOTAL, N), whole)


def test_products_are_added_one_after_the_other():
    """Products of fp16 numbers are exact in fp32, so that only the order of the sum decides its bits."""
    a, b = values((TOTAL, 130), torch.float16), values((130, N), torch.float16, 1)
    wanted = torch.zeros(TOTAL, N)
    for k in range(130):
        wanted += a[:, k, None].float() * b[k].float()
    assert torch.equal(tritile.matmul(a, b, out_dtype=torch.float32), wanted)


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_linear_and_what_follows_it(activation):
    x, weight = values((TOTAL, K), torch.bfloat16), values((N, K), torch.bfloat16, 1)
    bias, residual = values((N,), torch.bfloat16, 2), values((TOTAL, N), torch.bfloat16, 3)

    def call(rows, more):
        return tritile.linear(rows, weight, bias, activation=activation, residual=more)

    whole = assert_rows(call, x, residual)
    assert_fused(whole, x, weight.t(), Sides(None, None, bias, residual, activation or ""))


def test_addmm_and_baddbmm():
    shapes, how = ((TOTAL, K), (K, N), (TOTAL, N)), {"beta": 0.3, "alpha": 1.7, "activation": "gelu_tanh"}
    a, b, added = (values(shape, torch.float32, seed) for seed, shape in enumerate(shapes))

    def one(rows, more):
        return tritile.addmm(more, rows, b, **how)

    def batch(rows, more):
        return tritile.baddbmm(more[None], rows[None], b[None], **how)[0]

    assert torch.equal(assert_rows(one, a, added), assert_rows(batch, a, added))


def test_gated_linear():
    x, gate, up = (values(shape, torch.float32, i) for i, shape in enumerate(((TOTAL, K), (N, K), (N, K))))
    assert_rows(lambda rows: tritile.gated_linear(rows, gate, up), x)


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (8, True)])
def test_packed_weights(bits, zeros):
    weight = tritile.quantize(values((N, 70), torch.float16), bits=bits, group_size=32, zero_points=zeros)
    x, bias = values((TOTAL, 70), torch.float16, 1), values((N,), torch.float16, 2)
    assert_rows(lambda rows: tritile.linear(rows, weight, bias), x)


def test_scaled_matmul():
    a, b = values((TOTAL, K), torch.int8), values((K, N), torch.int8, 1)
    of_rows, of_columns = values((TOTAL, 1), torch.float32).abs(), values((1, N), torch.float32, 1).abs()
    bias = values((N,), torch.float32, 2)
    assert_rows(
        lambda rows, scales: tritile.scaled_matmul(rows, b, scales, of_columns, bias=bias), a, of_rows
    )


def test_rows_of_groups_move_to_other_places_and_companies():
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
def test_torchs_deterministic_algorithms_find_nothing_to_refuse(invariant):
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
