"""Choosing few_rows: its configs, its formula, and when it runs in place of a portfolio's pick."""

import itertools
from dataclasses import replace

import pytest

from tritile.core.device import TARGETS, target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import UnsupportedError
from tritile.families.few_rows import family as few
from tritile.families.space import illegal, legal_configs
from tritile.lab import traffic
from tritile.lab.explain import bounds
from tritile.lab.report.tiling import tiling_of
from tritile.planning import model, plans
from tritile.planning.portfolio import RACED
from tritile.tune.deploy import rows

H200 = target_device("nvidia-h200")
ODD = MatmulProblem(
    1, 1, 10007, 4099, "bfloat16", "bfloat16", b_layout="column", a_align=2, b_align=2, out_align=2
)
EVEN = MatmulProblem(1, 1, 6144, 3072, "bfloat16", "bfloat16", b_layout="column")
MANY = replace(EVEN, m=64)
COLUMN = MatmulProblem(1, 6144, 1, 3072, "bfloat16", "bfloat16", out_layout="column")


def at(problem, m):
    return replace(problem, m=m)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("m", range(1, 9))
def test_any_few_rows_have_configs_that_fit(dtype, m):
    for name in ("sm_80", "nvidia-l40s", "nvidia-h200", "sm_100"):
        problem = replace(EVEN, m=m, dtype=dtype, out_dtype=dtype)
        found = model.beside(problem, TARGETS[name])
        assert found
        assert {config["BLOCK_M"] for config in found} == {1 << (m - 1).bit_length()}


@pytest.mark.parametrize(
    ("change", "device"),
    [
        ({"m": 9}, "nvidia-h200"),
        ({"b_layout": "strided"}, "nvidia-h200"),
        ({"invariant": True}, "nvidia-h200"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, "nvidia-h200"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "fp16x3"}, "nvidia-h200"),
        ({"dtype": "int8", "out_dtype": "int32"}, "nvidia-h200"),
        ({}, "gfx942"),
    ],
    ids=str,
)
def test_others_have_none(change, device):
    problem = replace(EVEN, **change)
    assert model.beside(problem, TARGETS[device]) == []
    plan = plans.plan_for(problem, TARGETS[device], "cached")
    assert plan.config.family != few.NAME


def test_before_ampere_and_where_memory_is_short_configs_are_illegal():
    config = model.beside(EVEN, H200)[0]
    assert "asynchronous" in illegal(config, EVEN, replace(H200, arch=75))
    assert "shared memory" in illegal(config, EVEN, replace(H200, shared_memory=8192))


def test_it_runs_where_it_is_predicted_to_be_faster_by_the_margin():
    """Of the portfolio's times and those of the formula alone, over many sizes."""
    taken = {True: 0, False: 0}
    for m, n, k in itertools.product((1, 2, 4, 8), (520, 3000, 20000), (513, 2048, 9000)):
        align = 16 if k % 8 == 0 else 2
        problem = replace(EVEN, m=m, n=n, k=k, a_align=align, b_align=align)
        plan, before = plans.plan_for(problem, H200, "cached"), plans.foreseen(problem, H200)
        config = model.beside(problem, H200)[0]
        us = model.predict_us(config, problem, H200)
        faster = before.us >= 1.1 * us
        taken[faster] += 1
        assert plan.config == (config if faster else before.config)
        assert plan.us == (us if faster else before.us)
        assert plan.source == before.source == "predicted"
    assert taken[True] > 10
    assert taken[False] > 5


def test_one_odd_row_runs_by_it_and_says_why():
    plan = plans.plan_for(ODD, H200, "cached")
    assert plan.config.family == few.NAME
    assert "by the formula of few_rows" in plan.why
    assert "the portfolio's pick is predicted to take" in plan.why


def test_strict_takes_what_was_measured_and_off_asks_the_model():
    strict = plans.plan_for(ODD, H200, "strict")
    assert (strict.config, strict.source) == (plans.foreseen(ODD, H200).config, "predicted")
    off = plans.plan_for(ODD, H200, "off")
    assert (off.config, off.source) == (model.pick(ODD, H200), "model")
    assert off.config.family == few.NAME


def test_mode_tune_races_two_beside_the_portfolios():
    likely = plans.likely(ODD, H200, RACED)
    assert likely[RACED:] == model.beside(ODD, H200)[:2]
    assert few.NAME not in {config.family for config in likely[:RACED]}
    assert few.NAME not in {config.family for config in plans.likely(at(ODD, 9), H200, RACED)}


def test_ieee_fp32_of_few_rows_runs_by_it():
    for m in (1, 4, 8):
        problem = replace(EVEN, m=m, dtype="float32", out_dtype="float32")
        assert plans.plan_for(problem, H200, "cached").config.family == few.NAME


def test_a_gpu_of_less_bandwidth_is_predicted_to_take_longer():
    config = model.beside(EVEN, H200)[0]
    fast = model.predict_us(config, EVEN, H200)
    assert model.predict_us(config, EVEN, replace(H200, memory_gbps=900)) > 2 * fast
    assert model.predict_us(config, EVEN, replace(H200, processors=33)) > 1.5 * fast


def test_kernels_of_any_few_rows_are_compiled_ahead():
    """Whatever a plan of few rows runs at a size is there, by config and compiled values."""
    for problem in (at(EVEN, 3), at(ODD, 2)):
        ahead = {(c, rows._compiled(p, c, H200)) for p, c in rows.of_class(problem, H200)}
        for m, n, k in itertools.product((2, 3, 4, 7), (300, 5003), (2048, 2055)):
            size = rows._sized(problem, m, n, k)
            plan = plans.plan_for(size, H200, "cached")
            for config in [plan.config] * (plan.config.family == few.NAME) + model.beside(size, H200):
                assert (config, rows._compiled(size, config, H200)) in ahead


def test_rows_of_a_call_are_compiled_as_they_are_planned():
    found = list(rows.of_rows(at(ODD, 2), (1, 2, 3, 4, 64), H200))
    families = {problem.m: config.family for problem, config in found}
    assert families[1] == families[2] == few.NAME != families[64]


def test_few_columns_count_as_the_transpose_does():
    config = model.beside(COLUMN, H200)[0]
    turned = replace(EVEN, m=1)
    assert config in model.beside(turned, H200)
    assert bounds.work_of(COLUMN, config, H200) == bounds.work_of(turned, config, H200)
    assert traffic.tiled(COLUMN, config) == traffic.tiled(turned, config)
    assert bounds.FMA in bounds.parts(COLUMN, config, H200)


def test_its_tiles_are_not_drawn():
    with pytest.raises(UnsupportedError, match="no tiles to draw"):
        tiling_of(EVEN, model.beside(EVEN, H200)[0], H200)


def test_every_config_is_the_fastest_predicted_somewhere():
    sizes = itertools.product((1, 2, 4, 8), (256, 1500, 6000, 40000), (400, 1024, 4099, 16384))
    problems = [
        replace(EVEN, m=m, n=n, k=k, a_align=16 if k % 8 == 0 else 2, b_align=16 if k % 8 == 0 else 2)
        for m, n, k in sizes
    ]
    own = ([c for c in model.beside(each, H200) if c.family == few.NAME] for each in problems)
    best = {configs[0] for configs in own}
    tiles = {(c["BLOCK_N"], c["BLOCK_K"], c.num_warps, c.num_stages) for c in best}
    assert len(tiles) == len(few._TILES)
    legal = [config for problem in problems for config in legal_configs(problem, H200, few.NAME)]
    assert best <= set(legal)
