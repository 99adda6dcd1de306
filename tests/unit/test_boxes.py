"""Choosing boxes: their formula, when they run in place of a portfolio's pick, and what is said of them."""

import pytest

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.errors import UnsupportedError
from tritile.families.permute import boxes, family
from tritile.families.space import illegal
from tritile.lab import traffic
from tritile.lab.explain import INSTRUCTIONS, LATENCY, MEMORY, SHARED, parts_us
from tritile.lab.picture import tiling_of
from tritile.planning import model, plans

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
THIN = problem((3, 7827648), (1, 0), 8)  # of a class whose configs are a shortlist without boxes
HELD = problem((3, 7827648), (1, 0), 1)  # of a class whose portfolio holds boxes, as LONG


def boxed(block, run_out, run_x):
    return Config.of(4, 1, "box", BLOCK=block, BLOCK_M=run_out, BLOCK_N=run_x)


# Shares of a copy's speed, and its microseconds, as measured on an H200.
MEASURED = [
    (SHORT, boxed(4096, 64, 32), 53.3), (LONG, boxed(8192, 256, 32), 841.5),
    (problem((3424569, 2, 10, 3), (2, 0, 1, 3), 2), boxed(4096, 256, 128), 212.4),
    (problem((15653648, 48), (1, 0), 1), boxed(8192, 64, 128), 1461.7),
    (problem((64, 30336, 10, 2, 3), (2, 3, 0, 1, 4), 8), boxed(4096, 64, 128), 457.7),
    (problem((256, 4736, 384), (1, 2, 0), 1), boxed(8192, 1024, 1), 1873.2),
]  # fmt: skip


@pytest.mark.parametrize(("permuted", "config", "us"), MEASURED)
def test_the_formula_is_near_what_was_measured(permuted, config, us):
    assert boxes.cost(config, permuted, H200) == pytest.approx(us, rel=0.4)


def test_where_elements_repeat_or_have_16_bytes_boxes_do_not_contend():
    assert boxes.contends(SHORT)
    assert not boxes.contends(problem((100, 2, 500), (1, 0, 2), 16))
    assert "NVIDIA" in illegal(boxed(4096, 64, 32), SHORT, target_device("gfx942"))
    assert model.outside_portfolios(SHORT, target_device("gfx942")) == []


def test_boxes_run_short_sides_and_not_long_ones():
    plan, before = plans.plan_for(THIN, H200, "cached"), plans.by_portfolio(THIN, H200)
    assert plan.config.family == "box"
    assert before.us > plan.us == boxes.cost(plan.config, THIN, H200)
    assert plan.source == before.source
    assert "by the formula of box" in plan.why
    assert plans.plan_for(HELD, H200, "cached").config.family == "box"
    assert plans.plan_for(LONG, H200, "cached").config.family == "tile"


def test_a_portfolio_that_holds_boxes_chooses_among_them_alone():
    assert plans.plan_for(HELD, H200, "cached") == plans.by_portfolio(HELD, H200)
    assert len(plans.likely(HELD, H200, 8)) == 8
    assert {config.family for config in plans.likely(THIN, H200, 8)[8:]} == {"box"}


def test_boxes_are_explained_and_not_drawn():
    config = boxed(4096, 64, 32)
    assert set(parts_us(SHORT, config, H200)) == {MEMORY, SHARED, INSTRUCTIONS, LATENCY}
    work = traffic.tiling(SHORT, config, H200)
    assert work.tiles == boxes.boxes_of(boxes.box_of(config, SHORT), SHORT)
    assert 0.9 < work.filled <= 1
    asked = traffic.tiled(SHORT, config, H200)
    assert SHORT.bytes <= asked.total < 1.2 * SHORT.bytes
    with pytest.raises(UnsupportedError, match="no tiles to draw"):
        tiling_of(SHORT, config, H200)


def test_tiles_whose_elements_move_alone_hold_fewer():
    """A tile of 128 elements a thread spills 15 kB where its columns lie in three dimensions."""
    tile = Config.of(4, 1, "tile", BLOCK_M=64, BLOCK_N=256, GROUP_M=256)
    apart = problem((40, 352, 5, 40, 8), (1, 0, 2, 4, 3), 1)
    assert len(apart.plane.n) == 3
    assert "128 registers" in illegal(tile, apart, H200)
    assert illegal(tile, problem((16320, 16320), (1, 0), 1), H200) is None


def test_a_portfolio_takes_no_tile_of_twice_a_side_before_the_others():
    thin = problem((48, 51472), (1, 0), 1)
    found = plans.likely(thin, H200, 48)
    beyond = [family.oversized(config, thin) for config in found if config.family != "box"]
    assert beyond == sorted(beyond)
    assert not beyond[0]
    assert beyond[-1]


def test_no_side_is_longer_than_32_bits_count():
    """A box's first element along a side is counted in 32 bits."""
    config = boxed(8192, 64, 32)
    assert illegal(config, problem((2**31 - 1, 2), (1, 0), 1), H200) is None
    assert "32 bits" in illegal(config, problem((2**31, 2), (1, 0), 1), H200)
