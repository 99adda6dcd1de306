"""Products of few rows by a matrix contiguous along N, in the interpreter: right, nothing beside touched."""

import functools
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
from tritile.families.few_rows import across
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.ops.described import Extras, described
from tritile.runtime import launch

H200 = target_device("nvidia-h200")
FP32, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    poison_empty(monkeypatch)


def config_of(rows, dtype, columns=32, unroll=2):
    """Return a config of one warp for so many rows."""
    block_m = 1 << (rows - 1).bit_length()
    own = min(16 // dtype.itemsize, 32 // block_m)
    blocks = {"BLOCK_M": block_m, "BLOCK_N": columns, "BLOCK_K": 32 * own * unroll // columns}
    return Config.of(1, 1, across.NAME, **blocks)


def check(a, b, layout="row", config=None):
    """Make a product twice into a frame of poison, reading elements of a and b alone; return its launches.

    Of bfloat16 in fp32, as the interpreter cuts what it should round to bfloat16.
    """
    m, n = a.shape[-2], b.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    buffer, out = frame((*batch, m, n), FP32 if a.dtype == BF16 else a.dtype, layout)
    call = described(a, b, out, "ieee")
    config = config or config_of(m if m <= 8 else n, a.dtype)
    assert illegal(config, call.problem, H200) is None
    with reading_only(a, b):
        launch.run_interpreted(call, config)
        first = out.clone()
        launch.run_interpreted(call, config)
    assert torch.equal(out, first)
    assert_product(out, a, b)
    assert guard_intact(buffer, out)
    return work_of(call, config, H200.processors, True)


def shared_by(work):
    """Return how many programs share the K of each tile."""
    return work.steps[0].args["split"]


def compiled_in(work, which):
    return work.steps[0].args[which]


@pytest.fixture
def alone(monkeypatch):
    """Let no programs share K, as where one has as many tiles as the GPU has room."""
    monkeypatch.setattr(across, "parts", lambda config, problem, processors: 1)


@pytest.mark.parametrize("dtype", [FP32, HALF, BF16], ids=name)
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
def test_any_few_rows(dtype, m):
    work = check(values((m, 523), dtype), values((523, 37), dtype, 1))
    assert shared_by(work) > 1
    assert len(work.steps) == 2


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("n", [2, 31, 32, 33, 72])
@pytest.mark.usefixtures("alone")
def test_one_kernel_makes_it_where_programs_do_not_share_k(m, n):
    work = check(values((m, 67), HALF), values((67, n), HALF, 1))
    assert len(work.steps) == 1
    assert not work.scratch


@pytest.mark.parametrize("k", [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64])
def test_every_last_block_of_k_and_fewer_than_parts(k):
    check(values((2, k), HALF), values((k, 40), HALF, 1))


@pytest.mark.parametrize("n", [2, 7, 8, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("dtype", [HALF, FP32], ids=name)
def test_every_last_tile(n, dtype):
    check(values((2, 70), dtype), values((70, n), dtype, 1))


@pytest.mark.parametrize(
    ("n", "dtype", "wide"), [(40, HALF, 8), (36, HALF, 4), (38, HALF, 2), (39, HALF, 1), (36, FP32, 4)]
)
def test_w_is_read_as_wide_as_its_rows_are_aligned(n, dtype, wide):
    work = check(values((3, 50), dtype), values((50, n), dtype, 1))
    assert compiled_in(work, "WIDE") == wide


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("row", [48, 49, 50, 52])
def test_rows_that_begin_anywhere(offset, row):
    """No element beside a row is read, though rows are aligned and end amid a word."""
    for n in (35, 40):
        buffer, _ = frame((1, 64 + 30 * row), HALF, "row")
        first = -(buffer.data_ptr() // 2) % 16 + offset
        b = buffer[0, first:].as_strided((30, n), (row, 1))
        b.copy_(values((30, n), HALF, 1))
        check(values((2, 30), HALF), b)


@pytest.mark.parametrize(
    "layout", ["row", "column", "sliced", "column_sliced", "offset", "sparse", "strided"]
)
@pytest.mark.parametrize("m", [1, 4])
def test_every_layout_of_x_and_of_out(layout, m):
    for k in (64, 77):
        check(placed(values((m, k), HALF), layout), values((k, 41), HALF, 1), layout)


def test_x_in_words_past_whose_end_nothing_is_read():
    a, b = values((1, 77), HALF), values((77, 40), HALF, 1)
    assert compiled_in(check(a, b), "X_WORDS")
    assert not compiled_in(check(values((2, 77), HALF), b), "X_WORDS")


@pytest.mark.parametrize("n", [1, 5, 8])
@pytest.mark.parametrize("m", [40, 77])
def test_few_columns_are_made_as_the_transpose(n, m):
    of_b = "row" if n == 5 else "column"
    a, b = placed(values((m, 67), HALF), "column"), placed(values((67, n), HALF, 1), of_b)
    check(a, b, "sliced", config_of(n, HALF))


def test_batches_broadcast_and_of_two_dimensions():
    a, b = values((3, 2, 2, 67), HALF), values((3, 2, 67, 9), HALF, 1)
    for left, right in ((a, b), (a.transpose(0, 1), b.transpose(0, 1)), (a[:1], b), (a, b[0]), (a[:, :1], b)):
        check(left, right)
    check(b.mT, a.mT, config=config_of(2, HALF))


def test_rows_that_overlap_and_begin_one_element_apart():
    line = values((1, 400), HALF, 2)[0]
    check(line.as_strided((3, 64), (1, 1)), values((64, 40), HALF, 1))
    check(values((3, 64), HALF), line.as_strided((64, 40), (1, 1)))


def test_a_stretched_w_is_read_at_each_row():
    check(values((2, 67), HALF), values((1, 40), HALF, 1).expand(67, 40))


@pytest.mark.parametrize(("columns", "unroll"), [(8, 2), (16, 8), (64, 4), (256, 2)])
@pytest.mark.parametrize("n", [40, 301])
def test_every_shape_of_a_tile(columns, unroll, n):
    check(values((2, 301), HALF), values((301, n), HALF, 1), config=config_of(2, HALF, columns, unroll))


def epilogues(m, n, k, activation):
    a, b = values((m, k), FP32), values((k, n), FP32, 1)
    a = a if m < n else placed(a, "column")
    row, column, full = values((n,), FP32, 2), values((m, 1), FP32, 3), values((m, n), FP32, 4)
    sides = Sides(column, row, row, full, activation, -0.3, 1.7)
    buffer, out = frame((m, n), FP32, "sliced")
    call, config = described(a, b, out, "ieee", Extras(*sides)), config_of(3, FP32)
    assert illegal(config, call.problem, H200) is None
    with reading_only(a, b, row, column, full):
        launch.run_interpreted(call, config)
    assert_fused(out, a, b, sides)
    assert guard_intact(buffer, out)
    return len(work_of(call, config, H200.processors, True).steps)


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize(("m", "n"), [(3, 33), (33, 3)])
def test_epilogues(activation, m, n):
    assert epilogues(m, n, 131, activation) == 2


@pytest.mark.usefixtures("alone")
def test_epilogues_where_programs_do_not_share_k():
    assert epilogues(3, 33, 131, "gelu") == epilogues(33, 3, 131, "gelu") == 1


def test_epilogues_of_batches():
    a, b = values((2, 3, 2, 67), FP32), values((2, 3, 67, 33), FP32, 1)
    bias, residual = values((33,), FP32, 2), values((2, 3, 2, 33), FP32, 4)
    sides = Sides(None, None, bias, residual)
    out = torch.empty(2, 3, 2, 33)
    call = described(a, b, out, "ieee", Extras(*sides))
    launch.run_interpreted(call, config_of(2, FP32))
    assert_fused(out, a, b, sides)


def test_the_residual_may_be_the_result():
    a, b, out = values((2, 131), FP32), values((131, 33), FP32, 1), values((2, 33), FP32, 4)
    sides = Sides(None, None, None, out.clone())
    call = described(a, b, out, "ieee", Extras(residual=out))
    launch.run_interpreted(call, config_of(2, FP32))
    assert_fused(out, a, b, sides)


def test_infinities_and_nan_stay_in_their_rows_and_columns():
    a, b = values((3, 517), FP32), values((517, 37), FP32, 1)
    a[1, 3], b[9, 7] = torch.inf, torch.nan
    out = torch.empty(3, 37)
    launch.run_interpreted(described(a, b, out, "ieee"), config_of(3, FP32))
    assert torch.equal(out.isnan(), (a @ b).isnan())
    assert torch.equal(out.isinf(), (a @ b).isinf())


@pytest.mark.parametrize("shared", [True, False])
def test_sums_of_fp32_are_compensated(monkeypatch, shared):
    """Sums of one sign, long enough that plain ones in fp32 lose more than their last bits."""
    if not shared:
        monkeypatch.setattr(across, "parts", lambda config, problem, processors: 1)
    k = 1 << 15
    a, b = values((1, k), FP32).abs(), values((k, 1), FP32, 1).abs()
    out = torch.empty(1, 1)
    launch.run_interpreted(described(a, b, out, "ieee"), config_of(1, FP32))
    wanted = a.double() @ b.double()
    assert ((out - wanted).abs() <= 4 * torch.finfo(FP32).eps * wanted).all()


def test_more_parts_than_the_second_kernel_has_under_way():
    work = check(values((1, 4099), HALF), values((4099, 33), HALF, 1))
    assert shared_by(work) > across._PARTS


FAULTS = [
    ({"m": 9, "n": 9}, "9 rows and 9 columns"),
    ({"b_layout": "column"}, "not contiguous along N"),
    ({"b_layout": "strided"}, "not contiguous along N"),
    ({"dtype": "float64", "out_dtype": "float64"}, "float64"),
    ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, "tf32"),
]


@pytest.mark.parametrize(("changes", "reason"), FAULTS)
def test_what_the_kernel_does_not_make_is_illegal(changes, reason):
    call = described(values((2, 64), HALF), values((64, 40), HALF), torch.empty(2, 40, dtype=HALF), "ieee")
    assert reason in illegal(config_of(2, HALF), replace(call.problem, **changes), H200)


def test_blocks_that_threads_cannot_share_are_illegal():
    call = described(values((3, 64), HALF), values((64, 40), HALF), torch.empty(3, 40, dtype=HALF), "ieee")
    reason = functools.partial(illegal, problem=call.problem, device=H200)
    assert [reason(config_of(rows, HALF)) is None for rows in (2, 4, 8)] == [False, True, False]
    assert "rows of w" in reason(config_of(4, HALF, 32, 16))
    blocks = {"BLOCK_M": 4, "BLOCK_N": 512, "BLOCK_K": 2}
    assert "BLOCK_N = 512 is not 8 to 256" in reason(Config.of(1, 1, across.NAME, **blocks))
