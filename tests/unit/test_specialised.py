"""Products by specialised warps, as out^T and by clusters of two: what may be made so, launches, predictions.

`warpgroups` tells what is legal for a program of the others, and how long it takes.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.posed import posed
from tritile.core.problem import MatmulProblem
from tritile.errors import UnsupportedError
from tritile.families import numerics
from tritile.families.common.warpgroups import REGISTERS
from tritile.families.common.warps import order
from tritile.families.matmul_clusters import family as clusters
from tritile.families.matmul_transposed import family as transposed
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.registry import FAMILIES
from tritile.families.space import contenders, illegal, legal_configs
from tritile.families.work import work_of
from tritile.lab import traffic
from tritile.lab.explain import SHARED, TENSOR_CORES, parts_us
from tritile.planning import model
from tritile.planning.formula import Constants
from tritile.planning.portfolio import Loss, Portfolio

KINDS = {each.name: each for each in (transposed.KIND, clusters.KIND, clusters.TRANSPOSED_KIND)}
H200 = replace(target_device("nvidia-h200"), triton="3.7.1")  # the version with which clusters were checked
OLDER = replace(H200, triton="3.6.0")
EVEN = MatmulProblem(1, 4096, 2048, 1024, "bfloat16", "bfloat16", b_layout="column")
SQUARE = replace(EVEN, n=4096, k=4096)
LAYOUTS = [*itertools.product(("row", "column"), repeat=2)]
SIZES = [(1, 1, 1), (1, 257, 577), (1, 2000, 131), (1, 130, 5000), (3, 700, 900), (1, 5000, 6000), (5, 1, 9)]


def config(m=80, n=128, consumers=2, stages=4, group=8, persistent=False, subtiles=1):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "CONSUMERS": consumers, "GROUP_M": group}
    return Config.of(4, stages, "transposed", **blocks, PERSISTENT=persistent, SUBTILES=subtiles)


def paired(name, m, n, down=1, group=8, persistent=False):
    """The config of a family of clusters whose programs make such tiles."""
    (found,) = (
        each for each in FAMILIES["matmul"][name].configs
        if (each["BLOCK_M"], each["BLOCK_N"], each["DOWN"]) == (m, n, down)
        and (each["GROUP_M"], each["PERSISTENT"]) == (group, persistent)
    )  # fmt: skip
    return found


def changed(own, **values):
    return replace(own, kwargs=tuple((name, values.get(name, value)) for name, value in own.kwargs))


CLUSTER, TURNED = paired("clusters", 128, 192), paired("transposed_clusters", 80, 128)
OWN = [config(), CLUSTER, TURNED]
by_family = pytest.mark.parametrize("own", OWN, ids=lambda own: own.family)


def steps_of(problem, own):
    call = posed(problem)
    return work_of(call, own, H200.processors, True).steps


def turned(problem):
    """The problem of out^T, stored row by row."""
    layouts = {"row": "column", "column": "row"}
    a, b = layouts[problem.b_layout], layouts[problem.a_layout]
    aligned = {"a_align": problem.b_align, "b_align": problem.a_align}
    return replace(problem, m=problem.n, n=problem.m, a_layout=a, b_layout=b, **aligned)


@pytest.mark.parametrize(("name", "shapes"), [("clusters", 20), ("transposed_clusters", 26)])
def test_every_config_of_clusters_fits(name, shapes):
    own = FAMILIES["matmul"][name].configs
    assert len(own) == len(set(own)) == shapes * 2 * 2
    assert {(each.family, each.num_ctas, each["BLOCK_K"]) for each in own} == {(name, 2, 64)}
    for each in own:
        assert illegal(each, SQUARE, H200) is None
        assert KINDS[name].shared_bytes(each, SQUARE) <= H200.shared_memory
        down, across = (each["DOWN"], 2 // each["DOWN"])[:: -1 if name.startswith("t") else 1]
        whole = KINDS[name].clustered(each)
        assert (whole["BLOCK_M"], whole["BLOCK_N"]) == (down * each["BLOCK_M"], across * each["BLOCK_N"])


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [(4096, 2048, 1024), (80, 5000, 72), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_legal_is_what_warpgroups_may_make_mirrored(layouts, size, out):
    problem = MatmulProblem(1, *size, "bfloat16", out, a_layout=layouts[0], b_layout=layouts[1])
    odd = [config(), changed(config(), BLOCK_M=112), config(64, 96, 1), config(80, 128, 3), config(stages=13)]
    for own in (*transposed.FAMILY.configs[::3], *odd):
        made = changed(own, BLOCK_M=own["BLOCK_N"], BLOCK_N=own["BLOCK_M"])
        assert illegal(own, problem, H200) == illegal(
            replace(made, family="warpgroups"), turned(problem), H200
        )


FP32 = {"dtype": "float32", "out_dtype": "float32"}


@by_family
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float8_e4m3fn"}, "not summed by"),
        ({"dtype": "int8", "out_dtype": "int32"}, "not summed by"),
        (FP32, "not summed by"),
        ({"epilogue": "gated silu"}, "gated"),
        ({"out_layout": "column"}, "not row by row"),
    ],
    ids=str,
)
def test_what_is_not_made_is_said(own, changes, why):
    for fine in ({}, {"dtype": "float16"}, {"epilogue": "bias=row gelu"}):
        assert illegal(own, replace(EVEN, **fine), H200) is None
    assert why in (illegal(own, replace(EVEN, **changes), H200) or "legal")


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (config(subtiles=4), "SUBTILES"),
        (config(group=3), "power of two"),
        (config(persistent=1), "neither True nor False"),
        (replace(config(), num_warps=8), "num_warps"),
        (replace(config(), num_ctas=2), "num_ctas"),
        (replace(config(), kwargs=config().kwargs[:-1]), "parameters"),
        (changed(TURNED, DOWN=4), "DOWN"),
        (changed(TURNED, BLOCK_M=128), "tiles"),
        (changed(TURNED, BLOCK_K=128), "tiles"),
        (changed(TURNED, SUBTILES=2), "tiles"),
        (changed(TURNED, GROUP_M=3), "power of two"),
        (replace(TURNED, num_ctas=1), "num_ctas"),
        (replace(TURNED, num_stages=9), "shared memory"),
        (replace(TURNED, num_warps=8), "num_warps"),
        (replace(TURNED, kwargs=TURNED.kwargs[:-1]), "parameters"),
        (replace(config(), family="clusters"), "parameters"),
        (changed(CLUSTER, BLOCK_N=96), "tiles"),
    ],
    ids=str,
)
def test_configs_that_were_not_checked_are_refused(own, why):
    assert why in (illegal(own, EVEN, H200) or "legal")


def test_tiles_that_are_turned_over_spill_beside_a_matrix():
    own, fused = config(256, 64, 1), replace(EVEN, epilogue="residual=full gelu")
    assert illegal(own, EVEN, H200) is None
    assert "accumulator registers" in illegal(own, fused, H200)
    other = replace(transposed.KIND.alone(own), family="warpgroups")
    assert illegal(other, turned(fused), H200) is None


@by_family
def test_other_gpus_have_none(own):
    for name in ("sm_80", "sm_100", "gfx942"):
        device = replace(TARGETS[name], triton="3.7.1")
        assert "has no warpgroup" in illegal(own, EVEN, device)
        assert own.family not in model.families(EVEN, device)
    assert own.family in contenders(EVEN)
    assert own.family in model.families(EVEN, H200)


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0"])
@pytest.mark.parametrize("own", OWN[1:], ids=lambda own: own.family)
def test_other_versions_of_triton_and_a_gpu_of_one_sm_have_no_clusters(version, own):
    """On one SM a grid of persistent clusters would have no program, and nothing would be stored."""
    other = replace(H200, triton=version)
    assert "triton" in illegal(own, EVEN, other)
    assert own.family not in model.families(EVEN, other)
    with pytest.raises(UnsupportedError, match="no config"):
        legal_configs(EVEN, other, own.family)
    assert "too few SMs" in (illegal(own, EVEN, replace(H200, processors=1)) or "legal")
    assert illegal(own, EVEN, replace(H200, processors=2)) is None


@pytest.mark.parametrize("name", KINDS)
def test_sums_are_those_of_batch_invariant_calls(name):
    for own in FAMILIES["matmul"][name].configs:
        assert numerics.numerics(own, EVEN, H200) == numerics.canonical(EVEN, H200)


def box(rows, wide, layout="row"):
    return (1, 1, rows, wide) if layout == "row" else (1, 1, wide, rows)


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("own", "main", "rest"),
    [
        (config(80, 128, 2), 64, 16),
        (config(144, 64, 1, subtiles=2), 128, 16),
        (config(96, 192, 3, persistent=True), 64, 32),
        (config(128, 128, 1), 128, 0),
        (paired("transposed_clusters", 80, 128, 1), 64, 16),
        (paired("transposed_clusters", 80, 128, 2), 64, 16),
        (paired("transposed_clusters", 144, 192, 2, persistent=True), 128, 16),
        (paired("transposed_clusters", 32, 128, 2), 32, 0),
        (paired("clusters", 192, 144, 1), 128, 16),
        (paired("clusters", 128, 192, 2), 128, 64),
        (paired("clusters", 128, 256, 2), 256, 0),
    ],
    ids=str,
)
def test_boxes_hold_a_tile_in_two_pieces_for_both_programs(layouts, own, main, rest):
    """Of out^T the kernel's own a is b^T, and its b is a^T; `transposed` names them as they are of out."""
    kind, step = KINDS[own.family], steps_of(replace(EVEN, a_layout=layouts[0], b_layout=layouts[1]), own)[-1]
    made, (down, across), args = kind.alone(own), kind.arranged(own), step.args
    rows, turn = made["BLOCK_M"] // own["CONSUMERS"], slice(None, None, -1 if kind.turned else 1)

    def of(high, wide, layout="row"):
        return box(*(high, wide)[turn], layout)

    a_layout, b_layout = layouts[turn]
    names = {"b_desc": "a_desc", "b_rest_desc": "a_rest_desc", "a_desc": "b_desc"} if kind.by_out else {}
    wanted = {
        "a_desc": of(rows * down, 64, a_layout),
        "b_desc": of(64, main * across, b_layout),
        "b_rest_desc": of(64, rest * across, b_layout) if rest else None,
        "out_desc": of(rows * down, main // own["SUBTILES"] * across),
        "out_rest_desc": of(rows * down, rest * across) if rest else None,
    }
    found = {name: args[names.get(name, name)] for name in wanted}
    assert {name: each and each.block for name, each in found.items()} == wanted
    assert [found[name].buffer for name in ("a_desc", "b_desc")] == [*"ab"[turn]]
    if own.num_ctas == 2:
        parts = {"a_desc": (down - 1, 0, a_layout), "b_desc": (0, across - 1, b_layout)}
        for name, part in (parts | {"out_desc": (down - 1, across - 1)}).items():
            assert found[name].layout.cga_layout == [[0, 0, *of(*part)[2:]]]
        assert (args["DOWN"], args["TRANSPOSED"]) == (own["DOWN"], kind.turned)
    else:
        assert {found[name].layout.transposed for name in ("a_desc", "b_desc", "out_desc")} == {False}
    blocks, rowwise = (own, [each == "row" for each in layouts])
    if kind.turned and not kind.by_out:
        blocks, rowwise = made, [each == "column" for each in layouts[::-1]]
    assert (args["BLOCK_M"], args["BLOCK_N"]) == (blocks["BLOCK_M"], blocks["BLOCK_N"])
    assert [args["A_ROW"], args["B_ROW"]] == rowwise
    assert (args["M"], args["N"], args["K"]) == (EVEN.m, EVEN.n, EVEN.k)
    assert args["MAIN_M" if kind.by_out else "MAIN_N"] == main
    assert (args["REGISTERS"], args["STAGES"]) == (REGISTERS[own["CONSUMERS"]], own.num_stages)
    clustered = {} if own.num_ctas == 1 else {"num_ctas": 2}
    assert step.options == {"num_warps": 4, "launch_pdl": True} | clustered


@by_family
def test_copies_come_first_and_results_that_no_descriptor_stores_have_a_pointer_and_strides(own):
    steps = steps_of(replace(EVEN, n=1003, k=1003, a_align=2, out_align=2), own)
    kernel = "matmul_transposed" if own.family == "transposed" else "matmul_clusters"
    assert [step.kernel.__name__ for step in steps] == ["repack", kernel]
    args = steps[-1].args
    assert (args["out_desc"], args["out_rest_desc"], args["BY_DESCRIPTOR"]) == (None, None, False)
    assert (args["stride_om"], args["stride_on"]) == (1003, 1)


def order_of(monkeypatch, step, tiles_m, tiles_n, batch):
    """(matrix, row, column) of tiles, or clusters, as they start, by the kernel's own functions."""
    walk = SimpleNamespace(
        tiles_m=tiles_m, tiles_n=tiles_n, tiles=tiles_m * tiles_n * batch, inner_batch=batch,
        flag=None, tail=None,
    )  # fmt: skip
    how = SimpleNamespace(FLAT=step.args["FLAT"], GROUP_M=step.args["GROUP_M"], BATCHED=batch > 1)
    made = []
    for place in itertools.product(*map(range, step.grid[::-1])):
        language = SimpleNamespace(
            program_id=place[::-1].__getitem__, num_programs=step.grid.__getitem__, minimum=min
        )
        monkeypatch.setattr(order, "gl", language)
        for index in range(*order.pieces_of.fn(walk, how)):
            outer, inner, row, column = order.tile_at.fn(index, walk, how)
            made.append((outer * batch + inner, row, column))
    return made


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("name", "m", "n", "down"),
    [("transposed", 80, 128, 1), ("clusters", 128, 192, 1), ("clusters", 128, 192, 2)]
    + [("transposed_clusters", 80, 128, down) for down in (1, 2)],
)
@pytest.mark.parametrize(("group", "persistent"), [*itertools.product((1, 8), (False, True))])
def test_every_tile_is_made_once_down_bands(monkeypatch, size, name, m, n, down, group, persistent):
    """Kernels of out^T count in out^T, so GROUP_M counts columns of out. Odd tiles have a partner."""
    how = {"group": group, "persistent": persistent}
    own = config(m, n, **how) if name == "transposed" else paired(name, m, n, down, **how)
    problem = MatmulProblem(*size, 72, "float16", "float16")
    (batch, m, n), step, whole = size, steps_of(problem, own)[-1], KINDS[name].clustered(own)
    rows, columns = -(-m // whole["BLOCK_M"]), -(-n // whole["BLOCK_N"])
    first, second = (columns, rows) if KINDS[name].turned else (rows, columns)
    tiles, at_once = rows * columns * batch, H200.processors // own.num_ctas
    made = order_of(monkeypatch, step, first, second, batch)
    assert len(made) == tiles
    assert set(made) == {*itertools.product(range(batch), range(first), range(second))}
    assert step.args["FLAT"] == (not persistent and (tiles <= at_once or group >= first))
    if step.args["FLAT"]:
        assert step.grid == (first, second, batch)
    elif persistent:
        assert step.grid == (min(tiles, at_once), 1, 1)
    else:
        assert step.grid == (tiles, 1, 1)
        assert max(row for matrix, row, _ in made[: group * second] if not matrix) < group


@pytest.mark.parametrize(("m", "dominated"), [(640, True), (1280, False)])
def test_persistent_clusters_gain_where_not_all_run_at_once(m, dominated):
    """66 of 128 x 384 do."""
    own = paired("clusters", 128, 192, persistent=True)
    assert clusters.FAMILY.pointless(own, replace(EVEN, m=m, n=3840), H200) == dominated


@pytest.mark.parametrize("name", ["transposed", "transposed_clusters"])
@pytest.mark.parametrize(
    "changes", [{}, {"m": 80, "n": 5000}, {"m": 1000, "n": 1003, "b_align": 2, "out_align": 2}], ids=str
)
def test_predictions_are_those_of_the_mirror_image(name, changes):
    problem, other = replace(EVEN, **changes), warpgroups if name == "transposed" else clusters
    for own in legal_configs(problem, H200, name)[::20]:
        made = replace(KINDS[name].mirrored(own), family=other.NAME)
        wanted = other.KIND.predicted_us(made, turned(problem), H200)
        assert model.predict_us(own, problem, H200) == pytest.approx(wanted)
        held = KINDS[name].resident(own, problem, H200)
        assert held == other.KIND.resident(made, turned(problem), H200)


@pytest.mark.parametrize("down", [1, 2])
@pytest.mark.parametrize("name", ["clusters", "transposed_clusters"])
def test_reports_count_the_operand_that_a_cluster_shares_once(name, down):
    m, n = (128, 192) if name == "clusters" else (144, 192)
    own = paired(name, m, n, down)
    alone = replace(KINDS[name].alone(own), family="warpgroups")
    by_columns = KINDS[name].turned
    if by_columns:
        alone = replace(changed(alone, BLOCK_M=m, BLOCK_N=n), family="transposed")
    high, wide = (m * (3 - down), n * down) if by_columns else (m * down, n * (3 - down))
    rows, columns = -(-EVEN.m // high), -(-EVEN.n // wide)
    assert traffic.tile_of(own, EVEN) == (high, wide)
    assert traffic.own_tile_of(own, EVEN) == traffic.tile_of(alone, EVEN) == (m, n)
    assert traffic.tiled(EVEN, own, H200).read == EVEN.k * 2 * (EVEN.m * columns + EVEN.n * rows)
    assert traffic.tiling(EVEN, own, H200).programs == 2 * rows * columns
    if not by_columns:
        for part in (TENSOR_CORES, SHARED):  # of a program each
            assert parts_us(SQUARE, own, H200)[part] == parts_us(SQUARE, alone, H200)[part]


def test_a_portfolio_of_triton_37_serves_other_versions_by_its_other_configs():
    others = [each for each in legal_configs(SQUARE, OLDER) if each.family == "warpgroups"][:2]
    configs = (CLUSTER, others[0], paired("clusters", 192, 128, 2), others[1])
    constants = tuple(replace(Constants(), start=1.0 + place) for place in range(4))
    portfolio = Portfolio("halves-nt", configs, constants, Loss(100, 0.01, 0.05, 0.2))
    assert {each for _, each in portfolio.ranked(SQUARE, H200, 4)} == set(configs)
    assert {each for _, each in portfolio.ranked(SQUARE, OLDER, 4)} == set(others)


@pytest.mark.parametrize("device", [OLDER, H200], ids=["3.6", "3.7"])
def test_promoted_sums_have_the_widths_that_are_right_with_a_triton(device):
    parts = replace(EVEN, dtype="float32", out_dtype="float32", precision="fp16x3").core
    assert parts.promoted
    found = {each["BLOCK_N"] for each in legal_configs(parts, device, "warpgroups")}
    assert (found == {64, 96, 128, 192}) == (device is OLDER)
    assert found >= {64, 96, 128, 192}
    assert 160 in {each["BLOCK_N"] for each in legal_configs(EVEN, device, "warpgroups")}
