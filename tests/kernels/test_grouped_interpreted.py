"""Both kernels of groups in Triton's interpreter: every grouping, layout and kind of offsets, good or bad."""

import itertools
import math

import pytest
import torch

import tritile
from tests.configs import of_groups, tile
from tests.groups import OFFSETS, SHARED, assert_groups, offsets, operands, shape_of, spoiled
from tests.reference import frame, guard_intact, placed, values
from tritile.errors import TuningError
from tritile.families.common import grids
from tritile.families.grouped.family import tile_work
from tritile.ops.grouped import Operands, described
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

TILE = tile(16, 32, 16, group=2)
RAGGED = ("rows", "columns", "k")


TMA = [
    of_groups(16, 32, 16, group=2, persistent=p, subtiles=s) for p, s in ((True, 1), (False, 1), (True, 2))
]
# Every kind of offsets by programs that go on to a next tile, and by others the kinds that differ most.
BY_TMA = [
    *((kind, TMA[0]) for kind in OFFSETS),
    *itertools.product(("uneven", "a rest", "bad throughout"), TMA[1:]),
    ("many", TMA[1]),
]


def posed(ragged, offs, dtype=torch.float32):
    """Operands of which no size is a multiple of a block, 40 being shared; of many groups small ones."""
    sizes = {"rows": (SHARED, 36, 28), "columns": (36, SHARED, 28), "k": (20, 36, SHARED)}[ragged]
    if len(offs) > 4:
        sizes = tuple(size if size == SHARED else size % 16 for size in sizes)
    return operands(ragged, len(offs), sizes, dtype)


def run(config, a, b, offs, layout="row"):
    """Into a frame of poison that nothing may touch but the result."""
    buffer, out = frame(shape_of(a, b, offs), torch.float32, layout)
    launch.run_interpreted(described(Operands(a, b, offs, None, None), out, "ieee"), config)
    assert_groups(out, a, b, offs)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("ragged", RAGGED)
def test_offsets_by_pointers(ragged, kind):
    offs = offsets(kind)
    a, b = posed(ragged, offs)
    spoiled(a, b, offs, ragged)
    run(TILE, a, b, offs)


@pytest.mark.parametrize(("kind", "config"), BY_TMA, ids=str)
def test_offsets_of_rows_by_descriptor(config, kind):
    offs = offsets(kind)
    a, b = posed("rows", offs)
    spoiled(a, b, offs, "rows")
    run(config, a, b, offs)


@pytest.mark.parametrize(("kind", "config"), BY_TMA, ids=str)
def test_offsets_of_k_by_descriptor(config, kind):
    """K is the outer dimension of both, as in gradients of weights: the hardware cuts at a group's end."""
    offs = offsets(kind)
    a, b = posed("k", offs)
    spoiled(a, b, offs, "k")
    run(config, placed(a, "column"), b, offs)


@pytest.mark.parametrize("config", [TILE, TMA[0]], ids=str)
@pytest.mark.parametrize("turn", [("row", "row"), ("row", "column"), ("column", "row")], ids=str)
@pytest.mark.parametrize("ragged", ["rows", "columns", "none"])
def test_matrices_of_groups_by_rows_or_columns(ragged, turn, config):
    offs = torch.tensor([8, 8, 20, 40], dtype=torch.int32)
    within = {"rows": turn[0] == "column", "columns": turn[1] == "row", "none": False}[ragged]
    if ragged == "none":
        a, b = operands(ragged, 3, (20, 36, 28), torch.float32)
        offs = None
    else:
        a, b = posed(ragged, offs)
    a, b = placed(a, turn[0]), placed(b, turn[1])
    if within and config is not TILE:
        with pytest.raises(TuningError, match="along the contiguous dimension of a"):
            run(config, a, b, offs)
    else:
        run(config, a, b, offs)


@pytest.mark.parametrize("layout", ["sliced", "column_sliced", "sparse"])
@pytest.mark.parametrize("ragged", RAGGED)
def test_any_strides_by_pointers(ragged, layout):
    offs = offsets("a rest")
    a, b = (placed(x, layout) for x in posed(ragged, offs))
    run(TILE, a, b, offs, layout)


@pytest.mark.parametrize("layout", ["column", "sparse", "offset"])
@pytest.mark.parametrize("ragged", ["rows", "k"])
def test_results_that_no_descriptor_stores(ragged, layout):
    offs = torch.tensor([4, 24, 24, 36], dtype=torch.int32)
    a, b = posed(ragged, offs)
    run(TMA[0], placed(a, "column") if ragged == "k" else a, b, offs, layout)


@pytest.mark.parametrize("config", TMA, ids=str)
@pytest.mark.parametrize("ragged", ["rows", "k"])
@pytest.mark.parametrize("columns", [3, 36])
def test_rows_that_start_on_16_bytes_wherever_they_end(config, ragged, columns):
    offs = torch.tensor([4, 24, 24, 36], dtype=torch.int32)
    a, b = posed(ragged, offs)
    b = placed(b[..., :columns].contiguous(), "padded")
    run(config, placed(a, "column") if ragged == "k" else a, b, offs, "padded")


def test_operands_that_no_descriptor_sees():
    offs = offsets("uneven")
    a, b = posed("rows", offs)
    with pytest.raises(TuningError, match="start on 16 bytes"):
        run(TMA[0], placed(a, "offset"), b, offs)


