"""Choosing boxes: their formula, when they run in place of a predicted pick, and what is said of them."""

import math
from dataclasses import replace

import pytest

from picture import tiling_of
from tests.configs import boxed
from tritile.choose import gpu_tables, pick, waves
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.errors import UnsupportedError
from tritile.families.permute import boxes
from tritile.families.space import illegal
from tritile.lab import traffic
from tritile.lab.explain import INSTRUCTIONS, LATENCY, MEMORY, SHARED, parts_us

H200 = target_device("nvidia-h200")


def problem(shape, dims, itemsize):
    steps = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        steps[i] = steps[i + 1] * shape[i + 1]
    to = [shape[d] for d in dims]
    dense = [1] * len(to)
    for i in range(len(to) - 2, -1, -1):
        dense[i] = dense[i + 1] * to[i + 1]
    return PermuteProblem.of(to, [steps[d] for d in dims], dense, itemsize)


SHORT = problem((10913728, 2, 5), (1, 0, 2), 1)
LONG = problem((30, 1472, 4864), (2, 0, 1), 1)
THIN = problem((3, 7827648), (1, 0), 1)


# Microseconds of the fastest box, as measured on an H200.
MEASURED = [
    (problem((17, 128, 12, 576), (2, 1, 3, 0), 1), boxed(16384, 128, 16, 8), 12.7),
    (problem((2, 117079424), (1, 0), 1), boxed(8192, 64, 16), 114.4),
    (problem((23296, 18, 5, 2), (2, 0, 3, 1), 2), boxed(4096, 64, 16), 6.0),
    (problem((9984, 3, 120, 40), (3, 0, 2, 1), 2), boxed(16384, 128, 16, 8), 186.1),
    (problem((5, 2, 336, 640, 24), (4, 3, 2, 1, 0), 4), boxed(2048, 64, 16), 113.9),
    (problem((208963, 89), (1, 0), 8), boxed(4096, 64, 4), 82.6),
]  # fmt: skip


@pytest.mark.parametrize(("permuted", "config", "us"), MEASURED)
def test_formula_near_measured(permuted, config, us):
    assert boxes.cost(config, permuted, H200) == pytest.approx(us, rel=0.4)


def test_boxes_without_contention():
    """If elements repeat or have 16 bytes."""
    assert boxes.contends(SHORT)
    assert not boxes.contends(problem((100, 2, 500), (1, 0, 2), 16))
    assert "NVIDIA" in illegal(boxed(4096, 64, 4), SHORT, target_device("gfx942"))
    assert waves.with_margins(SHORT, target_device("gfx942")) == []


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (boxed(8192, 64, 4, 1), "too few or too many for 1 warps"),
        (boxed(64, 64, 4, 4), "too few or too many for 4 warps"),
        (boxed(32768, 64, 4, 16), "BLOCK"),
        (boxed(16, 64, 4, 1), "too few or too many for 1 warps"),
        (Config.of(4, 1, "box", BLOCK=4096, BLOCK_M=64, BLOCK_N=32), "READ"),
    ],
    ids=str,
)
def test_why_boxes_are_illegal(config, why):
    assert why in illegal(config, SHORT, H200)


def test_short_pieces_are_illegal():
    """Rows of 3 bytes that lie 5 apart in out hold no word of 4 wherever they begin."""
    apart = PermuteProblem.of((100, 3), (1, 100), (5, 1), 1)
    assert "shorter than a word" in illegal(boxed(2048, 64, 4), apart, H200)


EXTENTS = [(1024, 4096), (4096, 1024), (8191, 8193), (3, 7827648), (7827648, 5)]
DRAWN = [problem(shape, (1, 0), size) for shape in EXTENTS for size in (1, 2, 4, 8)]
DRAWN += [SHORT, LONG, *(permuted for permuted, _, _ in MEASURED[2:])]
SMALL = [boxed(256, 16, 4, 1), boxed(512, 64, 1, 1), boxed(1024, 32, 16, 1)]


