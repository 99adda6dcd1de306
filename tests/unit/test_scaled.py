"""Products with scales for each 128 of K by pieces: what may be made so, how, and what is predicted."""

from dataclasses import replace

import pytest
import torch

from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.posed import posed
from tritile.core.problem import MatmulProblem
from tritile.families.matmul_scaled.family import FAMILY, REGISTERS, ahead, pieces
from tritile.families.space import contenders, illegal, legal_configs
from tritile.families.work import work_of
from tritile.ops.described import Extras, described
from tritile.planning import model

H200 = target_device("nvidia-h200")
LARGE = MatmulProblem(
    1, 4096, 4096, 4096, "float8_e4m3fn", "bfloat16", b_layout="column", block_scales="1x128"
)
STAGES = {(64, 64): 12, (128, 128): 5, (128, 192): 4, (192, 128): 4, (256, 128): 3}


def config(m=128, n=128, piece=128, persistent=True, **changes):
    sides = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128, "CONSUMERS": 3 if m == 192 else min(2, m // 64)}
    kwargs = sides | {"PIECE": piece, "GROUP_M": 8, "PERSISTENT": persistent} | changes
    return Config.of(4, STAGES.get((m, n), 3), "scaled", **kwargs)


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (replace(LARGE, block_scales=""), "no product of fp8 with scales"),
        (replace(LARGE, dtype="float32", precision="ieee"), "no product of fp8 with scales"),
        (replace(LARGE, b_layout="row"), "bytes must lie along K"),
        (replace(LARGE, a_layout="column"), "bytes must lie along K"),
        (replace(LARGE, out_layout="column"), "not row by row"),
        (replace(LARGE, k=2**31), "sizes above"),
    ],
    ids=str,
)
def test_what_may_not_be_made_by_pieces_is_said(problem, why):
    assert illegal(config(), LARGE, H200) is None
    assert why in illegal(config(), problem, H200)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (config(m=96), "no multiple of 64 rows"),
        (config(CONSUMERS=3), "no multiple of 64 rows"),
        (config(n=192), "does not divide BLOCK_N"),
        (config(piece=32), "does not divide BLOCK_N"),
        (config(BLOCK_K=64), "BLOCK_K must be 128"),
        (config(GROUP_M=3), "not a power of two"),
        (config(PERSISTENT=1), "neither True nor False"),
        (config(AHEAD=True), "parameters"),
        (config(m=256, n=256), "registers a thread"),
        (replace(config(m=256), num_stages=5), "bytes of shared memory"),
        (replace(config(), num_warps=8), "num_warps 4"),
        (replace(config(), num_ctas=2), "num_ctas must be 1"),
    ],
    ids=str,
)
def test_configs_that_fit_no_kernel_are_illegal(made, why):
    assert why in illegal(made, LARGE, H200)


def test_hopper_alone_has_it():
    assert illegal(config(), LARGE, TARGETS["sm_80"])
    assert illegal(config(), LARGE, TARGETS["sm_100"])


@pytest.mark.parametrize("shared", ["1x1", "1x128", "128x1", "128x128"])
def test_two_sets_of_sums_are_held_where_registers_last(shared):
    """128 columns with scales of their own, or 128 sums a thread beside totals, leave room for one set."""
    problem = replace(LARGE, block_scales=shared)
    found = {each: ahead(config(*each), problem) for each in ((128, 128), (192, 128), (256, 128, 64))}
    one_scale = shared.endswith("x128")
    assert found == {(128, 128): one_scale, (192, 128): False, (256, 128, 64): one_scale}
    assert ahead(config(128, 192, 64), problem)
    assert not ahead(config(256, 128, 128), problem)
    assert [pieces(config(*each)) for each in ((128, 128), (128, 192, 64), (256, 128, 64))] == [1, 3, 4]


def test_every_config_is_legal_for_some_scales_and_none_is_listed_twice():
    problem = replace(LARGE, m=8192, n=8192)
    assert len(FAMILY.configs) == len(set(FAMILY.configs)) < 40
    for each in FAMILY.configs:
        assert illegal(each, problem, H200) is None
        assert each["CONSUMERS"] in REGISTERS
    assert {each["PERSISTENT"] for each in legal_configs(problem, H200, "scaled")} == {True, False}


