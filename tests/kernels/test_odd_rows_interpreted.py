"""Products of few rows by a matrix of odd rows, interpreted: right, and nothing beside them touched."""

import pytest
import torch

from tests.reference import (
    LAYOUTS,
    Sides,
    assert_fused,
    assert_product,
    at_offset,
    frame,
    guard_intact,
    placed,
    values,
)
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import ACTIVATIONS
from tritile.families.odd_rows import family
from tritile.families.space import illegal
from tritile.ops.described import NOTHING, Extras, described
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

H200 = target_device("nvidia-h200")
HALF = torch.float16


def config_of(rows, split=1):
    block_m = max(16, 1 << (rows - 1).bit_length())
    warps = 8 if block_m == 256 else 4
    return Config.of(warps, 3, family.NAME, BLOCK_M=block_m, BLOCK_N=16, BLOCK_K=32, SPLIT_K=split)


def check(a, b, layout="row", split=1, extras=None):
    """Make a product into a frame of poison by a legal config; twice alike where programs share K."""
    m, n = a.shape[0], b.shape[1]
    buffer, out = frame((m, n), HALF, layout)
    call = described(a, b, out, "ieee", extras or NOTHING)
    config = config_of(min(m, n), split)
    assert illegal(config, call.problem, H200) is None
    launch.run_interpreted(call, config)
    first = out.clone()
    if split > 1:
        launch.run_interpreted(call, config)
    assert torch.equal(out, first)
    if extras is None:
        assert_product(out, a, b)
    assert guard_intact(buffer, out)
    return first


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize(("row", "offset"), [(141, 0), (142, 3), (140, 1), (144, 5), (145, 4), (143, 7)])
def test_rows_that_begin_anywhere_in_a_word(row, offset, split):
    for k in (row, 130, 129):
        check(values((5, k), HALF), at_offset(offset, 21, k, HALF, row), split=split)


@pytest.mark.parametrize("k", [1, 3, 7, 8, 9, 15, 17, 33, 65])
def test_short_rows(k):
    for n in (1, 2, 9, 40):
        check(values((n, k), HALF), at_offset(1, n + 1, k, HALF, 67))


@pytest.mark.parametrize(
    ("m", "k", "split"), [(1, 131, 2), (15, 301, 4), (17, 131, 2), (33, 131, 2), (100, 67, 1), (200, 99, 2)]
)
def test_numbers_of_rows(m, k, split):
    check(values((m, k), HALF), at_offset(0, m + 1, k, HALF), split=split)


@pytest.mark.parametrize("turned", [False, True])
def test_the_largest_tile_is_stored_in_halves(turned):
    """Of 531 rows 67 begin alike, which is more than half a tile."""
    x, w = values((140, 67), HALF), at_offset(3, 531, 67, HALF)
    a, b = (w.mT, x.mT.contiguous()) if turned else (x, w)
    buffer, out = frame((a.shape[0], b.shape[1]), HALF, "sliced")
    call = described(a, b, out, "ieee")
    config = Config.of(8, 4, family.NAME, BLOCK_M=256, BLOCK_N=128, BLOCK_K=64, SPLIT_K=1)
    assert illegal(config, call.problem, H200) is None
    launch.run_interpreted(call, config)
    assert_product(out, a, b)
    assert guard_intact(buffer, out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_x_and_of_out(layout):
    check(placed(values((4, 131), HALF), layout), at_offset(0, 19, 131, HALF), layout, split=2)


@pytest.mark.parametrize("n", [1, 5, 19, 70])
@pytest.mark.parametrize("of_b", ["row", "column"])
def test_few_columns_are_made_as_the_transpose(n, of_b):
    a = at_offset(2, 90, 131, HALF).mT
    check(a, placed(values((131, n), HALF, 3), of_b), "sliced", split=2)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize("turned", [False, True])
def test_epilogues(activation, turned, split):
    m, n = (30, 3) if turned else (3, 30)
    few, many = values((131, 3), HALF), at_offset(1, 30, 131, HALF)
    a, b = (many.mT, few) if turned else (few.mT, many)
    row, column, full = values((n,), HALF, 2), values((m, 1), HALF, 3), values((m, n), HALF, 4)
    sides = Sides(column, row, row, full, activation, -0.3, 1.7)
    assert_fused(check(a, b, "sliced", split, Extras(*sides)), a, b, sides)


def test_infinities_and_nan_stay_in_their_rows_and_columns():
    a, b = values((3, 133), HALF), at_offset(0, 20, 133, HALF)
    a[1, 3], a[2, 132], b[9, 7], b[132, 11] = torch.inf, torch.nan, torch.nan, torch.inf
    wanted = a.double() @ b.double()
    out = torch.empty(3, 20, dtype=HALF)
    launch.run_interpreted(described(a, b, out, "ieee"), config_of(3, 2))
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.isinf(), wanted.isinf())
