"""Choosing few_rows_across: its configs, how programs share K, its formula, and when it runs."""

import itertools
from dataclasses import replace

import pytest

from tritile.core.device import TARGETS, target_device
from tritile.core.problem import MatmulProblem, alignment
from tritile.errors import UnsupportedError
from tritile.families.common.work import Buffer
from tritile.families.few_rows import across
from tritile.families.space import illegal, legal_configs
from tritile.lab import traffic
from tritile.lab.explain import bounds
from tritile.lab.report.tiling import tiling_of
from tritile.planning import model, plans
from tritile.tune.deploy import rows

H200 = target_device("nvidia-h200")
ODD = MatmulProblem(1, 1, 2713, 21424, "bfloat16", "bfloat16", b_align=2)
EVEN = MatmulProblem(1, 1, 6144, 3072, "bfloat16", "bfloat16")
COLUMN = replace(EVEN, m=6144, n=1, a_layout="column", b_layout="column", out_layout="column")


def own(problem, device=H200):
    return [config for config in model.beside(problem, device) if config.family == across.NAME]


def sized(m, n, k):
    aligned = {"a_align": 16 if m == 1 else alignment(2 * k), "b_align": alignment(2 * n)}
    return replace(EVEN, m=m, n=n, k=k, **aligned)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("m", range(1, 9))
def test_any_few_rows_have_configs(dtype, m):
    for name in ("sm_80", "nvidia-l40s", "nvidia-h200", "sm_100"):
        found = own(replace(EVEN, m=m, dtype=dtype, out_dtype=dtype), TARGETS[name])
        assert len(found) >= 2
        assert {config["BLOCK_M"] for config in found} == {1 << (m - 1).bit_length()}


@pytest.mark.parametrize(
    ("change", "device"),
    [
        ({"m": 9}, "nvidia-h200"),
        ({"b_layout": "column"}, "nvidia-h200"),
        ({"invariant": True}, "nvidia-h200"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, "nvidia-h200"),
        ({"dtype": "int8", "out_dtype": "int32"}, "nvidia-h200"),
        ({}, "gfx942"),
    ],
    ids=str,
)
def test_others_have_none(change, device):
    assert own(replace(EVEN, **change), TARGETS[device]) == []


@pytest.mark.parametrize("processors", [20, 132])
def test_programs_share_k_so_that_the_gpu_is_full_and_all_run_at_once(processors):
    device = replace(H200, processors=processors)
    for m, n, k in itertools.product((1, 2, 8), (64, 2713, 60000), (64, 1000, 30000)):
        problem = sized(m, n, k)
        for config in legal_configs(problem, device, across.NAME):
            split, tiles = across.parts(config, problem, processors), -(-n // config["BLOCK_N"])
            blocks, slots = -(-k // config["BLOCK_K"]), across.resident(config, problem, device)
            assert 1 <= split <= blocks
            assert split == 1 or tiles * split <= slots * processors
            iterations = -(-blocks // split)
            assert (split - 1) * iterations < blocks  # none is left without a block
            # With one more the GPU would not hold all, or a part would have a single K iteration.
            enough = 2 * tiles * split >= slots * processors or iterations <= 2 * across._LEAST
            assert enough, (config, problem)


def test_a_shape_covers_the_tile():
    for problem in (EVEN, ODD, replace(ODD, m=8), replace(EVEN, m=4, dtype="float32", out_dtype="float32")):
        for config in legal_configs(problem, H200, across.NAME):
            made = across._shape(config, problem)
            block = config["BLOCK_N"] * config["BLOCK_K"]
            assert made.own * made.unroll * 32 * config.num_warps == block
            assert made.own % made.wide == 0


def test_parts_and_their_sum_have_a_workspace_and_a_second_kernel():
    (made, added), scratch = launches(ODD)
    assert scratch["parts"].elements == made.args["split"] * added.args["across"]
    assert made.args["parts_ptr"] == added.args["parts_ptr"] == Buffer("parts")
    assert (made.args["EPILOGUE"], made.args["extra"]) == (None, None)
    (alone,), scratch = launches(sized(1, 2713, 16))
    assert alone.args["parts_ptr"] is None
    assert not scratch


def launches(problem):
    work = across.work(rows._posed(problem), own(problem)[0], H200.processors, True)
    return work.steps, work.scratch


def test_one_odd_row_runs_by_it_and_says_why():
    plan = plans.plan_for(ODD, H200, "cached")
    assert plan.config.family == across.NAME
    assert "by the formula of few_rows_across" in plan.why
    assert plans.plan_for(ODD, H200, "strict").config.family != across.NAME


def test_a_gpu_of_less_bandwidth_is_predicted_to_take_longer():
    config = own(ODD)[0]
    fast = model.predict_us(config, ODD, H200)
    assert model.predict_us(config, ODD, replace(H200, memory_gbps=900)) > 2 * fast
    assert model.predict_us(config, ODD, replace(H200, processors=33)) > 1.5 * fast


def test_kernels_of_any_few_rows_are_compiled_ahead():
    """Whatever a plan of few rows runs at a size is there, by config and compiled values."""
    for problem in (sized(3, 6144, 3072), replace(ODD, m=2)):
        ahead = {(c, rows._compiled(p, c, H200)) for p, c in rows.of_class(problem, H200)}
        for m, n, k in itertools.product((2, 3, 4, 7), (300, 303, 5003), (64, 2048, 2055)):
            size = rows._sized(problem, m, n, k)
            for config in own(size):
                assert (config, rows._compiled(size, config, H200)) in ahead, (config, size)


@pytest.mark.parametrize("change", [{"epilogue": "residual=full"}, {"batch": 8}], ids=str)
def test_kernels_with_a_residual_and_of_batches_are_compiled_ahead(change):
    problem = replace(ODD, m=4, n=8192, k=8192, a_align=16, b_align=8, out_align=16, **change)
    ahead = {(c, rows._compiled(p, c, H200)) for p, c in rows.of_class(problem, H200)}
    for size in (rows._sized(problem, m, 4096, 4096) for m in (1, 2, 8)):
        for config in own(size):
            assert (config, rows._compiled(size, config, H200)) in ahead, (config, size)


def test_few_columns_count_as_the_transpose_does():
    config = own(COLUMN)[0]
    assert config in own(EVEN)
    assert bounds.work_of(COLUMN, config, H200) == bounds.work_of(EVEN, config, H200)
    assert traffic.tiled(COLUMN, config, H200) == traffic.tiled(EVEN, config, H200)
    assert bounds.FMA in bounds.parts(COLUMN, config, H200)


def test_parts_count_as_traffic():
    config = own(ODD)[0]
    shared = across.parts(config, ODD, H200.processors)
    more = traffic.tiled(ODD, config, H200).total - traffic.tiled(ODD, config).total
    assert shared > 1
    assert more == 2 * 4 * shared * ODD.n


def test_its_tiles_are_not_drawn():
    with pytest.raises(UnsupportedError, match="no tiles to draw"):
        tiling_of(EVEN, own(EVEN)[0], H200)


def test_blocks_of_other_parameters_are_illegal():
    config = own(EVEN)[0]
    assert "parameters" in illegal(replace(config, kwargs=config.kwargs[1:]), EVEN, H200)
    assert "num_warps" in illegal(replace(config, num_warps=32), EVEN, H200)
