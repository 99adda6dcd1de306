"""tritile.matmul on host tensors: every shape, layout and dtype, through Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tritile
from tests.configs import tile
from tests.reference import (
    DEFAULT_OUT,
    FP8,
    LAYOUTS,
    MATMUL_DTYPES,
    assert_product,
    frame,
    guard_intact,
    name,
    placed,
    values,
)
from tritile.core.device import TARGETS
from tritile.errors import DtypeError
from tritile.families.space import illegal
from tritile.ops.described import described
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

HALF = (torch.float16, torch.bfloat16, torch.float32)
OUT_DTYPES = [(dtype, out) for dtype in (*HALF, *FP8) for out in HALF]


@pytest.mark.parametrize("size", [(17, 13, 29), (1, 1, 1), (64, 32, 48), (7, 1, 100)], ids=str)
@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=name)
def test_dtypes(dtype, size):
    m, n, k = size
    a, b = values((m, k), dtype), values((k, n), dtype, 1)
    got = tritile.matmul(a, b)
    assert got.dtype == DEFAULT_OUT.get(dtype, dtype)
    assert got.is_contiguous()
    assert_product(got, a, b)


@pytest.mark.parametrize(("dtype", "out_dtype"), OUT_DTYPES, ids=name)
def test_out_dtype(dtype, out_dtype):
    a, b = values((19, 37), dtype), values((37, 11), dtype, 1)
    got = tritile.matmul(a, b, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    assert_product(got, a, b)
    out = torch.full((19, 11), 7).to(out_dtype)
    if out_dtype != DEFAULT_OUT.get(dtype, dtype):
        with pytest.raises(DtypeError, match=f"out is {name(out_dtype)}: .* or out_dtype"):
            tritile.matmul(a, b, out=out)


@pytest.mark.parametrize("precision", ["ieee", "fp16x3", "tf32", None])
def test_precisions(precision):
    a, b = values((33, 70), torch.float32), values((70, 21), torch.float32, 1)
    assert_product(tritile.matmul(a, b, precision=precision), a, b, precision or "ieee")


def test_results_too_large_become_inf():
    a = torch.full((3, 17), 200.0, dtype=torch.float16)
    got = tritile.matmul(a, -a.mT)
    assert torch.equal(got, torch.full((3, 3), -math.inf, dtype=torch.float16))
    assert torch.equal(tritile.matmul(a, a.mT, out_dtype=torch.float32), torch.full((3, 3), 680000.0))


def test_batches_fold_into_rows_where_memory_allows():
    a, b = values((4, 6, 8), torch.float32), values((8, 5), torch.float32, 1)
    folded = tritile.plan(tritile.matmul, a, b).problem
    assert (folded.batch, folded.m) == (1, 24)
    apart = placed(a, "sliced")  # a gap between matrices: stepping the batch is not stepping rows
    assert tritile.plan(tritile.matmul, apart, b).problem.batch == 4
    rows = a[:, :1]  # one row each: steps of the batch become the row stride
    assert tritile.plan(tritile.matmul, rows, b).problem.m == 4
    for case in (a, apart, rows):
        assert_product(tritile.matmul(case, b), case, b)


BLOCKS = [(16, 16, 16, 1), (16, 64, 32, 8), (32, 16, 128, 8), (64, 64, 128, 1)]
TILED = [*((torch.float16, blocks) for blocks in BLOCKS), *((torch.float32, blocks) for blocks in BLOCKS[:2])]


@pytest.mark.parametrize(("dtype", "blocks"), TILED, ids=str)
@pytest.mark.parametrize("k", [100, 512, 600])
def test_blocks_of_any_shape_give_the_answer(blocks, k, dtype):
    config = tile(*blocks[:3], warps=16, stages=1, group=blocks[3])
    a, b = placed(values((37, k), dtype), "sliced"), placed(values((k, 41), dtype, 1), "column_sliced")
    out = torch.empty(37, 41, dtype=dtype)
    call = described(a, b, out, "ieee")
    assert illegal(config, call.problem, TARGETS["sm_90"]) is None
    launch.run_interpreted(call, config)
    assert_product(out, a, b)


@st.composite
def products(draw):
    size = st.integers(0, 40)
    m, n, k = draw(size), draw(size), draw(size)
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    a_batch = [draw(st.sampled_from([1, extent])) for extent in batch]
    b_batch = [draw(st.sampled_from([1, extent])) for extent in batch]
    b_batch = b_batch[draw(st.integers(0, len(batch))) :]
    dtype = draw(st.sampled_from(MATMUL_DTYPES))
    layouts = draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3))
    return (*a_batch, m, k), (*b_batch, k, n), dtype, layouts


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(products(), st.integers(0, 2**16))
def test_any_product(product, seed):
    a_shape, b_shape, dtype, (a_layout, b_layout, out_layout) = product
    a, b = values(a_shape, dtype, seed), values(b_shape, dtype, seed + 1)
    shape = torch.matmul(a.float(), b.float()).shape
    buffer, out = frame(tuple(shape), DEFAULT_OUT.get(dtype, dtype), out_layout)
    tritile.matmul(placed(a, a_layout), placed(b, b_layout), out=out)
    assert_product(out, a, b)
    assert guard_intact(buffer, out)


def test_what_rounding_loses_of_each_block_of_k_is_added_again():
    """One block adds up to 1, each of 127 others to a fourth of the step of fp32 at 1."""
    step = torch.finfo(torch.float32).eps
    a, b, out = torch.zeros(16, 128 * 32), torch.ones(128 * 32, 16), torch.empty(16, 16)
    a[:, 0], a[:, 32::32] = 1.0, step / 4
    launch.run_interpreted(described(a, b, out, "ieee"), tile(16, 16, 32, group=1))
    assert float((out.double() - (1 + 127 * step / 4)).abs().max()) <= step
