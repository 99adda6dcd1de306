"""Choosing odd_rows: its configs, how programs share K, its formula, and when it runs."""

import itertools
from dataclasses import replace

import pytest

from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, alignment
from tritile.errors import UnsupportedError
from tritile.families.odd_rows import family as odd
from tritile.families.space import legal_configs
from tritile.lab import traffic
from tritile.lab.explain import bounds
from tritile.lab.report.tiling.order import tiling_of
from tritile.planning import model, plans
from tritile.tune.deploy import rows

H200 = target_device("nvidia-h200")
ODD = MatmulProblem(
    1, 64, 8191, 8191, "bfloat16", "bfloat16", b_layout="column", a_align=2, b_align=2, out_align=2
)
COLUMN = replace(ODD, m=8191, n=64, a_layout="row", b_layout="row", b_align=16, out_align=16)


def own(problem, device=H200):
    return [config for config in model.beside(problem, device) if config.family == odd.NAME]


def sized(m, n, k):
    return replace(ODD, m=m, n=n, k=k, out_align=alignment(2 * n))


@pytest.mark.parametrize("problem", [ODD, COLUMN], ids=str)
@pytest.mark.parametrize("few", [1, 16, 17, 100, 128, 129, 256])
def test_any_few_rows_have_configs(problem, few):
    problem = replace(problem, **({"m": few} if problem.m == 64 else {"n": few}))
    smaller = ("sm_80", "nvidia-l40s") if few <= 128 else ()  # tiles of 256 rows take more shared memory
    for name in (*smaller, "nvidia-h200", "sm_100"):
        found = own(problem, target_device(name))
        assert found
        assert {config["BLOCK_M"] for config in found} == {max(16, 1 << (few - 1).bit_length())}


@pytest.mark.parametrize(
    ("change", "device"),
    [
        ({"m": 257}, "nvidia-h200"),
        ({"b_layout": "row"}, "nvidia-h200"),
        ({"b_align": 16}, "nvidia-h200"),
        ({"batch": 2}, "nvidia-h200"),
        ({"invariant": True}, "nvidia-h200"),
        ({"dtype": "float32", "out_dtype": "float32", "b_align": 4}, "nvidia-h200"),
        ({}, "gfx942"),
    ],
    ids=str,
)
def test_others_have_none(change, device):
    assert own(replace(ODD, **change), target_device(device)) == []


@pytest.mark.parametrize("processors", [20, 132])
def test_programs_that_share_k_run_at_once_and_have_two_blocks_each(processors):
    device = replace(H200, processors=processors)
    for m, n, k in itertools.product((2, 40, 256), (300, 2713, 60001), (65, 1001, 30001)):
        problem = sized(m, n, k)
        for config in legal_configs(problem, device, odd.NAME):
            programs = odd._tiles(config, problem) * config["SPLIT_K"]
            if config["SPLIT_K"] > 1:
                assert programs <= odd.resident(config, problem, device) * processors
                assert k / config["BLOCK_K"] > config["SPLIT_K"]


def test_an_odd_weight_runs_by_it_and_says_why():
    plan = plans.plan_for(ODD, H200, "cached")
    assert plan.config.family == odd.NAME
    assert "by the formula of odd_rows" in plan.why
    assert plans.plan_for(ODD, H200, "strict").config.family != odd.NAME


def test_a_gpu_of_less_bandwidth_is_predicted_to_take_longer():
    config = own(ODD)[0]
    assert model.predict_us(config, ODD, replace(H200, memory_gbps=900)) > 1.5 * model.predict_us(
        config, ODD, H200
    )


def test_kernels_of_any_few_rows_are_compiled_ahead():
    """Whatever a plan of few rows runs at a size is there, by config and compiled values."""
    ahead = {(c, rows._compiled(p, c, H200)) for p, c in rows.of_class(ODD, H200)}
    for m, n, k in itertools.product((2, 30, 127, 200), (300, 5003), (65, 2047, 20001)):
        size = rows._sized(ODD, m, n, k)
        for config in own(size):
            assert (config, rows._compiled(size, config, H200)) in ahead, (config, size)


@pytest.mark.parametrize(
    ("problem", "sizes"),
    [
        (COLUMN, [(8191, 24, 8191), (8191, 40, 2001), (4096, 100, 8191), (8191, 200, 8191), (300, 64, 65)]),
        (replace(ODD, n=8192, epilogue="residual=full", out_align=16), [(32, 4096, 8191), (20, 1000, 2001)]),
    ],
    ids=["few columns", "residual"],
)
def test_kernels_of_other_strides_are_compiled_ahead(problem, sizes):
    ahead = {(c, rows._compiled(p, c, H200)) for p, c in rows.of_class(problem, H200)}
    for size in (rows._sized(problem, *each) for each in sizes):
        for config in own(size):
            assert (config, rows._compiled(size, config, H200)) in ahead, (config, size)


def test_tiles_count_by_where_rows_begin():
    """Of 300 rows 38 begin alike: each of 8 places in a word has a tile of 64 rows."""
    problem = sized(64, 300, 8191)
    config = next(c for c in own(problem) if c["BLOCK_N"] == 64 and c["SPLIT_K"] == 16)
    work = bounds.work_of(problem, config, H200)
    assert (work.tiles, work.units) == (8, 128)


def test_copies_and_parts_count_as_traffic():
    alone, shared = (next(c for c in own(ODD) if c["SPLIT_K"] == split) for split in (1, 2))
    copies = 2 * odd.copied(ODD)[1]
    assert traffic.tiled(ODD, alone, H200).written == copies + 2 * ODD.m * ODD.n
    assert traffic.tiled(ODD, shared, H200).written > traffic.tiled(ODD, alone, H200).written


def test_its_tiles_are_not_drawn():
    with pytest.raises(UnsupportedError, match="no tiles to draw"):
        tiling_of(ODD, own(ODD)[0], H200)
