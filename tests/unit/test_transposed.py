"""Products made as out^T = b^T a^T: which configs mirror which, what may be made so, and its launch.

By one program a tile, and by clusters of two.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.pointer import Pointer
from tritile.core.problem import MatmulProblem
from tritile.core.views import posed
from tritile.families import numerics
from tritile.families.common.tma_time import TMA_FITTED
from tritile.families.common.warps import order
from tritile.families.matmul_clusters import family as clusters
from tritile.families.matmul_clusters import transposed as transposed_clusters
from tritile.families.matmul_transposed.family import FAMILY, mirrored
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.registry import FAMILIES
from tritile.families.space import contenders, illegal, legal_configs
from tritile.families.work import work_of
from tritile.lab import traffic
from tritile.lab.explain import bounds
from tritile.lab.report.tiling import step_of, tiling_of
from tritile.lab.report.tiling.texts import notes
from tritile.planning import model
from tritile.planning.formula import FORMULAS, shape_of

H200 = target_device("nvidia-h200")
PAIRED = replace(H200, triton="3.7.1")  # the version with which clusters were checked
EVEN = MatmulProblem(1, 4096, 2048, 1024, "bfloat16", "bfloat16", b_layout="column")
LAYOUTS = [*itertools.product(("row", "column"), repeat=2)]


def config(m=80, n=128, consumers=2, stages=4, group=8, persistent=False, subtiles=1):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "CONSUMERS": consumers, "GROUP_M": group}
    return Config.of(4, stages, "transposed", **blocks, PERSISTENT=persistent, SUBTILES=subtiles)


def changed(own, **values):
    return replace(own, kwargs=tuple((name, values.get(name, value)) for name, value in own.kwargs))


def launched(problem, own):
    call = posed(problem, lambda dtype, count: Pointer(getattr(torch, dtype)))
    return work_of(call, own, H200.processors, True).steps[-1]


def turned(problem):
    """The problem of out^T, stored row by row."""
    layouts = {"row": "column", "column": "row"}
    a, b = layouts[problem.b_layout], layouts[problem.a_layout]
    aligned = {"a_align": problem.b_align, "b_align": problem.a_align}
    return replace(problem, m=problem.n, n=problem.m, a_layout=a, b_layout=b, **aligned)


def test_its_configs_are_those_of_warpgroups_mirrored():
    wanted = [each for each in warpgroups.FAMILY.configs if each["BLOCK_K"] == 64]
    assert [*map(mirrored, FAMILY.configs)] == wanted
    for own in FAMILY.configs:
        assert own.family == "transposed"
        assert replace(mirrored(mirrored(own)), family="transposed") == own
        assert own.key != mirrored(own).key == Config.from_dict(mirrored(own).to_dict()).key
    assert {own["BLOCK_N"] for own in FAMILY.configs} == {64, 128, 192, 256}
    assert {own["BLOCK_M"] for own in FAMILY.configs} == {16, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256}
    assert max(own["BLOCK_M"] * own["BLOCK_N"] for own in FAMILY.configs) == 256 * 160


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [(4096, 2048, 1024), (80, 5000, 72), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_legal_is_what_warpgroups_may_make_mirrored(layouts, size, out):
    m, n, k = size
    problem = MatmulProblem(1, m, n, k, "bfloat16", out, a_layout=layouts[0], b_layout=layouts[1])
    odd = [config(), changed(config(), BLOCK_M=112), config(64, 96, 1), config(80, 128, 3), config(stages=13)]
    for own in (*FAMILY.configs, *odd):
        assert illegal(own, problem, H200) == illegal(mirrored(own), turned(problem), H200)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float8_e4m3fn"}, "not summed in transposed"),
        ({"dtype": "float8_e4m3fn", "precision": "fast"}, "not summed in transposed"),
        ({"dtype": "int8", "out_dtype": "int32"}, "not summed in transposed"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, "not summed in transposed"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "fp16x3"}, "not summed in transposed"),
        ({"dtype": "float64", "out_dtype": "float64", "precision": "ozaki"}, "not summed in transposed"),
        ({"epilogue": "gated silu"}, "gated"),
        ({"out_layout": "column"}, "not row by row"),
    ],
    ids=str,
)
def test_what_is_not_made_transposed_is_said(changes, why):
    for fine in ({}, {"dtype": "float16"}, {"out_dtype": "float32"}, {"epilogue": "bias=row gelu"}):
        assert illegal(config(), replace(EVEN, **fine), H200) is None
    assert why in (illegal(config(), replace(EVEN, **changes), H200) or "legal")


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (config(m=112), "none of"),
        (config(m=24), "none of"),
        (config(n=80), "64 or 128 rows for each"),
        (config(n=512), "blocks are whole numbers"),
        (config(n=64, consumers=2), "64 or 128 rows for each"),
        (config(192, 256), "accumulator registers"),
        (config(subtiles=4), "SUBTILES"),
        (config(group=3), "power of two"),
        (config(persistent=1), "neither True nor False"),
        (config(stages=12), "bytes of shared memory"),
        (replace(config(), num_warps=8), "num_warps"),
        (replace(config(), kwargs=config().kwargs[:-1]), "parameters"),
    ],
    ids=str,
)
def test_sides_that_no_warpgroup_has_are_refused(own, why):
    assert why in (illegal(own, EVEN, H200) or "legal")


def test_other_gpus_have_none():
    for name in ("sm_80", "sm_100", "gfx942"):
        assert "has no warpgroup" in illegal(config(), EVEN, TARGETS[name])
        assert "transposed" not in model.families(EVEN, TARGETS[name])
    assert "transposed" in contenders(EVEN)
    assert "transposed" in model.families(EVEN, H200)


def test_sums_are_those_of_batch_invariant_calls():
    for own in FAMILY.configs:
        assert numerics.numerics(own, EVEN, H200) == numerics.canonical(EVEN, H200)


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("own", "main", "rest"),
    [
        (config(80, 128, 2), 64, 16),
        (config(144, 64, 1, subtiles=2), 128, 16),
        (config(96, 192, 3, persistent=True), 64, 32),
        (config(128, 128, 1), 128, 0),
        (config(16, 64, 1), 16, 0),
    ],
    ids=str,
)
def test_boxes_hold_rows_in_two_pieces_and_the_columns_of_a_consumer(layouts, own, main, rest):
    a_layout, b_layout = layouts
    args = launched(replace(EVEN, a_layout=a_layout, b_layout=b_layout), own).args
    columns = own["BLOCK_N"] // own["CONSUMERS"]

    def box(rows, across, layout="row"):
        return (1, 1, rows, across) if layout == "row" else (1, 1, across, rows)

    assert (args["MAIN_M"], args["BLOCK_M"]) == (main, main + rest)
    assert (args["A_ROW"], args["B_ROW"]) == (a_layout == "row", b_layout == "row")
    assert args["a_desc"].block == box(main, 64, a_layout)
    assert args["b_desc"].block == box(64, columns, b_layout)
    assert args["out_desc"].block == box(main // own["SUBTILES"], columns)
    pieces = args["a_rest_desc"], args["out_rest_desc"]
    if rest:
        assert [piece.block for piece in pieces] == [box(rest, 64, a_layout), box(rest, columns)]
    else:
        assert pieces == (None, None)
    assert {args[name].layout.transposed for name in ("a_desc", "b_desc", "out_desc")} == {False}
    assert args["REGISTERS"] == warpgroups.REGISTERS[own["CONSUMERS"]]
    assert args["STAGES"] == own.num_stages


def test_results_that_no_descriptor_stores_have_a_pointer_and_strides():
    args = launched(replace(EVEN, n=1003, out_align=2), config()).args
    assert (args["out_desc"], args["out_rest_desc"], args["BY_DESCRIPTOR"]) == (None, None, False)
    assert (args["stride_om"], args["stride_on"]) == (1003, 1)


def test_operands_that_no_descriptor_reads_are_copied_first():
    call = posed(replace(EVEN, k=1003, a_align=2), lambda dtype, count: Pointer(getattr(torch, dtype)))
    steps = work_of(call, config(), H200.processors, True).steps
    assert [step.kernel.__name__ for step in steps] == ["repack", "matmul_transposed"]
    assert steps[-1].options == {"num_warps": 4, "launch_pdl": True}


SIZES = [(1, 1, 1), (1, 257, 577), (1, 2000, 131), (1, 130, 5000), (3, 700, 900), (1, 5000, 6000), (5, 1, 9)]


def order_of(monkeypatch, step, rows, columns, batch):
    """(matrix, row, column) of tiles as they start, by the kernel's own functions, which count in out^T."""
    walk = SimpleNamespace(
        tiles_m=columns, tiles_n=rows, tiles=rows * columns * batch, inner_batch=batch, flag=None, tail=None
    )
    how = SimpleNamespace(FLAT=step.args["FLAT"], GROUP_M=step.args["GROUP_M"], BATCHED=batch > 1)
    made = []
    for place in itertools.product(*map(range, step.grid[::-1])):
        language = SimpleNamespace(
            program_id=place[::-1].__getitem__, num_programs=step.grid.__getitem__, minimum=min
        )
        monkeypatch.setattr(order, "gl", language)
        for index in range(*order.pieces_of.fn(walk, how)):
            outer, inner, column, row = order.tile_at.fn(index, walk, how)
            made.append((outer * batch + inner, row, column))
    return made


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("group", "persistent"), [*itertools.product((1, 8), (False, True))])
def test_every_tile_is_made_once_down_bands_of_columns(monkeypatch, size, group, persistent):
    """GROUP_M counts columns of tiles."""
    batch, m, n = size
    own = config(group=group, persistent=persistent)
    step = launched(MatmulProblem(batch, m, n, 72, "float16", "float16"), own)
    rows, columns = -(-m // own["BLOCK_M"]), -(-n // own["BLOCK_N"])
    tiles, made = rows * columns * batch, order_of(monkeypatch, step, rows, columns, batch)
    assert len(made) == tiles
    assert set(made) == {*itertools.product(range(batch), range(rows), range(columns))}
    assert (not persistent and (tiles <= H200.processors or group >= columns)) == step.args["FLAT"]
    if step.args["FLAT"]:
        assert step.grid == (columns, rows, batch)
    elif persistent:
        assert step.grid == (min(tiles, H200.processors), 1, 1)
    else:
        assert step.grid == (tiles, 1, 1)
        band = [column for matrix, row, column in made[: group * rows] if not matrix]
        assert max(band) < group


def test_few_rows_take_no_side_of_twice_as_many():
    for m, most in ((20, 32), (65, 128), (4096, 256)):
        found = legal_configs(replace(EVEN, m=m), H200, "transposed")
        assert max(own["BLOCK_M"] for own in found) == most


def test_predictions_are_those_of_warpgroups_mirrored():
    for problem in (EVEN, replace(EVEN, m=80, n=5000), replace(EVEN, m=1000, n=1003, b_align=2, out_align=2)):
        for own in legal_configs(problem, H200, "transposed")[::40]:
            wanted = model.predict_us(mirrored(own), turned(problem), H200)
            assert model.predict_us(own, problem, H200) == pytest.approx(wanted)
            assert FAMILY.resident(own, problem, H200) == warpgroups.resident(
                mirrored(own), turned(problem), H200
            )


def paired(m=80, n=128, down=1, group=8, persistent=False):
    """The config of a cluster of two programs that makes such tiles; DOWN counts along columns of out."""
    (found,) = (
        each for each in transposed_clusters.FAMILY.configs
        if (each["BLOCK_M"], each["BLOCK_N"], each["DOWN"]) == (m, n, down)
        and (each["GROUP_M"], each["PERSISTENT"]) == (group, persistent)
    )  # fmt: skip
    return found


def of_clusters(own):
    """The config of `clusters` that makes out^T as `own` does."""
    return replace(mirrored(own), family="clusters")


def test_configs_of_clusters_make_out_transposed():
    own = transposed_clusters.FAMILY.configs
    assert len(own) == len(set(own)) == 13 * 2 * 2 * 2
    assert {(each.family, each.num_ctas, each["BLOCK_K"]) for each in own} == {("transposed_clusters", 2, 64)}
    assert {each["BLOCK_N"] for each in own} == {64, 128, 192, 256}
    for config in own:
        down, across = clusters.arranged(config)
        whole = transposed_clusters.clustered(config)
        assert (whole["BLOCK_M"], whole["BLOCK_N"]) == (across * config["BLOCK_M"], down * config["BLOCK_N"])


def test_every_config_of_clusters_fits():
    for own in transposed_clusters.FAMILY.configs:
        assert illegal(own, EVEN, PAIRED) is None
        assert clusters.shared_bytes(of_clusters(own), turned(EVEN)) <= PAIRED.shared_memory


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float8_e4m3fn"}, "not summed by clusters"),
        ({"dtype": "int8", "out_dtype": "int32"}, "not summed by clusters"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, "not summed by clusters"),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "fp16x3"}, "not summed by clusters"),
        ({"dtype": "float64", "out_dtype": "float64", "precision": "ozaki"}, "not summed by clusters"),
        ({"epilogue": "gated silu"}, "gated"),
        ({"out_layout": "column"}, "not row by row"),
    ],
    ids=str,
)
def test_what_clusters_do_not_make_transposed_is_said(changes, why):
    for fine in ({}, {"dtype": "float16"}, {"out_dtype": "float32"}, {"epilogue": "bias=row gelu"}):
        assert illegal(paired(), replace(EVEN, **fine), PAIRED) is None
    assert why in (illegal(paired(), replace(EVEN, **changes), PAIRED) or "legal")


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (changed(paired(), DOWN=4), "DOWN"),
        (changed(paired(), BLOCK_M=128), "tiles"),
        (changed(paired(), BLOCK_N=80), "tiles"),
        (changed(paired(), BLOCK_M=128, BLOCK_N=80), "tiles"),
        (changed(paired(), BLOCK_K=128), "tiles"),
        (changed(paired(), SUBTILES=2), "tiles"),
        (changed(paired(), GROUP_M=3), "power of two"),
        (replace(paired(), num_ctas=1), "num_ctas"),
        (replace(paired(), num_stages=9), "shared memory"),
        (replace(paired(), num_warps=8), "num_warps"),
        (replace(paired(), kwargs=paired().kwargs[:-1]), "parameters"),
        (config(), "parameters"),
    ],
    ids=str,
)
def test_clusters_that_were_not_checked_are_refused(own, why):
    refused = replace(own, family="transposed_clusters")
    assert why in (illegal(refused, EVEN, PAIRED) or "legal")


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0"])
def test_other_gpus_and_versions_of_triton_have_no_clusters(version):
    other = replace(H200, triton=version)
    assert "triton" in illegal(paired(), EVEN, other)
    assert "transposed_clusters" not in model.families(EVEN, other)
    assert "transposed_clusters" in model.families(EVEN, PAIRED)
    assert "has no warpgroup" in illegal(paired(), EVEN, replace(TARGETS["sm_100"], triton="3.7.1"))