def test_warpgroups_do_not_contend_with_it_but_may_be_named():
    assert "warpgroups" not in contenders(LARGE)
    assert "scaled" in model.families(LARGE, H200)
    assert "warpgroups" in contenders(replace(LARGE, block_scales=""))
    assert "scaled" not in model.families(replace(LARGE, block_scales=""), H200)
    assert {each.family for each in legal_configs(LARGE, H200, "warpgroups")} == {"warpgroups"}


@pytest.mark.parametrize(("m", "n", "k"), [(256, 384, 512), (77, 144, 259)])
@pytest.mark.parametrize("made", [config(), config(128, 192, 64, False), config(192)], ids=str)
def test_a_call_passes_tiles_of_pieces(m, n, k, made):
    problem = replace(LARGE, m=m, n=n, k=k)
    call = posed(problem, lambda dtype, elements: torch.empty(elements, dtype=getattr(torch, dtype)))
    step = work_of(call, made, 132, True).steps[-1]
    args = step.args
    assert args["a_desc"].block == (1, 1, 64, 128)
    assert args["b_desc"].block == (1, 1, made["PIECE"], 128)
    assert args["out_desc"].block == (1, 1, 64, made["PIECE"])
    assert (args["AHEAD"], args["STAGES"]) == (ahead(made, problem), made.num_stages)
    assert (args["SCALE_BLOCKS"], args["N"], args["K"]) == ((1, 128), n, k)


@pytest.mark.parametrize(("columns", "stored"), [(144, True), (141, False)])
def test_results_that_end_amid_16_bytes_are_not_stored_by_descriptor(columns, stored):
    fp8 = torch.float8_e4m3fn
    a, b = torch.zeros(64, 256).to(fp8), torch.zeros(columns, 256).to(fp8).mT
    out = torch.empty(64, 256, dtype=torch.bfloat16)[:, :columns]
    scales = torch.ones(64, 2), torch.ones(2, -(-columns // 128))
    call = described(a, b, out, "ieee", Extras(blocks=scales, shared="1x128"))
    (step,) = work_of(call, config(64, 64, 64, False), 132, True).steps
    assert (step.args["BY_DESCRIPTOR"], step.args["out_desc"] is not None) == (stored, stored)


# Microseconds on an H200, by rows, columns of a tile and of a piece.
TILES = ((128, 128, 128), (192, 128, 128), (256, 128, 128), (256, 128, 64), (128, 192, 64))
MEASURED = {
    (4096, 14336, 4096): (457.6, 463.4, 444.9, 462.8, 500.5),
    (4096, 4096, 14336): (455.8, 521.7, 445.9, 449.9, 548.6),
    (8192, 8192, 8192): (1061.3, 1076.0, 1076.7, 1048.6, 1175.8),
    (4096, 4096, 4096): (132.7, 141.8, 132.7, 135.0, 152.8),
    (4096, 7168, 2048): (122.1, 125.1, 119.7, 121.7, 133.7),
    (4096, 2112, 7168): (128.9, 124.5, 164.5, 151.5, 131.8),
    (2048, 7168, 4096): (111.6, 117.8, 127.0, 123.1, 125.7),
    (256, 7168, 2048): (11.1, 14.3, 18.0, 17.8, 15.6),
}


def made_of(size, tile):
    m, n, _ = size
    return config(*tile, -(-m // tile[0]) * -(-n // tile[1]) > H200.processors)


@pytest.mark.parametrize("size", MEASURED, ids=str)
def test_the_model_picks_among_tiles_as_they_were_measured(size):
    problem = replace(LARGE, m=size[0], n=size[1], k=size[2])
    us = dict(zip(TILES, MEASURED[size], strict=True))
    told = {tile: model.predict_us(made_of(size, tile), problem, H200) for tile in TILES}
    assert us[min(told, key=told.get)] <= 1.03 * min(us.values())
    assert all(told[tile] == pytest.approx(us[tile], rel=0.15) for tile in TILES)
    assert model.pick(problem, H200).family == "scaled"
