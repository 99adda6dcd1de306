"""Products whose last tiles are split along K: how tiles are shared out, and what may be made so."""

import random
from dataclasses import replace

import pytest
import torch

from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.pointer import Pointer
from tritile.core.problem import MatmulProblem
from tritile.core.views import posed
from tritile.families import numerics
from tritile.families.matmul_split.family import FAMILY, TURNS, tail, tail_of
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.lab import traffic
from tritile.lab.explain import bounds
from tritile.planning import model
from tritile.planning.formula import FORMULAS

H200 = target_device("nvidia-h200")
DEEP = MatmulProblem(1, 1011, 576, 22528, "bfloat16", "bfloat16")


def config(m=128, n=128, k=64, consumers=2, stages=6, subtiles=1):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "CONSUMERS": consumers}
    return Config.of(4, stages, "split", **blocks, SUBTILES=subtiles)


def test_tiles_that_fill_all_processors_are_whole_and_the_rest_is_split():
    assert tail_of(264, 100, 132) == (132, 264, 0, 1)
    assert tail_of(800, 80, 132) == (132, 792, 8, 16)
    assert tail_of(40, 352, 132) == (120, 0, 40, 3)
    assert tail_of(100, 352, 132) == (100, 100, 0, 1)  # no processors are left for another part
    assert tail_of(1, 4000, 132) == (132, 0, 1, 132)
    assert tail_of(1, 9, 132) == (2, 0, 1, 2)  # of four turns at the least


def test_every_turn_of_every_tile_is_made_once_whatever_the_sizes():
    """As the kernel shares them out: whole tiles in waves, then part `me // rest` of tile `me % rest`."""
    dice = random.Random(0)
    for _ in range(300):
        made, turns, processors = dice.randint(1, 2000), dice.randint(1, 600), dice.choice((1, 8, 114, 132))
        programs, whole, rest, split = tail_of(made, turns, processors)
        assert (whole + rest, 1 <= programs <= processors) == (made, True)
        assert split == 1 or (rest * split <= programs and turns // split >= TURNS)
        done = {tile: turns for me in range(programs) for tile in range(me, whole, programs)}
        for me in range(rest * split):
            part, tile = me // rest, whole + me % rest
            done[tile] = done.get(tile, 0) + (part + 1) * turns // split - part * turns // split
        assert done == dict.fromkeys(range(made), turns)


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (replace(DEEP, dtype="float8_e4m3fn", b_layout="column"), "no tile"),
        (replace(DEEP, dtype="float32", out_dtype="float32"), "no tile"),
        (replace(DEEP, out_layout="column"), "not row by row"),
        (replace(DEEP, k=2**30), "more than is counted"),
    ],
    ids=str,
)
def test_what_may_not_be_split_is_said(problem, why):
    assert illegal(config(), DEEP, H200) is None
    assert why in illegal(config(), problem, H200)
    assert illegal(config(), DEEP, TARGETS["sm_80"])
    assert "BLOCK_N" in illegal(config(n=192), DEEP, H200)
    assert "parameters" in illegal(replace(config(), kwargs=config().kwargs[:-1]), DEEP, H200)


def test_it_makes_nothing_where_no_tile_is_split():
    assert not FAMILY.pointless(config(), DEEP, H200)
    for whole in (replace(DEEP, m=16896, n=8192), replace(DEEP, k=256)):  # 132 by 64 tiles
        assert "no tile is split" in illegal(config(), whole, H200)


def test_batch_invariant_products_are_never_split():
    """Sizes decide how many parts there are."""
    assert numerics.numerics(config(), DEEP, H200) != numerics.canonical(DEEP, H200)


def test_a_call_has_room_for_all_parts_and_a_counter_for_each_tile_and_consumer():
    work = work_of(posed(DEEP, lambda dtype, n: Pointer(getattr(torch, dtype))), config(), 132, True)
    assert work.steps[-1].grid == (120, 1, 1)
    assert work.scratch["parts"].elements == 120 * 128 * 128
    assert work.counters == 40 * 2


def test_parts_shorten_what_is_predicted_and_are_told():
    split = tail(config(), DEEP, H200)
    assert (split.rest, split.split) == (40, 3)
    whole = Config.of(4, 6, "warpgroups", **dict(config().kwargs), PERSISTENT=False)
    assert model.predict_us(config(), DEEP, H200) < model.predict_us(whole, DEEP, H200)
    own, other = (bounds.parts(DEEP, each, H200)[bounds.TENSOR_CORES] for each in (config(), whole))
    assert own == pytest.approx(other / 3)
    asked = traffic.tiled(DEEP, config(), H200).written - traffic.tiled(DEEP, whole, H200).written
    assert asked == 120 * 128 * 128 * 4
    formula = FORMULAS["matmul"]
    facts = formula.facts(DEEP, H200, True)
    shapes = [formula.shape(each, DEEP, H200) for each in (config(), whole)]
    constants = formula.begin(shapes[1])
    assert formula.us(shapes[0], facts, constants) < formula.us(shapes[1], facts, constants)
    assert all(each.family == FAMILY.name for each in FAMILY.configs)
