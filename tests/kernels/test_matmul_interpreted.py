"""Products by the tile kernel on host tensors, through Triton's interpreter: every dtype, and any blocks.

Also which calls take 64-bit offsets, and which products copy b row by row first. What all families have to do
is in test_families_interpreted.py, drawn calls are in tests/unit/test_described.py.
"""

import math
from dataclasses import replace

import pytest
import torch

import tritile
from tests.configs import tile
from tests.reference import DEFAULT_OUT, FP8, MATMUL_DTYPES, assert_product, name, placed, values
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem
from tritile.core.problem import matmul as problems
from tritile.families.common.grids import WIDE_FROM
from tritile.families.matmul_tile import family as tile_family
from tritile.families.permute.family import in_place
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.ops import permute
from tritile.ops.products import matmul_call
from tritile.planning import model
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

HALF = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("size", [(17, 13, 29), (1, 1, 1), (64, 32, 48), (7, 1, 100)], ids=str)
@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=name)
def test_dtypes(dtype, size):
    m, n, k = size
    a, b = values((m, k), dtype), values((k, n), dtype, 1)
    for out_dtype in (None, *(HALF if dtype in (*HALF, *FP8) and m == 17 else ())):
        got = tritile.matmul(a, b, out_dtype=out_dtype)
        assert got.dtype == (out_dtype or DEFAULT_OUT.get(dtype, dtype))
        assert_product(got, a, b)


def test_results_too_large_become_inf():
    a = torch.full((3, 17), 200.0, dtype=torch.float16)
    got = tritile.matmul(a, -a.mT)
    assert torch.equal(got, torch.full((3, 3), -math.inf, dtype=torch.float16))
    assert torch.equal(tritile.matmul(a, a.mT, out_dtype=torch.float32), torch.full((3, 3), 680000.0))


BLOCKS = [(16, 16, 16, 1), (16, 64, 32, 8), (32, 16, 128, 8), (64, 64, 128, 1)]
TILED = [*((torch.float16, blocks) for blocks in BLOCKS), *((torch.float32, blocks) for blocks in BLOCKS[:2])]


@pytest.mark.parametrize(("dtype", "blocks"), TILED, ids=str)
@pytest.mark.parametrize("k", [100, 512, 600])
def test_blocks_of_any_shape_give_the_answer(blocks, k, dtype):
    config = tile(*blocks[:3], warps=16, stages=1, group=blocks[3])
    a, b = placed(values((37, k), dtype), "sliced"), placed(values((k, 41), dtype, 1), "column_sliced")
    out = torch.empty(37, 41, dtype=dtype)
    call = matmul_call(a, b, out, "ieee")
    assert illegal(config, call.problem, TARGETS["sm_90"]) is None
    launch.run_interpreted(call, config)
    assert_product(out, a, b)


def test_what_rounding_loses_of_each_block_of_k_is_added_again():
    """One block adds up to 1, each of 127 others to a fourth of the step of fp32 at 1."""
    step = torch.finfo(torch.float32).eps
    a, b, out = torch.zeros(16, 128 * 32), torch.ones(128 * 32, 16), torch.empty(16, 16)
    a[:, 0], a[:, 32::32] = 1.0, step / 4
    launch.run_interpreted(matmul_call(a, b, out, "ieee"), tile(16, 16, 32, group=1))
    assert float((out.double() - (1 + 127 * step / 4)).abs().max()) <= step


def test_sizes_near_the_end_of_32_bits_are_wide():
    limit = WIDE_FROM
    assert limit + 2**12 < 2**31
    for m, k, wide in ((limit, 1, True), (limit - 1, 1, False), (1, limit, True)):
        a = torch.empty((), dtype=torch.int8).expand(m, k)
        call = matmul_call(a, a[:1].mT, torch.empty((), dtype=torch.int32).expand(m, 1), "ieee")
        assert tile_family._args(call)["WIDE"] is wide


def test_a_second_matrix_that_lies_far_apart_makes_a_gated_product_wide():
    one = torch.empty((), dtype=torch.float16).expand(64, 64)
    call = matmul_call(one, one, one, "ieee", activation="silu", up=one)
    for step, wide in ((64, False), (2**26, True)):
        far = replace(call, up=replace(call.up, strides=(step, 1)))
        assert tile_family._args(far)["WIDE"] is wide


@pytest.mark.parametrize(("dtype", "wide"), [(torch.complex64, False), (torch.complex128, True)], ids=str)
def test_words_are_counted_of_what_is_transposed_in_place(dtype, wide):
    """An element of 16 bytes is two of them."""
    x = torch.empty_strided((2, 2), (3 << 29, 1), dtype=dtype, device="meta")
    call = replace(permute.permute_call(x, x, [1, 0]), in_place=True)
    (step,) = work_of(call, in_place(call.problem), 1, False).steps
    assert step.args["WIDE"] is wide


NT = MatmulProblem(1, 512, 512, 512, "float32", "float32", b_layout="column")


def test_which_products_are_made_so():
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
    a, b = values((3, 5, 7), torch.float32), placed(values((7, 9), torch.float32, 1), "column")
    call = matmul_call(a.mT.contiguous().mT, b.expand(3, 7, 9), torch.empty(3, 5, 9), "ieee")
    config = model.pick(call.problem, TARGETS["nvidia-h200"])
    work = work_of(call, config, 132, False)
    assert [section.elements for section in work.scratch.values()] == [7 * 32]
    launch.run_interpreted(call, config)
    assert_product(call.out.tensor, a, b)