@pytest.mark.parametrize("permuted", DRAWN, ids=lambda permuted: permuted.label)
def test_box_within_its_block(permuted):
    for config in (*boxes.configs(), *SMALL):
        if illegal(config, permuted, H200) is None:
            box = boxes.box_of(config, permuted)
            block = config["BLOCK"]
            assert math.prod(box.rows) <= box.extent <= block
            assert math.prod(box.sides) <= box.pieces.elements <= block
            assert all(0 < side <= size for side, size in zip(box.sides, permuted.shape, strict=True))


WIDER = [config for config in boxes.configs() if config["BLOCK"] >= 4096]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(1024, 1024), (1024, 4096), (8192, 8192), (65536, 256)], ids=str)
def test_power_of_two_rows_spread_banks(shape, itemsize):
    """Rows are kept apart in steps of what is read at once, so no more words meet than are read at once."""
    for config in WIDER:
        box = boxes.box_of(config, problem(shape, (1, 0), itemsize))
        assert boxes.WORD * box.conflicts <= max(config["READ"], itemsize), config


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(1024, 4096), (336, 1040), (48, 65536), (65536, 48)], ids=str)
def test_boxes_of_whole_words(shape, itemsize):
    for config in WIDER:
        box = boxes.box_of(config, problem(shape, (1, 0), itemsize))
        assert box.read * itemsize == max(config["READ"], itemsize)
        assert box.run % box.read == 0
        assert not box.pieces.skewed
        assert box.pieces.size % box.pieces.lanes == 0


def test_boxes_run_short_sides():
    assert pick.plan_for(THIN, H200, "cached").config.family == "box"
    assert pick.plan_for(problem((8192, 8192), (1, 0), 4), H200, "cached").config.family == "tile"


def test_boxes_by_formula_where_no_sweep_has_them(monkeypatch):
    thin = problem((3, 9999999), (1, 0), 1)  # of no other test, as plans are kept
    found, where = gpu_tables.predictor("permute_1", H200)
    known = found.classes["permute_1"]
    tiles = tuple(column for column in known.columns if found.columns[column].family == "tile")
    alone = replace(found, classes={"permute_1": known._replace(columns=tiles)})
    monkeypatch.setattr(gpu_tables, "predictor", lambda name, device: (alone, where))
    plan, before = pick.plan_for(thin, H200, "cached"), pick.by_predictor(thin, H200)
    assert plan.config.family == "box"
    assert before.us > plan.us == boxes.cost(plan.config, thin, H200)
    assert plan.source == before.source
    assert "by the formula of box" in plan.why
    assert {config.family for config in pick.likely(thin, H200, 8)[8:]} == {"box"}


def test_boxes_are_explained_and_not_drawn():
    config = boxed(4096, 64, 4)
    assert set(parts_us(SHORT, config, H200)) == {MEMORY, SHARED, INSTRUCTIONS, LATENCY}
    work = traffic.tiling(SHORT, config, H200)
    assert work.tiles == boxes.boxes_of(boxes.box_of(config, SHORT), SHORT)
    assert 0.9 < work.filled <= 1
    asked = traffic.tiled(SHORT, config, H200)
    assert SHORT.bytes <= asked.total < 1.2 * SHORT.bytes
    with pytest.raises(UnsupportedError, match="no tiles to draw"):
        tiling_of(SHORT, config, H200)


def test_single_elements_hold_fewer():
    """A tile of 128 elements a thread spills 15 kB where its columns lie in three dimensions."""
    tile = Config.of(4, 1, "tile", BLOCK_M=64, BLOCK_N=256, GROUP_M=256)
    apart = problem((40, 352, 5, 40, 8), (1, 0, 2, 4, 3), 1)
    assert len(apart.plane.n) == 3
    assert "128 registers" in illegal(tile, apart, H200)
    assert illegal(tile, problem((16320, 16320), (1, 0), 1), H200) is None


def test_sides_within_32_bits():
    """A box's first element along a side is counted in 32 bits."""
    config = boxed(8192, 64, 4)
    assert illegal(config, problem((2**31 - 1, 2), (1, 0), 1), H200) is None
    assert "32 bits" in illegal(config, problem((2**31, 2), (1, 0), 1), H200)
