"""Products by clusters of two programs: which tiles each makes, what may be made so, and its launch."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tritile.core.device import target_device
from tritile.core.pointer import Pointer
from tritile.core.problem import MatmulProblem
from tritile.core.views import posed
from tritile.errors import UnsupportedError
from tritile.families import numerics
from tritile.families.common.warps import order
from tritile.families.matmul_clusters.family import FAMILY, clustered
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal, legal_configs
from tritile.families.work import work_of
from tritile.lab import traffic
from tritile.lab.explain import bounds
from tritile.lab.report.tiling import step_of, tiling_of
from tritile.lab.report.tiling.texts import notes
from tritile.planning import model
from tritile.planning.formula import FORMULAS, Constants, shape_of
from tritile.planning.portfolio import Loss, Portfolio
from tritile.tune.calibrate import run
from tritile.tune.subject.space import ProblemSpace

H200 = replace(target_device("nvidia-h200"), triton="3.7.1")
OLDER = replace(H200, triton="3.6.0")
EVEN = MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
OFF = MatmulProblem(1, 1858, 4584, 17080, "bfloat16", "bfloat16", b_layout="column")


def config(m=128, n=192, down=1, group=8, persistent=False):
    (found,) = (
        each for each in FAMILY.configs
        if (each["BLOCK_M"], each["BLOCK_N"], each["DOWN"]) == (m, n, down)
        and (each["GROUP_M"], each["PERSISTENT"]) == (group, persistent)
    )  # fmt: skip
    return found


def launched(problem, own):
    call = posed(problem, lambda dtype, count: Pointer(getattr(torch, dtype)))
    return work_of(call, own, H200.processors, True).steps[-1]


SIZES = [(1, 1, 1), (1, 257, 577), (1, 2000, 131), (1, 130, 5000), (3, 700, 900), (1, 5000, 6000), (5, 1, 9)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("down", [1, 2])
@pytest.mark.parametrize(("group", "persistent"), [*itertools.product((1, 8), (False, True))])
def test_every_tile_is_made_once(monkeypatch, size, down, group, persistent):
    """By the kernel's own functions. Odd tiles have a partner beyond the edge."""
    batch, m, n = size
    own = config(down=down, group=group, persistent=persistent)
    step = launched(MatmulProblem(batch, m, n, 72, "float16", "float16"), own)
    rows, columns, across = own["BLOCK_M"], own["BLOCK_N"], 2 // down
    tiles_m, tiles_n = -(-m // (rows * down)), -(-n // (columns * across))
    walk = SimpleNamespace(
        tiles_m=tiles_m,
        tiles_n=tiles_n,
        tiles=tiles_m * tiles_n * batch,
        inner_batch=batch,
        flag=None,
        tail=None,
    )
    how = SimpleNamespace(FLAT=step.args["FLAT"], GROUP_M=group, BATCHED=batch > 1)
    made = []
    for place in itertools.product(*map(range, step.grid)):
        language = SimpleNamespace(
            program_id=place.__getitem__, num_programs=step.grid.__getitem__, minimum=min
        )
        monkeypatch.setattr(order, "gl", language)
        for index in range(*order.pieces_of.fn(walk, how)):
            outer, inner, row, column = order.tile_at.fn(index, walk, how)
            for rank in (0, 1):
                down_by, across_by = (rank, 0) if down == 2 else (0, rank)
                made.append((outer * batch + inner, row * down + down_by, column * across + across_by))
    wanted = itertools.product(range(batch), range(-(-m // rows)), range(-(-n // columns)))
    assert len(made) == len(set(made)) == 2 * walk.tiles
    assert set(wanted) <= set(made)
    assert not persistent or step.grid[0] <= H200.processors // 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float8_e4m3fn"}, "not summed by clusters"),
        ({"dtype": "float32", "out_dtype": "float32"}, "not summed by clusters"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "fp16x3"}, "not summed by clusters"),
        ({"dtype": "float64", "out_dtype": "float64", "precision": "ozaki"}, "not summed by clusters"),
        ({"epilogue": "gated silu"}, "gated"),
        ({"out_layout": "column"}, "not row by row"),
    ],
    ids=str,
)
def test_what_clusters_do_not_make_is_said(changes, why):
    assert illegal(config(), EVEN, H200) is None
    assert why in illegal(config(), replace(EVEN, **changes), H200)


def test_configs_that_were_not_checked_are_refused():
    own = config()
    assert "has no warpgroup" in illegal(own, EVEN, replace(target_device("sm_100"), triton="3.7.0"))
    assert "num_ctas" in illegal(replace(own, num_ctas=1), EVEN, H200)
    assert "parameters" in illegal(replace(own, kwargs=own.kwargs[:-1]), EVEN, H200)
    for name, value, why in (("DOWN", 4, "DOWN"), ("BLOCK_N", 96, "tiles"), ("BLOCK_K", 128, "tiles")):
        kwargs = tuple((each, value if each == name else old) for each, old in own.kwargs)
        assert why in illegal(replace(own, kwargs=kwargs), EVEN, H200)
    assert "shared memory" in illegal(replace(own, num_stages=9), EVEN, H200)


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0", "3.9.1"])
def test_other_versions_of_triton_have_none(version):
    other = replace(H200, triton=version)
    assert "triton" in illegal(config(), EVEN, other)
    assert "clusters" not in model.families(EVEN, other)
    with pytest.raises(UnsupportedError, match="no config"):
        legal_configs(EVEN, other, "clusters")


def test_a_portfolio_of_triton_37_serves_other_versions_by_its_other_configs():
    others = [each for each in legal_configs(EVEN, OLDER) if each.family == "warpgroups"][:2]
    configs = (config(), others[0], config(192, 128, 2), others[1])
    constants = tuple(replace(Constants(), start=1.0 + place) for place in range(4))
    portfolio = Portfolio("halves-nt", configs, constants, Loss(100, 0.01, 0.05, 0.2))
    assert {each for _, each in portfolio.ranked(EVEN, H200, 4)} == set(configs)
    assert {each for _, each in portfolio.ranked(EVEN, OLDER, 4)} == set(others)


def test_a_sweep_has_clusters_among_its_candidates():
    found = run.likely(OFF, H200)
    assert any(each.family == "clusters" for each in found)
    assert not any(each.family == "clusters" for each in run.likely(OFF, OLDER))


def test_a_search_steps_through_stages_and_orders_of_tiles():
    own = config(192, 128, 2)
    near = [each for each in ProblemSpace(OFF, H200).neighbours(own) if each.family == "clusters"]
    assert replace(own, num_stages=4) in near
    assert config(192, 128, 2, persistent=True) in near
    assert config(192, 128, 1) in near


def test_sums_are_those_of_batch_invariant_calls():
    for own in FAMILY.configs:
        assert numerics.numerics(own, EVEN, H200) == numerics.canonical(EVEN, H200)


def test_the_formula_counts_clusters_and_what_they_read():
    """As a tile of both programs on half as many SMs: 33 x 16 of 256 x 256 come in 8 waves of 66."""
    own, wide = config(256, 128, 1), MatmulProblem(1, 33 * 256, 16 * 256, 4096, "bfloat16", "bfloat16")
    shape = shape_of(own, wide, H200)
    assert (shape.block_m, shape.block_n, shape.sharers, shape.slots) == (256, 256, 2, 1)
    formula = FORMULAS["matmul"]
    facts = formula.facts(wide, H200, True)
    whole = formula.us(shape, facts, formula.begin(shape))
    next_wave = formula.us(shape, facts._replace(m=34 * 256), formula.begin(shape))
    assert whole == pytest.approx(
        formula.us(shape, facts._replace(m=33 * 256 - 255), formula.begin(shape)), rel=0.05
    )
    assert next_wave > 1.08 * whole
    alone = shape_of(replace(own, family="warpgroups", num_ctas=1), wide, H200)
    assert formula.begin(shape).work == formula.begin(alone).work
    slow = replace(formula.begin(shape), cache=1e5)  # of the L2 cache alone: 512 rows and columns for 768
    assert formula.us(shape, facts, slow) == pytest.approx(formula.us(alone, facts, slow) * 2 / 3, rel=0.01)


def test_predictions_gain_where_rows_start_off_sectors_alone():
    for problem, least, most in ((OFF, 0.7, 0.95), (EVEN, 0.99, 1.1)):
        own, other = (
            model.predict_us(model.ranked(problem, H200, name)[0], problem, H200)
            for name in ("clusters", "warpgroups")
        )
        assert least < own / other < most


def test_reports_count_the_operand_that_is_shared_once():
    own = config(down=1)
    alone = next(
        each for each in FAMILIES["matmul"]["warpgroups"].configs
        if (each["BLOCK_M"], each["BLOCK_N"], each["BLOCK_K"], each["PERSISTENT"]) == (128, 192, 64, False)
    )  # fmt: skip
    asked, apart = (traffic.tiled(EVEN, each, H200).read for each in (own, alone))
    assert asked == EVEN.k * 2 * (4096 * 11 + 4096 * 32)
    assert apart == EVEN.k * 2 * (4096 * 22 + 4096 * 32)
    assert bounds.work_of(EVEN, own, H200).units == 2 * 11 * 32
    for part in (bounds.TENSOR_CORES, bounds.SHARED):  # of a program each
        assert bounds.parts(EVEN, own, H200)[part] == bounds.parts(EVEN, alone, H200)[part]
    tiling = tiling_of(EVEN, own, H200)
    assert step_of(tiling, 1, 0).c[:4] == (128, 0, 128, 384)
    assert (tiling.covers, tiling.tiles, tiling.at_once) == ((128, 384), 11 * 32, 66)
    assert any("cluster of two" in note for note in notes(tiling))
    assert dict(clustered(own).kwargs)["BLOCK_N"] == 384


def test_early_launches_and_clusters_of_two_are_asked_for():
    step = launched(EVEN, config(persistent=True))
    assert step.grid == (66, 1, 1)
    assert step.options == {"num_warps": 4, "num_ctas": 2, "launch_pdl": True}
