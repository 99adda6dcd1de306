"""Products of few rows without tensor cores, in the interpreter: right, and nothing beside them touched."""

from dataclasses import replace

import pytest
import torch

from tests.beside import reading_only
from tests.reference import (
    Sides,
    assert_fused,
    assert_product,
    frame,
    guard_intact,
    name,
    placed,
    poison_empty,
    values,
)
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import ACTIVATIONS
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.ops.described import Extras, described
from tritile.runtime import launch

H200 = target_device("nvidia-h200")
FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    poison_empty(monkeypatch)


def config_of(rows, dtype, warps=1, stages=3):
    """Return a config of 4 words a thread, for so many rows: 4 rows of w at once, 512 bytes of each."""
    block_m = 1 << (rows - 1).bit_length()
    blocks = {"BLOCK_M": block_m, "BLOCK_N": 4 * warps, "BLOCK_K": 512 // dtype.itemsize}
    return Config.of(warps, stages, "few_rows", **blocks)


def compiled_in(call, config, which):
    """Return one of the values by which the call's kernel is compiled."""
    return work_of(call, config, H200.processors, True).steps[0].args[which]


def check(a, b, layout="row", config=None):
    """Make a product into a frame of poison, reading elements of a and b alone; return the call.

    Of bfloat16 in fp32, as the interpreter cuts what it should round to bfloat16.
    """
    m, n = a.shape[-2], b.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    buffer, out = frame((*batch, m, n), FP32 if a.dtype == BF16 else a.dtype, layout)
    call = described(a, b, out, "ieee")
    rows = call.problem.m if call.problem.m <= 8 else call.problem.n
    config = config or config_of(rows, a.dtype)
    assert illegal(config, call.problem, H200) is None
    with reading_only(a, b):
        launch.run_interpreted(call, config)
    assert_product(out, a, b)
    assert guard_intact(buffer, out)
    return call


def at(offset, n, k, dtype, row=None):
    """Return b [k, n], contiguous along K, that begins `offset` elements after a word, rows `row` apart."""
    row = k if row is None else row
    buffer, _ = frame((1, 32 + n * row), dtype, "row")
    first = -(buffer.data_ptr() // dtype.itemsize) % 16 + offset
    b = buffer[0, first:].as_strided((n, k), (row, 1))
    b.copy_(values((n, k), dtype, 1))
    return b.mT


@pytest.mark.parametrize("dtype", [FP32, HALF, BF16], ids=name)
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
def test_any_few_rows(dtype, m):
    check(values((m, 523), dtype), placed(values((523, 37), dtype, 1), "column"))


@pytest.mark.parametrize("k", range(2, 18))
def test_rows_that_end_before_a_word_does(k):
    for offset in (0, 1, 7):
        check(values((1 + k % 3, k), HALF), at(offset, 11, k, HALF))


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("row", [259, 260, 264, 272])
def test_rows_that_begin_anywhere_in_a_word(offset, row):
    """Rows 259 elements apart begin at 8 places in a word, others at 4, 2 and 1."""
    for k in (256, 259):
        check(values((2, k), HALF), at(offset, 9, k, HALF, row))
    if offset < 4:
        check(values((2, 255), FP32), at(offset, 9, 255, FP32, row))


@pytest.mark.parametrize("n", [1, 7, 8, 31, 32, 33])
@pytest.mark.parametrize("k", [256, 301])
def test_every_last_tile(n, k):
    check(values((2, k), HALF), at(0, n, k, HALF))
    check(values((2, k), HALF), at(3, n, k, HALF))


def test_a_row_of_one_element_whatever_lies_between():
    """One element of each row, 3 apart: as K is 1 no row is known to begin where another does."""
    check(values((2, 1), HALF), values((1, 30), HALF, 1)[:, ::3])


@pytest.mark.parametrize(
    ("k", "dtype", "whole"), [(304, HALF, 1), (300, FP32, 1), (301, FP32, 4), (301, HALF, 8)]
)
def test_x_is_read_in_words_where_all_rows_are_whole_words(k, dtype, whole):
    """`whole`: how many rows of w are there to one that begins on a word."""
    call = check(values((3, k), dtype), placed(values((k, 21), dtype, 1), "column"))
    found = {name: compiled_in(call, config_of(3, dtype), name) for name in ("PERIOD", "X_WORDS", "EDGES")}
    assert found == {"PERIOD": whole, "X_WORDS": whole == 1, "EDGES": whole > 1}


@pytest.mark.parametrize(
    "layout", ["row", "column", "sliced", "column_sliced", "offset", "sparse", "strided"]
)
def test_every_layout_of_x_and_of_out(layout):
    for k in (304, 317):
        x, w = placed(values((4, k), HALF), layout), placed(values((k, 19), HALF, 1), "column")
        check(x, w, layout)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_stages_and_warps_change_nothing(stages):
    a, b = values((2, 517), HALF), placed(values((517, 21), HALF, 1), "column")
    for warps in (1, 4):
        check(a, b, config=config_of(2, HALF, warps, stages))


@pytest.mark.parametrize("n", [1, 5, 8])
@pytest.mark.parametrize("layout", ["row", "sliced", "padded"])
@pytest.mark.parametrize("k", [299, 304])
def test_few_columns_are_made_as_the_transpose(n, layout, k):
    of_b = "row" if n == 5 else "column"
    check(placed(values((40, k), HALF), layout), placed(values((k, n), HALF, 1), of_b), "sliced")


def test_few_columns_of_fp32_that_are_copied_row_by_row_first():
    a, b = values((130, 67), FP32), placed(values((67, 3), FP32, 1), "column")
    buffer, out = frame((130, 3), FP32, "sliced")
    call = described(a, b, out, "ieee")
    assert call.problem.by_rows
    launch.run_interpreted(call, config_of(3, FP32))
    assert_product(out, a, b)
    assert guard_intact(buffer, out)


def test_batches_broadcast_and_of_two_dimensions():
    a, b = values((3, 2, 2, 67), HALF), placed(values((3, 2, 67, 9), HALF, 1), "column")
    for left, right in ((a, b), (a.transpose(0, 1), b.transpose(0, 1)), (a[:1], b), (a, b[0]), (a[:, :1], b)):
        check(left, right)
    check(b.mT, a.mT)


def test_rows_that_overlap_and_begin_one_element_apart():
    line = values((1, 400), HALF, 2)[0]
    overlapping = line.as_strided((3, 64), (1, 1))
    check(overlapping, placed(values((64, 19), HALF, 1), "column"))


def test_a_stretched_w_is_read_at_each_row():
    row = values((1, 300), HALF, 1)
    check(values((2, 300), HALF), row.expand(20, 300).mT)


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize("turned", [False, True])
def test_epilogues(activation, turned):
    m, n = (30, 3) if turned else (3, 30)
    a, b = values((m, 131), FP32), placed(values((131, n), FP32, 1), "column")
    row, column, full = values((n,), FP32, 2), values((m, 1), FP32, 3), values((m, n), FP32, 4)
    sides = Sides(column, row, row, full, activation, -0.3, 1.7)
    buffer, out = frame((m, n), FP32, "sliced")
    call = described(a, b, out, "ieee", Extras(*sides))
    assert illegal(config_of(3, FP32), call.problem, H200) is None
    with reading_only(a, b, row, column, full):
        launch.run_interpreted(call, config_of(3, FP32))
    assert_fused(out, a, b, sides)
    assert guard_intact(buffer, out)


def test_infinities_and_nan_stay_in_their_rows_and_columns():
    a, b = values((3, 517), FP32), placed(values((517, 20), FP32, 1), "column")
    a[1, 3], b[9, 7] = torch.inf, torch.nan
    out = torch.empty(3, 20)
    launch.run_interpreted(described(a, b, out, "ieee"), config_of(3, FP32))
    assert torch.equal(out.isnan(), (a @ b).isnan())
    assert torch.equal(out.isinf(), (a @ b).isinf())


def test_sums_of_fp32_are_compensated():
    """Sums of one sign, long enough that plain ones in fp32 lose more than their last bits."""
    k = 1 << 16
    a, b = values((1, k), FP32).abs(), placed(values((k, 1), FP32, 1).abs(), "column")
    out = torch.empty(1, 1)
    launch.run_interpreted(described(a, b, out, "ieee"), config_of(1, FP32))
    wanted = a.double() @ b.double()
    assert ((out - wanted).abs() <= 4 * torch.finfo(FP32).eps * wanted).all()


FAULTS = [
    ({"m": 9, "n": 9}, "9 rows and 9 columns"),
    ({"b_layout": "row"}, "not contiguous along K"),
    ({"dtype": "float64", "out_dtype": "float64"}, "float64"),
    ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, "tf32"),
]


@pytest.mark.parametrize(("changes", "reason"), FAULTS)
def test_what_the_kernel_does_not_make_is_illegal(changes, reason):
    call = described(values((2, 64), HALF), values((40, 64), HALF).mT, torch.empty(2, 40, dtype=HALF), "ieee")
    problem = replace(call.problem, **changes)
    assert reason in illegal(config_of(2, HALF), problem, H200)


def test_block_m_is_the_number_of_rows_rounded_up():
    call = described(values((3, 64), HALF), values((40, 64), HALF).mT, torch.empty(3, 40, dtype=HALF), "ieee")
    reasons = [illegal(config_of(rows, HALF), call.problem, H200) for rows in (2, 4, 8)]
    assert [reason is None for reason in reasons] == [False, True, False]
