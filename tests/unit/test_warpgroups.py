"""Products by specialised warps: what may be made so, and what is launched."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.configs import HAS_PAIRS, numerics, pair, split, warpgroups
from tritile.choose import waves
from tritile.core.call import call_for
from tritile.core.device import TARGETS, target_device
from tritile.core.problem import MatmulProblem
from tritile.families.matmul_wgmma import kernel
from tritile.families.matmul_wgmma.family import REGISTERS
from tritile.families.registry import FAMILIES
from tritile.families.space import canonical, contenders, illegal, legal_configs
from tritile.families.work import work_of

H200 = replace(target_device("nvidia-h200"), triton="3.7.1")
EVEN = MatmulProblem(1, 4096, 2048, 1024, "bfloat16", "bfloat16", b_layout="column")
OWN = warpgroups(128, 80, 64, 2, 4)
PAIRED, SPLIT = pair(128, 160, 2, 4), split(128, 160, 2, 4)


FP8 = replace(EVEN, dtype="float8_e4m3fn")
ACROSS = ("row", "row"), ("column", "column"), ("column", "row")  # layouts, not contiguous along K


def changed(own, **values):
    return replace(own, kwargs=tuple((name, values.get(name, value)) for name, value in own.kwargs))


def steps_of(problem, own):
    return work_of(call_for(problem), own, H200.processors, True).steps


INT8, FP32 = {"dtype": "int8", "out_dtype": "int32"}, {"dtype": "float32", "out_dtype": "float32"}


@pytest.mark.parametrize(
    ("own", "problem", "why"),
    [
        (OWN, replace(EVEN, **INT8), "no floating type"),
        (OWN, replace(EVEN, **FP32), "no floating type"),
        (OWN, replace(EVEN, epilogue="gated silu"), "gated"),
        (OWN, replace(EVEN, out_layout="column"), "not row by row"),
        *((OWN, replace(FP8, a_layout=a, b_layout=b), "bytes must lie along K") for a, b in ACROSS),
        (changed(OWN, SUBTILES=4), EVEN, "SUBTILES"),
        (changed(OWN, GROUP_M=3), EVEN, "power of two"),
        (changed(OWN, PERSISTENT=1), EVEN, "neither True nor False"),
        (changed(OWN, BLOCK_N=112), EVEN, "none of"),
        (changed(OWN, CONSUMERS=3), FP8, "consumers"),
        (replace(OWN, num_warps=8), EVEN, "num_warps"),
        (replace(OWN, num_ctas=2), EVEN, "num_ctas"),
        (replace(PAIRED, num_ctas=1), EVEN, "num_ctas"),
        (changed(PAIRED, PAIR=1), EVEN, "num_ctas"),
        (PAIRED, FP8, "made without"),
        (SPLIT, FP8, "made without"),
        (changed(SPLIT, SPLIT_TAIL=1), EVEN, "SPLIT_TAIL must be True"),
        (changed(SPLIT, PERSISTENT=False), EVEN, "PERSISTENT"),
        (split(128, 256, 2, 4), replace(EVEN, m=4224, n=8192), "no tile is split"),
        (split(128, 128, 2, 4), replace(EVEN, k=2**30), "more than is counted"),
        (warpgroups(128, 80, 64, 2, 4, persistent=True, SPLIT_TAIL=True, PAIR=True), EVEN, "together"),
        (replace(OWN, num_stages=13), FP8, "num_stages"),
        (replace(OWN, num_stages=12), EVEN, "shared memory"),
        (replace(OWN, kwargs=OWN.kwargs[:-1]), EVEN, "parameters"),
        (replace(OWN, kwargs=OWN.kwargs[1:]), FP8, "parameters"),
    ],
    ids=str,
)
def test_what_is_not_made_is_said(own, problem, why):
    assert why in (illegal(own, problem, H200) or "legal")


def test_pairs_where_they_have_run():
    assert illegal(PAIRED, EVEN, H200) is None
    for other in ("3.6.0", "3.8.0", "3.9.0"):
        assert "triton 3.7" in illegal(PAIRED, EVEN, replace(H200, triton=other))
    assert "too few SMs" in illegal(PAIRED, EVEN, replace(H200, processors=1))


def test_other_gpus_have_none():
    for name in ("sm_80", "sm_100", "gfx942"):
        assert "has no warpgroup" in illegal(OWN, EVEN, TARGETS[name])
        assert OWN.family not in waves.families(EVEN, TARGETS[name])
    assert OWN.family in contenders(EVEN)
    assert OWN.family in waves.families(EVEN, H200)


def test_sums_as_invariant_but_split():
    """Sizes and SMs decide how many parts these have."""
    for own in FAMILIES["matmul"]["warpgroups"].configs:
        wanted = "SPLIT_TAIL" not in dict(own.kwargs)
        assert (numerics(own, EVEN, H200) == canonical(EVEN, H200)) == wanted


@pytest.mark.parametrize("layouts", [*itertools.product(("row", "column"), repeat=2)], ids=str)
@pytest.mark.parametrize(
    ("own", "main", "rest"),
    [
        (OWN, 64, 16),
        (warpgroups(64, 144, 64, 1, 4, subtiles=2), 128, 16),
        (warpgroups(192, 96, 128, 3, 3, persistent=True), 64, 32),
        (warpgroups(128, 128, 64, 1, 4), 128, 0),
    ],
    ids=str,
)
def test_boxes_hold_two_pieces(layouts, own, main, rest):
    (step,) = steps_of(replace(EVEN, a_layout=layouts[0], b_layout=layouts[1]), own)
    args, rows, depth = step.args, own["BLOCK_M"] // own["CONSUMERS"], own["BLOCK_K"]

    def box(high, wide, layout="row"):
        return (1, 1, high, wide) if layout == "row" else (1, 1, wide, high)

    wanted = {
        "a_desc": box(rows, depth, layouts[0]),
        "b_desc": box(depth, main, layouts[1]),
        "b_rest_desc": box(depth, rest, layouts[1]) if rest else None,
        "out_desc": box(rows, main // own["SUBTILES"]),
        "out_rest_desc": box(rows, rest) if rest else None,
    }
    assert {name: args[name] and args[name].block for name in wanted} == wanted
    assert [args[name].buffer for name in ("a_desc", "b_desc", "out_desc")] == ["a", "b", "out"]
    assert [args["A_ROW"], args["B_ROW"]] == [each == "row" for each in layouts]
    assert (args["M"], args["N"], args["K"], args["MAIN_N"]) == (EVEN.m, EVEN.n, EVEN.k, main)
    assert (args["REGISTERS"], args["STAGES"]) == (REGISTERS[own["CONSUMERS"]], own.num_stages)
    assert step.options == {"num_warps": 4, "launch_pdl": True}


@pytest.mark.skipif(not HAS_PAIRS, reason="pairs are made with triton 3.7")
@pytest.mark.parametrize("layouts", [*itertools.product(("row", "column"), repeat=2)], ids=str)
def test_pair_tiles_share_b(layouts):
    """Rows of a and of the result are those of both CTAs; of b each box is one that both hold."""
    problem, own = replace(EVEN, a_layout=layouts[0], b_layout=layouts[1]), pair(128, 160, 2, 4, subtiles=2)
    (step,) = steps_of(problem, own)
    single = steps_of(problem, warpgroups(128, 160, 64, 2, 4, subtiles=2))[-1].args
    for name, is_high in (("a_desc", True), ("b_desc", False), ("b_rest_desc", False), ("out_desc", True)):
        block, alone = step.args[name].block, single[name].block
        twice = 3 if name == "a_desc" and layouts[0] == "column" else 2
        assert block == tuple(side * (1 + (is_high and dim == twice)) for dim, side in enumerate(alone)), name
        (basis,) = step.args[name].layout.cga_layout
        assert basis == [int(is_high and dim == twice) for dim in range(4)], name
    assert step.options == {"num_warps": 4, "launch_pdl": True, "num_ctas": 2}
    assert step.grid == (16 * 13, 1, 1)  # of pairs
    (step,) = steps_of(problem, changed(own, PERSISTENT=True))
    assert step.grid == (H200.processors // 2, 1, 1)


def test_copies_first_then_strides():
    steps = steps_of(replace(EVEN, n=1003, k=1003, a_align=2, out_align=2), OWN)
    assert [step.kernel.__name__ for step in steps] == ["repack", "matmul_warpgroups"]
    args = steps[-1].args
    assert (args["out_desc"], args["out_rest_desc"], args["BY_DESCRIPTOR"]) == (None, None, False)
    assert (args["stride_om"], args["stride_on"]) == (1003, 1)


def order_of(monkeypatch, step, tiles_m, tiles_n, batch):
    """(matrix, row, column) of tiles as they start, by the kernel's own functions."""
    grid = SimpleNamespace(
        tiles_m=tiles_m, tiles_n=tiles_n, tiles=tiles_m * tiles_n * batch, inner_batch=batch,
        flag_ptr=None, tail=None,
    )  # fmt: skip
    meta = SimpleNamespace(FLAT=step.args["FLAT"], GROUP_M=step.args["GROUP_M"], BATCHED=batch > 1)
    made = []
    for place in itertools.product(*map(range, step.grid[::-1])):
        language = SimpleNamespace(
            program_id=place[::-1].__getitem__, num_programs=step.grid.__getitem__, minimum=min
        )
        monkeypatch.setattr(kernel, "gl", language)
        for index in range(*kernel.tiles_of.fn(grid, meta)):
            outer, inner, row, column = kernel.tile_at.fn(index, grid, meta)
            made.append((outer * batch + inner, row, column))
    return made


