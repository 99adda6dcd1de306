"""Both kernels of groups in Triton's interpreter: every grouping, layout and kind of offsets, good or bad."""

import itertools

import pytest
import torch

import tritile
from tests.configs import of_groups, tile
from tests.groups import OFFSETS, SHARED, assert_groups, offsets, operands, shape_of, spoiled
from tests.reference import frame, guard_intact, placed
from tritile.errors import TuningError
from tritile.families import launching
from tritile.families.common import grids
from tritile.families.grouped.family import tile_work
from tritile.families.grouped.groups import zero_rows
from tritile.ops.grouped import grouped_call

pytestmark = pytest.mark.interpreted

TILE = tile(16, 32, 16, group=2)
RAGGED = ("rows", "columns")


TMA = [
    of_groups(16, 32, 16, group=2, persistent=p, subtiles=s) for p, s in ((True, 1), (False, 1), (True, 2))
]


def posed(ragged, offs, dtype=torch.float32):
    """Operands of which no size is a multiple of a block, 40 being shared; of many groups small ones."""
    sizes = {"rows": (SHARED, 36, 28), "columns": (36, SHARED, 28), "k": (20, 36, SHARED)}[ragged]
    if len(offs) > 4:
        sizes = tuple(size if size == SHARED else size % 16 for size in sizes)
    return operands(ragged, len(offs), sizes, dtype)


def run(config, a, b, offs, layout="row"):
    """Into a frame of poison that nothing may touch but the result; without a config by the operation."""
    buffer, out = frame(shape_of(a, b, offs), torch.float32, layout)
    if config is None:
        tritile.grouped_matmul(a, b, offs, out=out)
    else:
        launching.run_interpreted(grouped_call(a, b, offs, None, None, out, "ieee"), config)
    assert_groups(out, a, b, offs)
    assert guard_intact(buffer, out)


# Every kind of offsets by pointers, group by group where they share K, and by programs that go on to a next
# tile; by others the kinds that differ most.
BY_KIND = [
    *itertools.product(OFFSETS, RAGGED, [TILE]),
    *itertools.product(OFFSETS, ["k", "k, by columns"], [None]),
    *itertools.product(OFFSETS, ["rows"], TMA[:1]),
    *itertools.product(("uneven", "a rest", "bad throughout"), ["rows"], TMA[1:]),
    ("many", "rows", TMA[1]),
]


@pytest.mark.parametrize(("kind", "ragged", "config"), BY_KIND, ids=str)
def test_offsets(kind, ragged, config):
    """No group reads what belongs to another, or to none."""
    (ragged, _, layout), offs = ragged.partition(", by "), offsets(kind)
    a, b = posed(ragged, offs)
    spoiled(a, b, offs, ragged)
    run(config, placed(a, "column") if ragged == "k" else a, b, offs, "column" if layout else "row")


@pytest.mark.parametrize("config", [TILE, TMA[0]], ids=str)
@pytest.mark.parametrize("turn", [("row", "row"), ("row", "column"), ("column", "row")], ids=str)
@pytest.mark.parametrize("ragged", RAGGED)
def test_group_matrices_by_rows_or_columns(ragged, turn, config):
    offs = torch.tensor([8, 8, 20, 40], dtype=torch.int32)
    within = {"rows": turn[0] == "column", "columns": turn[1] == "row"}[ragged]
    a, b = (placed(x, layout) for x, layout in zip(posed(ragged, offs), turn, strict=True))
    if within and config is not TILE:
        with pytest.raises(TuningError, match="along the contiguous dimension of a"):
            run(config, a, b, offs)
    else:
        run(config, a, b, offs)


ON_16_BYTES = torch.tensor([4, 24, 24, 36], dtype=torch.int32)


@pytest.mark.parametrize("layout", ["column", "sliced", "column_sliced", "sparse", "offset"])
@pytest.mark.parametrize("ragged", [*RAGGED, "by descriptor"])
def test_any_strides(ragged, layout, monkeypatch):
    """By descriptor of results alone; by pointers with 64-bit offsets, too, where none are needed."""
    if ragged == "by descriptor":
        run(TMA[0], *posed("rows", ON_16_BYTES), ON_16_BYTES, layout)
        return
    offs = offsets("a rest")
    a, b = (placed(x, layout) for x in posed(ragged, offs))
    run(TILE, a, b, offs, layout)
    monkeypatch.setattr(grids, "WIDE_FROM", 0)
    assert wide(a, b, offs)
    run(TILE, a, b, offs, layout)


@pytest.mark.parametrize("config", TMA, ids=str)
@pytest.mark.parametrize("columns", [3, 36])
def test_rows_starting_on_16_bytes(config, columns):
    a, b = posed("rows", ON_16_BYTES)
    run(config, a, placed(b[..., :columns].contiguous(), "padded"), ON_16_BYTES, "padded")


def test_operands_that_no_descriptor_sees():
    offs = offsets("uneven")
    a, b = posed("rows", offs)
    with pytest.raises(TuningError, match="start on 16 bytes"):
        run(TMA[0], placed(a, "offset"), b, offs)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 40, 3), (40, 1, 5), (33, 2, 1)], ids=str)
@pytest.mark.parametrize("ragged", [*RAGGED, "k"])
def test_thin_ones(ragged, sizes):
    shared = {"rows": 0, "columns": 1, "k": 2}[ragged]
    offs = torch.tensor([sizes[shared] // 2, sizes[shared]], dtype=torch.int32)
    a, b = operands(ragged, 2, sizes, torch.float32)
    run(None if ragged == "k" else TILE, a, b, offs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ragged", [*RAGGED, "k", "none"])
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


@pytest.mark.parametrize("ragged", [*RAGGED, "k"])
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


def wide(a, b, offs):
    out = torch.empty((), device="meta").expand(shape_of(a, b, offs))
    (step,) = tile_work(grouped_call(a, b, offs, None, None, out, "ieee"), TILE, 1, False).steps
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


@pytest.mark.parametrize("last", [0, 5, 36, 40])
@pytest.mark.parametrize("layout", ["row", "sliced"])
def test_rows_of_no_group_are_zero(layout, last):
    buffer, out = frame((40, 36), torch.bfloat16, layout)
    out.fill_(1)
    ends = torch.tensor([0, last], dtype=torch.int32)
    zero_rows[(3,)](out, ends, 2, *out.shape, out.stride(0), BLOCK=16)
    assert (out[:last] == 1).all()
    assert not out[last:].any()
    assert guard_intact(buffer, out)