@pytest.mark.parametrize("turn", [("row", "row"), ("row", "column"), ("column", "column")], ids=str)
def test_k_that_is_contiguous_is_not_for_descriptors(turn):
    offs = offsets("uneven")
    a, b = posed("k", offs)
    with pytest.raises(TuningError, match="along the contiguous dimension of an operand"):
        run(TMA[0], placed(a, turn[0]), placed(b, turn[1]), offs)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 40, 3), (40, 1, 5), (33, 2, 1)], ids=str)
@pytest.mark.parametrize("ragged", RAGGED)
def test_thin_ones(ragged, sizes):
    shared = {"rows": 0, "columns": 1, "k": 2}[ragged]
    offs = torch.tensor([sizes[shared] // 2, sizes[shared]], dtype=torch.int32)
    a, b = operands(ragged, 2, sizes, torch.float32)
    run(TILE, a, b, offs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ragged", [*RAGGED, "none"])
def test_the_operation(ragged, dtype):
    offs = offsets("a rest") if ragged != "none" else None
    a, b = posed(ragged, offs, dtype) if offs is not None else operands(ragged, 2, (9, 7, 5), dtype)
    out = tritile.grouped_matmul(a, b, offs)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_groups(out, a, b, offs)
    given = torch.empty(out.shape, dtype=torch.float32)
    assert tritile.grouped_matmul(a, b, offs, out=given, out_dtype=given.dtype) is given
    assert_groups(given, a, b, offs)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("ragged", [*RAGGED, "none"])
def test_scales(ragged, dtype):
    """Scales are powers of two, whose rounding nothing shows, and NaN where no group reads them."""
    offs = offsets("a rest") if ragged != "none" else None
    groups = 4
    a, b = posed(ragged, offs, dtype) if offs is not None else operands(ragged, groups, (9, 7, 5), dtype)
    m, n = a.shape[-2], b.shape[-1]
    of_a = {"rows": (m,), "columns": (groups, m), "k": (groups * m,), "none": (groups, m)}[ragged]
    of_b = {"rows": (groups, n), "columns": (n,), "k": (groups * n,), "none": (groups, n)}[ragged]
    scale_a, scale_b = (torch.exp2(values(s, torch.float32, i).round()) for i, s in enumerate((of_a, of_b)))
    if ragged in ("rows", "columns"):
        {"rows": scale_a, "columns": scale_b}[ragged][30:] = math.nan
    out = tritile.grouped_matmul(a, b, offs, scale_a=scale_a, scale_b=scale_b)
    assert out.dtype == torch.bfloat16
    by_row = scale_a.view(groups, -1, 1) if ragged in ("k", "none") else scale_a.unsqueeze(-1)
    by_column = scale_b.view(groups, 1, -1) if ragged in ("k", "none") else scale_b.unsqueeze(-2)
    plain = tritile.grouped_matmul(a, b, offs, out_dtype=torch.float32)
    assert_groups(plain, a, b, offs)
    owner = torch.tensor([0] * 3 + [2] * 14 + [3] * 13 + [0] * 10)
    if ragged == "rows":
        by_row, by_column = by_row.nan_to_num(1.0), by_column[owner, 0]
    if ragged == "columns":
        by_row, by_column = by_row[owner, :, 0].T, by_column.nan_to_num(1.0)
    assert torch.equal(out, (plain * by_row * by_column).bfloat16())


@pytest.mark.parametrize("ragged", RAGGED)
def test_nothing_to_multiply(ragged):
    empty = torch.zeros(2, dtype=torch.int32)
    sizes = {"rows": (0, 4, 3), "columns": (4, 0, 3), "k": (4, 3, 0)}[ragged]
    out = tritile.grouped_matmul(*operands(ragged, 2, sizes, torch.float32), empty)
    assert out.shape == ((2, 4, 3) if ragged == "k" else sizes[:2])
    assert not out.any()
    a, b = operands(ragged, 0, (4, 4, 4), torch.float32)
    none = tritile.grouped_matmul(a, b, empty[:0])
    assert none.shape == ((0, 4, 4) if ragged == "k" else (4, 4))
    assert not none.any()
    if ragged != "k":
        flat = tritile.grouped_matmul(*operands(ragged, 2, (4, 4, 0), torch.float32), empty)
        assert flat.shape == (4, 4)
        assert not flat.any()


@pytest.mark.parametrize("ragged", RAGGED)
def test_offsets_of_64_bits_within_a_tile(ragged, monkeypatch):
    """Where tensors do not need them: the answers must be the same."""
    monkeypatch.setattr(grids, "WIDE_FROM", 0)
    offs = offsets("a rest")
    a, b = posed(ragged, offs)
    assert wide(a, b, offs)
    run(TILE, placed(a, "sparse"), placed(b, "column"), offs)


def wide(a, b, offs):
    out = torch.empty((), device="meta").expand(shape_of(a, b, offs))
    (step,) = tile_work(described(Operands(a, b, offs, None, None), out, "ieee"), TILE, 1, False).steps
    return step.args["WIDE"]


def test_strides_that_make_tiles_wide():
    """16 rows of a tile, or 16 of K, that reach beyond 32 bits."""
    offs = offsets("uneven")
    a, b = posed("rows", offs)
    assert not wide(a, b, offs)
    for stride, needed in ((2**27 - 2**13, False), (2**27, True)):
        far_a = torch.empty_strided(a.shape, (stride, 1), device="meta")
        far_b = torch.empty_strided(b.shape, (28 * stride, stride, 1), device="meta")
        assert wide(far_a, b, offs) is needed
        assert wide(a, far_b, offs) is needed