@pytest.mark.parametrize(
    "size",
    [(1, 1, 1), (1, 257, 577), (1, 2000, 131), (1, 130, 5000), (3, 700, 900), (1, 5000, 6000), (5, 1, 9)],
    ids=str,
)
@pytest.mark.parametrize(("group", "persistent"), [*itertools.product((1, 8), (False, True))])
def test_tiles_once_down_bands(monkeypatch, size, group, persistent):
    own = changed(OWN, GROUP_M=group, PERSISTENT=persistent)
    (batch, m, n), step = size, steps_of(MatmulProblem(*size, 72, "float16", "float16"), own)[-1]
    rows, columns = -(-m // own["BLOCK_M"]), -(-n // own["BLOCK_N"])
    tiles, made = rows * columns * batch, order_of(monkeypatch, step, rows, columns, batch)
    assert len(made) == tiles
    assert set(made) == {*itertools.product(range(batch), range(rows), range(columns))}
    assert step.args["FLAT"] == (not persistent and (tiles <= H200.processors or group >= rows))
    if step.args["FLAT"]:
        assert step.grid == (rows, columns, batch)
    elif persistent:
        assert step.grid == (min(tiles, H200.processors), 1, 1)
    else:
        assert step.grid == (tiles, 1, 1)
        assert max(row for matrix, row, _ in made[: group * columns] if not matrix) < group


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1"])
def test_promoted_widths_of_triton(triton):
    device = replace(H200, triton=triton)
    parts = replace(EVEN, dtype="float32", out_dtype="float32", precision="fp16x3").core
    assert parts.promoted
    found = {each["BLOCK_N"] for each in legal_configs(parts, device, "warpgroups")}
    assert (found == {64, 96, 128, 192}) == (triton == "3.6.0")
    assert found >= {64, 96, 128, 192}
    assert 160 in {each["BLOCK_N"] for each in legal_configs(EVEN, device, "warpgroups")}


WIDE = [  # whether it may have gelu, and gelu beside a matrix, where tiles are stored by pointers
    (warpgroups(128, 192, 64, 2, 4, persistent=True), True, True),
    (warpgroups(64, 256, 64, 1, 4), True, False),
    (warpgroups(128, 256, 64, 2, 3, persistent=True, subtiles=2), True, False),
    (warpgroups(192, 128, 64, 3, 4, persistent=True), True, False),
    (warpgroups(256, 144, 64, 2, 3, persistent=True, subtiles=2), False, False),
]


@pytest.mark.parametrize(("config", "alone", "beside"), WIDE, ids=str)
def test_specialised_tiles_leave_room_for_gelu(config, alone, beside):
    """Stored by pointers it spills up to kilobytes beside more sums; other activations do not."""

    def legal(epilogue, n):
        why = illegal(
            config, replace(EVEN, m=300, n=n, epilogue=epilogue, out_align=16 if n % 8 == 0 else 8), H200
        )
        assert why is None or "accumulator registers a thread, above" in why
        return why is None

    for n in (300, 320):  # stored by pointers, and by descriptors
        assert legal("", n)
        assert legal("bias=row silu", n)
        assert legal("bias=row gelu_tanh", n)
        assert legal("bias=row gelu", n) is (alone or n == 320)
        for epilogue in ("bias=row residual=full gelu", "bias=full gelu"):
            assert legal(epilogue, n) is (beside or n == 320)
