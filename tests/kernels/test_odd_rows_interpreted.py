"""Products of few rows by a matrix of odd rows, interpreted: right, and nothing beside them touched."""

import pytest
import torch

from tests.reference import (
    Sides,
    assert_fused,
    assert_product,
    frame,
    guard_intact,
    placed,
    poison_empty,
    values,
)
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import ACTIVATIONS
from tritile.families.odd_rows import family
from tritile.families.space import illegal
from tritile.ops.described import Extras, described
from tritile.runtime import launch

H200 = target_device("nvidia-h200")
HALF = torch.float16


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Workspaces and outputs begin as NaN, so that what is not written shows."""
    poison_empty(monkeypatch)


def config_of(rows, split=1, block_n=16, block_k=32):
    block_m = max(16, 1 << (rows - 1).bit_length())
    warps = 8 if block_m == 256 else 4
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT_K": split}
    return Config.of(warps, 3, family.NAME, **blocks)


def amid_nan(n, k, row, offset):
    """Return b [k, n], contiguous along K, rows `row` apart from `offset` past a word, with NaN around it."""
    buffer = torch.full((64 + n * row,), float("nan"), dtype=HALF)
    first = -(buffer.data_ptr() // 2) % 8 + 8 + offset
    b = buffer[first:].as_strided((n, k), (row, 1))
    b.copy_(values((n, k), HALF, 1))
    return b.mT


def check(a, b, layout="row", split=1, extras=None):
    """Make a product into a frame of poison by a legal config, twice: right, and the same bit for bit."""
    m, n = a.shape[0], b.shape[1]
    buffer, out = frame((m, n), HALF, layout)
    call = described(a, b, out, "ieee", *([extras] if extras else []))
    config = config_of(min(m, n), split)
    assert illegal(config, call.problem, H200) is None
    launch.run_interpreted(call, config)
    first = out.clone()
    launch.run_interpreted(call, config)
    assert torch.equal(out, first)
    if extras is None:
        assert_product(out, a, b)
    assert guard_intact(buffer, out)
    return first


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize(("row", "offset"), [(301, 0), (302, 3), (300, 1), (304, 5), (305, 4), (303, 7)])
def test_rows_that_begin_anywhere_in_a_word(row, offset, split):
    for k in (row, 290, 289):
        check(values((5, k), HALF), amid_nan(37, k, row, offset), split=split)


@pytest.mark.parametrize("k", [1, 3, 7, 8, 9, 15, 17, 33, 65])
def test_short_rows(k):
    for n in (1, 2, 9, 40):
        check(values((n, k), HALF), amid_nan(n + 1, k, 67, 1))


@pytest.mark.parametrize("m", [1, 15, 16, 17, 33, 100, 128, 200])
def test_numbers_of_rows(m):
    check(values((m, 131), HALF), amid_nan(m + 1, 131, 131, 0), split=2)


@pytest.mark.parametrize(
    "layout", ["row", "column", "sliced", "column_sliced", "offset", "sparse", "strided"]
)
def test_every_layout_of_x_and_of_out(layout):
    check(placed(values((4, 317), HALF), layout), amid_nan(19, 317, 317, 0), layout, split=2)


@pytest.mark.parametrize("n", [1, 5, 19, 70])
@pytest.mark.parametrize("of_b", ["row", "column"])
def test_few_columns_are_made_as_the_transpose(n, of_b):
    a = amid_nan(90, 299, 299, 2).mT
    check(a, placed(values((299, n), HALF, 3), of_b), "sliced", split=2)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize("turned", [False, True])
def test_epilogues(activation, turned, split):
    m, n = (30, 3) if turned else (3, 30)
    a, b = values((m, 131), HALF), amid_nan(n, 131, 131, 1)
    if turned:
        a, b = amid_nan(m, 131, 131, 1).mT, values((131, n), HALF, 1)
    row, column, full = values((n,), HALF, 2), values((m, 1), HALF, 3), values((m, n), HALF, 4)
    sides = Sides(column, row, row, full, activation, -0.3, 1.7)
    assert_fused(check(a, b, "sliced", split, Extras(*sides)), a, b, sides)


def test_infinities_and_nan_stay_in_their_rows_and_columns():
    a, b = values((3, 517), HALF), amid_nan(20, 517, 517, 0)
    a[1, 3], a[2, 516], b[9, 7], b[516, 11] = torch.inf, torch.nan, torch.nan, torch.inf
    wanted = a.double() @ b.double()
    out = torch.empty(3, 20, dtype=HALF)
    launch.run_interpreted(described(a, b, out, "ieee"), config_of(3, 2))
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.isinf(), wanted.isinf())
