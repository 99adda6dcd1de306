"""Choosing families of few rows: configs, formulas, and when they run in place of a predicted pick."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests import configs
from tritile.choose import pick, waves
from tritile.choose.predictor import RACED
from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.fields import alignment
from tritile.core.problem import MatmulProblem
from tritile.families.odd_rows import family as odd
from tritile.families.skinny import family_k, family_n
from tritile.families.space import illegal, legal_configs
from tritile.lab import traffic
from tritile.lab.explain import FMA, parts_us

H200 = target_device("nvidia-h200")
ALONG_N = MatmulProblem(1, 1, 6144, 3072, "bfloat16", "bfloat16")
EVEN = replace(ALONG_N, b_layout="column")
ODD = replace(EVEN, n=10007, k=4099, a_align=2, b_align=2, out_align=2)
ODD_N = replace(ALONG_N, n=2713, k=21424, b_align=2)
ODD_64 = replace(ODD, m=64, n=8191, k=8191)
COLUMN = replace(EVEN, m=6144, n=1, b_layout="row", out_layout="column")
COLUMN_N = replace(COLUMN, a_layout="column", b_layout="column")
COLUMN_64 = replace(ODD_64, m=8191, n=64, b_layout="row", b_align=16, out_align=16)
# Of each family a problem that it is for, one of odd rows, and one of few columns.
POSED = {family_k.NAME: (EVEN, ODD, COLUMN), family_n.NAME: (ALONG_N, ODD_N, COLUMN_N)}
POSED |= {odd.NAME: (ODD_64, ODD_64, COLUMN_64)}
by_family = pytest.mark.parametrize("name", POSED)
FP32 = {"dtype": "float32", "out_dtype": "float32"}


def own(name, problem, device=H200):
    return [config for config in waves.with_margins(problem, device) if config.family == name]


def sized(name, m, n, k, dtype="bfloat16"):
    """The family's problem at other sizes, whose rows begin where they would."""
    problem = replace(POSED[name][0], m=m, n=n, k=k, dtype=dtype, out_dtype=dtype)
    if name == odd.NAME:
        return replace(problem, out_align=alignment(2 * n))
    along = alignment(problem.itemsize * k)
    b_align = along if name == family_k.NAME else alignment(problem.itemsize * n)
    return replace(problem, a_align=16 if m == 1 else along, b_align=b_align)