@pytest.mark.parametrize("own", [paired(persistent=True), of_clusters(paired(80, 128, 2))], ids=str)
def test_a_gpu_of_one_sm_has_no_clusters(own):
    """A grid of persistent clusters would have no program, and nothing would be stored."""
    assert "too few SMs" in (illegal(own, EVEN, replace(PAIRED, processors=1)) or "legal")
    assert illegal(own, EVEN, replace(PAIRED, processors=2)) is None


def test_sums_of_clusters_are_those_of_batch_invariant_calls():
    for own in transposed_clusters.FAMILY.configs:
        assert numerics.numerics(own, EVEN, PAIRED) == numerics.canonical(EVEN, PAIRED)


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("own", "main", "rest"),
    [
        (paired(80, 128, 1), 64, 16),
        (paired(80, 128, 2), 64, 16),
        (paired(144, 192, 2, persistent=True), 128, 16),
        (paired(160, 256, 1), 128, 32),
        (paired(32, 128, 2), 32, 0),
        (paired(48, 64, 1), 32, 16),
    ],
    ids=str,
)
def test_boxes_of_clusters_hold_both_programs_rows_or_columns(layouts, own, main, rest):
    a_layout, b_layout = layouts
    step = launched(replace(EVEN, a_layout=a_layout, b_layout=b_layout), own)
    args, (down, across) = step.args, clusters.arranged(own)
    columns = own["BLOCK_N"] // own["CONSUMERS"]

    def box(rows, wide, layout="row"):
        return (1, 1, rows, wide) if layout == "row" else (1, 1, wide, rows)

    # The kernel's own a is b^T, and its b is a^T.
    assert (args["BLOCK_M"], args["BLOCK_N"]) == (own["BLOCK_N"], own["BLOCK_M"])
    assert (args["MAIN_N"], args["DOWN"], args["TRANSPOSED"]) == (main, own["DOWN"], True)
    assert (args["A_ROW"], args["B_ROW"]) == (b_layout == "column", a_layout == "column")
    assert (args["M"], args["N"], args["K"]) == (EVEN.m, EVEN.n, EVEN.k)
    assert args["a_desc"].buffer == "b"
    assert args["b_desc"].buffer == "a"
    assert args["a_desc"].block == box(64, columns * down, b_layout)
    assert args["b_desc"].block == box(main * across, 64, a_layout)
    assert args["out_desc"].block == box(main // own["SUBTILES"] * across, columns * down)
    pieces = args["b_rest_desc"], args["out_rest_desc"]
    if rest:
        assert [each.block for each in pieces] == [
            box(rest * across, 64, a_layout),
            box(rest * across, columns * down),
        ]
    else:
        assert pieces == (None, None)
    assert args["out_desc"].layout.cga_layout == [[0, 0, across - 1, down - 1]]
    assert args["REGISTERS"] == warpgroups.REGISTERS[own["CONSUMERS"]]
    assert args["STAGES"] == own.num_stages
    assert step.options == {"num_warps": 4, "num_ctas": 2, "launch_pdl": True}


def test_clusters_store_by_pointers_and_strides_of_out_where_no_descriptor_can():
    args = launched(replace(EVEN, n=1003, out_align=2), paired()).args
    assert (args["out_desc"], args["out_rest_desc"], args["BY_DESCRIPTOR"]) == (None, None, False)
    assert (args["stride_om"], args["stride_on"]) == (1003, 1)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("down", [1, 2])
@pytest.mark.parametrize(("group", "persistent"), [*itertools.product((1, 8), (False, True))])
def test_every_tile_of_clusters_is_made_once(monkeypatch, size, down, group, persistent):
    """Odd tiles have a partner beyond the edge."""
    batch, m, n = size
    own = paired(down=down, group=group, persistent=persistent)
    problem = MatmulProblem(batch, m, n, 72, "float16", "float16")
    step, whole = launched(problem, own), transposed_clusters.clustered(own)
    rows, columns = -(-m // whole["BLOCK_M"]), -(-n // whole["BLOCK_N"])
    made = order_of(monkeypatch, step, rows, columns, batch)
    assert len(made) == rows * columns * batch
    assert set(made) == {*itertools.product(range(batch), range(rows), range(columns))}
    assert not persistent or step.grid[0] <= PAIRED.processors // 2
    if not persistent:  # reports have the same order
        tiling = tiling_of(problem, own, PAIRED)
        assert made == [tiling.place(turn) for turn in range(tiling.turns)]


def test_predictions_of_clusters_are_those_of_clusters_mirrored():
    for problem in (EVEN, replace(EVEN, m=80, n=5000), replace(EVEN, m=1000, n=1003, b_align=2, out_align=2)):
        for own in legal_configs(problem, PAIRED, "transposed_clusters")[::20]:
            wanted = clusters.predicted_us(of_clusters(own), turned(problem), PAIRED)
            assert model.predict_us(own, problem, PAIRED) == pytest.approx(wanted)


OFF_SECTORS = MatmulProblem(1, 2696, 1584, 3256, "bfloat16", "bfloat16")


@pytest.mark.parametrize("own", [config(80, 128, 2), paired(80, 128)], ids=str)
@pytest.mark.parametrize("size", [(2696, 1584, 3256), (1824, 2744, 2112), (2160, 3472, 1640)], ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_predictions_count_the_copies_that_a_call_makes(own, size, layouts):
    """An estimate by b's layout decides about them, and that of out^T has another layout."""
    (m, n, k), (a, b) = size, layouts
    problem = replace(OFF_SECTORS, m=m, n=n, k=k, a_layout=a, b_layout=b)
    call = posed(problem, lambda dtype, count: Pointer(getattr(torch, dtype)))
    copies = set(work_of(call, own, PAIRED.processors, True).scratch)
    moved = 2 * k * (m * ("copy_a" in copies) + n * ("copy_b" in copies)) * problem.itemsize
    family = FAMILIES["matmul"][own.family]
    slow = replace(TMA_FITTED, repack_us=1e6, repack_share=1e-9)
    bare = replace(TMA_FITTED, repack_us=0.0, repack_share=1e9)
    us = family.predicted_us(own, problem, PAIRED, slow) - family.predicted_us(own, problem, PAIRED, bare)
    wanted = 1e6 + moved / (PAIRED.memory_gbps * 1e-6) if moved else 0.0
    assert us / wanted == pytest.approx(1, rel=0.2) if moved else us == 0  # clusters multiply it by a factor


@pytest.mark.parametrize("own", [config(80, 128, 2), paired(80, 128)], ids=str)
def test_predictions_count_what_an_epilogue_reads(own):
    thin = replace(EVEN, m=8192, n=8192, k=64)
    bare, fused = (
        model.predict_us(own, replace(thin, epilogue=text), PAIRED) for text in ("", "bias=row residual=full")
    )
    moved_us = (replace(thin, epilogue="residual=full").bytes - thin.bytes) / (PAIRED.memory_gbps * 1e3)
    assert fused > bare + moved_us / 2


@pytest.mark.parametrize("down", [1, 2])
def test_the_formula_counts_clusters_and_what_they_read(down):
    shape = shape_of(paired(144, 192, down), EVEN, PAIRED)
    assert (shape.block_m, shape.block_n, shape.sharers) == (144 * (3 - down), 192 * down, 2)
    formula = FORMULAS["matmul"]
    alone = shape_of(config(144, 192, 3, subtiles=2), EVEN, PAIRED)
    assert formula.begin(shape).work == formula.begin(alone).work


@pytest.mark.parametrize("down", [1, 2])
def test_reports_count_the_operand_that_a_cluster_shares_once(down):
    own, alone = paired(144, 192, down), config(144, 192, 3, subtiles=2)
    high, wide = 144 * (3 - down), 192 * down
    rows, columns = -(-EVEN.m // high), -(-EVEN.n // wide)
    assert traffic.tile_of(own, EVEN) == (high, wide)
    assert traffic.own_tile_of(own, EVEN) == traffic.tile_of(alone, EVEN) == (144, 192)
    assert traffic.tiled(EVEN, own, PAIRED).read == EVEN.k * 2 * (EVEN.m * columns + EVEN.n * rows)
    assert bounds.work_of(EVEN, own, PAIRED).units == 2 * rows * columns
    tiling = tiling_of(EVEN, own, PAIRED)
    assert (tiling.covers, tiling.tiles, tiling.at_once) == ((high, wide), rows * columns, 66)
    assert tiling.by_columns
    last = step_of(tiling, tiling.turns - 1, 0).c
    assert (last.top, last.left) == ((rows - 1) * high, (columns - 1) * wide)
    told = " ".join(notes(tiling))
    for words in ("cluster of two", "transpose of C is made", "share of the tile's columns"):
        assert words in told


@pytest.mark.parametrize(("group", "m"), [(1, 4096), (8, 4096), (8, 700)], ids=str)
def test_reports_have_the_order_of_the_kernel(monkeypatch, group, m):
    own, problem = config(group=group), replace(EVEN, m=m)
    step, tiling = launched(problem, own), tiling_of(problem, own, H200)
    made = order_of(monkeypatch, step, tiling.rows, tiling.columns, 1)
    assert made == [tiling.place(turn) for turn in range(tiling.turns)]