@pytest.mark.parametrize("target", ["sm_80", "nvidia-l40s", "nvidia-h200", "sm_100"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@by_family
def test_any_skinny_k_have_configs(name, dtype, target):
    if (name, dtype) == (odd.NAME, "float32"):
        return
    least, counts = (16, (1, 16, 17, 100, 128)) if name == odd.NAME else (1, range(1, 9))
    if name == odd.NAME and target in ("nvidia-h200", "sm_100"):  # tiles of 256 rows take shared memory
        counts = (*counts, 129, 256)
    row, _, column = (replace(each, dtype=dtype, out_dtype=dtype) for each in POSED[name])
    for count in counts:
        for problem in (replace(row, m=count), replace(column, n=count)):
            found = {config["BLOCK_M"] for config in own(name, problem, TARGETS[target])}
            assert found == {max(least, 1 << (count - 1).bit_length())}


OTHERS = [
    *(
        (name, change)
        for name in POSED
        for change in (
            {"m": 257}, {"b_layout": "strided"}, {"invariant": True}, {"epilogue": "gated silu"},
            FP32 | {"precision": "tf32"}, FP32 | {"precision": "fp16x3"}, {"k": 2**31 - 1},
            {"dtype": "int8", "out_dtype": "int32"},
        )
    ),
    *((name, {"m": 9, "n": 9}) for name in (family_k.NAME, family_n.NAME)),
    (family_k.NAME, {"b_layout": "row"}), (family_n.NAME, {"b_layout": "column"}),
    (odd.NAME, {"b_layout": "row"}),
    (odd.NAME, {"b_align": 16}), (odd.NAME, {"batch": 2}), (odd.NAME, FP32 | {"b_align": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), OTHERS, ids=str)
def test_others_have_none(name, change):
    problem = POSED[name][0]
    other = replace(problem, **change)
    assert own(name, other) == own(name, problem, TARGETS["gfx942"]) == []
    assert illegal(own(name, problem)[0], other, H200)


@by_family
def test_impossible_configs_say_why(name):
    problem = POSED[name][0]
    config = own(name, problem)[0]
    assert "asynchronous" in illegal(config, problem, replace(H200, arch=75))
    assert "parameters" in illegal(replace(config, kwargs=config.kwargs[1:]), problem, H200)
    assert "num_warps" in illegal(replace(config, num_warps=32), problem, H200)
    if name == family_n.NAME:
        blocks = {"BLOCK_M": 1, "BLOCK_N": 512, "BLOCK_K": 2}
        assert "BLOCK_N = 512 is not 8 to 256" in illegal(Config.of(1, 1, name, **blocks), problem, H200)
        deep = configs.skinny_n(4, torch.bfloat16, 32, 16)
        assert "rows of w" in illegal(deep, replace(problem, m=4), H200)
    else:
        assert "shared memory" in illegal(config, problem, replace(H200, shared_memory=8192))


@by_family
def test_odd_weight_runs_skinny(name):
    problem = POSED[name][1]
    plan = pick.plan_for(problem, H200, "cached")
    assert plan.config.family == name
    assert f"by the formula of {name}" in plan.why
    assert f"{pick.by_predictor(problem, H200).config} is predicted to take" in plan.why
    strict = pick.plan_for(problem, H200, "strict")
    assert (strict.config, strict.source) == (pick.by_predictor(problem, H200).config, "predicted")
    assert strict.config.family != name


def test_off_and_tune_modes():
    """Off asks the model; mode tune also races two skinny configs."""
    off = pick.plan_for(ODD, H200, "off")
    assert (off.config, off.source) == (waves.pick(ODD, H200), "model")
    assert off.config.family == family_k.NAME
    likely = pick.likely(ODD, H200, RACED)
    assert likely[RACED:] == waves.with_margins(ODD, H200)[:2]
    assert family_k.NAME not in {config.family for config in likely[:RACED]}
    assert family_k.NAME not in {config.family for config in pick.likely(replace(ODD, m=9), H200, RACED)}


@pytest.mark.parametrize("name", [family_k.NAME, family_n.NAME])
def test_few_columns_as_transpose(name):
    row, _, column = POSED[name]
    config = own(name, column)[0]
    assert config in own(name, row)
    assert traffic.tiling(column, config, H200) == traffic.tiling(row, config, H200)
    assert traffic.tiled(column, config, H200) == traffic.tiled(row, config, H200)
    assert FMA in parts_us(column, config, H200)


@pytest.mark.parametrize("processors", [20, 132])
def test_shared_k_fills_gpu(processors):
    device = replace(H200, processors=processors)
    for m, n, k in itertools.product((1, 2, 8), (64, 2713, 60000), (64, 1000, 30000)):
        problem = sized(family_n.NAME, m, n, k)
        for config in legal_configs(problem, device, family_n.NAME):
            split, tiles = family_n.parts(config, problem, processors), -(-n // config["BLOCK_N"])
            blocks, slots = -(-k // config["BLOCK_K"]), family_n.resident(config, problem, device)
            assert 1 <= split <= blocks
            assert split == 1 or tiles * split <= slots * processors
            iterations = -(-blocks // split)
            assert (split - 1) * iterations < blocks  # none is left without a block
            # With one more the GPU would not hold all, or a part would have a single K iteration.
            enough = 2 * tiles * split >= slots * processors or iterations <= 4
            assert enough, (config, problem)
    for m, n, k in itertools.product((2, 40, 256), (300, 2713, 60001), (65, 1001, 30001)):
        problem = sized(odd.NAME, m, n, k)
        for config in legal_configs(problem, device, odd.NAME):
            if config["SPLIT_K"] > 1:
                programs = traffic.tiling(problem, config, device).programs
                assert programs <= odd.resident(config, problem, device) * processors
                assert k / config["BLOCK_K"] > config["SPLIT_K"]


def test_parts_count_as_traffic():
    config = own(family_n.NAME, ODD_N)[0]
    shared = family_n.parts(config, ODD_N, H200.processors)
    assert shared > 1
    assert traffic.tiling(ODD_N, config, H200).partials == 4 * shared * ODD_N.n
    assert traffic.tiled(ODD_N, config, H200).written == (4 * shared + ODD_N.itemsize) * ODD_N.n
    short = sized(family_n.NAME, 1, 2713, 16)
    alone = own(family_n.NAME, short)[0]
    assert family_n.parts(alone, short, H200.processors) == 1
    assert traffic.tiling(short, alone, H200).partials == 0
    assert 0 < waves.predict_us(alone, short, H200) < waves.predict_us(config, ODD_N, H200)
