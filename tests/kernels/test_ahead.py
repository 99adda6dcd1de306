"""Kernels compiled ahead of time, for GPUs that are not here: they compile, fit, and use the tensor cores.

What only one family does is in files of its own.
"""

import itertools
import math
import re
from dataclasses import replace

import pytest

from tests.ahead import (
    H200,
    IS_FITTED,
    NAMES,
    RAGGED,
    SQUARE,
    TURN,
    fits,
    groups,
    kernels_of,
    later,
    pairs,
)
from tests.configs import HAS_PAIRS, boxed, of_groups, packed_weights, pair, split, tile, tma, turned
from tritile.choose import waves
from tritile.core import problem as problems
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.errors import TuningError, UnsupportedError
from tritile.families import launching
from tritile.families.grouped.family import unreachable
from tritile.families.matmul_tile.family import shared_bytes
from tritile.families.matmul_tma.family import shared_bytes as tma_bytes
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.space import illegal, legal_configs
from tritile.runtime import ahead
from tritile.runtime.ahead import resources

# Bytes by which the estimate may be above what is compiled, by alignment: loads of 2 bytes are not
# asynchronous, so that no stage of them is kept, and the estimate counts one for each all the same.
SLACK = {16: 0, 2: 8192}
HOPPER, FROM_HOPPER = ("nvidia-h200",), ("nvidia-h200", "sm_100")

# Products, and what is fused into them.
PLAIN = MatmulProblem(1, 4096, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
ODD = MatmulProblem(3, 1001, 1003, 997, "float16", "float32", a_align=2, b_align=2, out_align=4)
DOUBLE, SINGLE = (replace(PLAIN, dtype=dtype, out_dtype=dtype) for dtype in ("float64", "float32"))
FP8 = MatmulProblem(1, 2048, 2048, 2048, "float8_e4m3fn", "bfloat16", b_layout="column")
INT8 = replace(FP8, dtype="int8")
EPILOGUES = ("bias=row gelu", "bias=row residual=full silu", "bias=full residual=column weighted gelu_tanh")
SCALED, READS = "scale_a=column scale_b=row bias=row relu", "bias=row residual=full gelu"
GATED = ("gated silu", "bias=row bias_up=row gated gelu")
OUTS = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
TYPED = [
    (MatmulProblem(1, 513, 256, 320, dtype, OUTS.get(dtype, dtype), precision="ieee"),
     tile(32, 32, 16 if dtype == "float64" else 32, 4, 2))  # twice as deep fp64 spills with triton 3.8
    for dtype in ("float64", "int8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32")
]  # fmt: skip
TYPED[4:] = itertools.starmap(later, TYPED[4:])  # which others multiply as well
BY_DESCRIPTOR = (
    tma(128, 128, 64, 8, 3, persistent=True, subtiles=2),
    tma(64, 64, 64, 4, 4, split=4),
    tma(16, 64, 128, 4, 4),
)
BY_WARPGROUPS = (groups(128, 128, 64, 2, 4, persistent=True, subtiles=2), groups(192, 96, 64, 3, 3))
ADDED = replace(PLAIN, m=300, n=300, out_align=8, epilogue=READS)
WIDEST = [  # that read a matrix beside gelu
    (ADDED, groups(128, 192, 64, 2, 4, persistent=True)),
    later(replace(ADDED, n=320, out_align=16), groups(128, 256, 64, 2, 3, persistent=True, subtiles=2)),
    later(ADDED, groups(64, 192, 64, 1, 6)),
]
SPECIALISED = [
    (SQUARE, groups(256, 144, 64, 2, 2, persistent=True, subtiles=2)),
    (RAGGED, groups(128, 128, 64, 2, 4, persistent=True)),
    (RAGGED, groups(192, 96, 64, 3, 3)),
    later(SQUARE, groups(64, 64, 64, 1, 6)),
    later(SQUARE, groups(128, 128, 64, 2, 4, persistent=True)),
    later(SQUARE, groups(192, 96, 64, 3, 3)),
    later(RAGGED, groups(64, 64, 64, 1, 6)),
    (RAGGED, split(128, 128, 2, 4)),
    later(SQUARE, split(256, 160, 2, 3, subtiles=2)),
    later(ADDED, split(64, 192, 1, 6)),
    later(RAGGED, groups(256, 144, 64, 2, 2, persistent=True, subtiles=2)),
    *(later(problem, groups(64, 16, 64, 1, 10)) for problem in (SQUARE, RAGGED)),
    *(later(problem, groups(192, 80, 64, 3, 4, persistent=True)) for problem in (SQUARE, RAGGED)),
]
if HAS_PAIRS:
    SPECIALISED += [
        (SQUARE, pair(192, 128, 3, 4, persistent=True, subtiles=2)),
        (RAGGED, pair(128, 160, 2, 3)),
        later(SQUARE, pair(256, 160, 2, 3, subtiles=2)),
        later(ADDED, pair(128, 144, 2, 4)),
    ]
# Permutations, groups and packed weights.
ODD_BYTES, THIN_BYTES = (
    PermuteProblem.transposed(2, 1001, 1003, 1),
    PermuteProblem.transposed(1, 3, 100001, 1),
)
OF_SEVERAL = PermuteProblem.of((2, 10, 3424569, 3), (30, 3, 60, 1), (3 * 10 * 3424569, 3 * 3424569, 3, 1), 1)
TURNED = [
    (TURN, turned(64, 64, 4)),
    (PermuteProblem.transposed(2, 1001, 1003, 16), turned(16, 32, 4)),
]
BOXED = [  # whole words; words that begin in a box and end beyond it; ends of pieces, each by itself
    (TURN, boxed(8192, 64, 16)),
    (ODD_BYTES, boxed(8192, 64, 4)),
    (THIN_BYTES, boxed(8192, 64, 4, 8)),
    (OF_SEVERAL, boxed(4096, 64, 4)),
]
ROWS = GroupedProblem(64, 16384, 2048, 4096, "bfloat16", "bfloat16", b_layout="column")
GROUPED = (
    ROWS,
    replace(ROWS, b_layout="row", out_layout="column"),
    replace(ROWS, a_layout="column"),
    replace(ROWS, dtype="float32", out_dtype="float32", precision="tf32", groups=1000),
    replace(ROWS, n=1001, k=1003, out_align=2, a_align=2, b_align=2),
    replace(ROWS, dtype="float32", out_dtype="float32"),
)


def by_descriptor():
    """Groups, of the likeliest tile and of one that is not persistent."""
    for problem in GROUPED[:5]:
        if unreachable(problem) is None:
            m, k, warps, stages = (64, 32, 4, 3) if problem.dtype == "float32" else (128, 64, 8, 3)
            yield problem, of_groups(m, 128, k, warps, stages)
            yield later(problem, of_groups(64, 128, k, 4, 3 if k == 32 else 4, persistent=False))


def packed(name):
    """Every kind of packed weight, of many rows and of few."""
    wide = packed_weights(64, 64, 128, 4, 2) if name == "gfx942" else packed_weights(128, 128, 128, 8, 2)
    for bits, dtype, zeros in itertools.product((4, 8), ("bfloat16", "float16"), (False, True)):
        one, config = QuantizedProblem(1021, 4096, 4096, dtype, bits, 32, zeros, bias=True), wide
        if zeros != (bits == 4):
            one, config = (
                QuantizedProblem(13, 4096, 4096, dtype, bits, 128, zeros),
                packed_weights(16, 64, 128, 4, 4, split=2),
            )
        yield (name, one, config) if (bits == 4) == (dtype == "bfloat16") else later(name, one, config)


def fused(names, products, epilogues):
    """Cases of (problem, config) with epilogues on GPUs, as `pairs` makes them."""
    for each in pairs(products, epilogues):
        (problem, config), epilogue = getattr(each, "values", each)
        given = replace(problem, epilogue=epilogue), config
        yield from on(names, pytest.param(*given, marks=getattr(each, "marks", ())))


def scaled(problem, config):
    return replace(problem, epilogue=SCALED), config


def on(names, *cases):
    """Cases of (problem, config) on GPUs; one that is for later stays so."""
    for name in names:
        for case in cases:
            yield pytest.param(name, *getattr(case, "values", case), marks=getattr(case, "marks", ()))


def on_plain(*configs):
    return [(PLAIN, config) for config in configs]


def skinny_k(problem, device):
    return waves.with_margins(problem, device)[0]


def odd_rows(problem, device):
    return legal_configs(problem, device, "odd_rows")[0]


PICKED = waves.pick
FEW = MatmulProblem(1, 2, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
FEW_OF_FP32 = replace(
    FEW, n=4099, k=4099, dtype="float32", out_dtype="float32", a_align=4, b_align=4, out_align=4
)
ODD_ROWS = replace(FEW, m=64, n=8191, k=8191, a_align=2, b_align=2, out_align=2)
OF_FEW = [(replace(each, b_layout=b), skinny_k) for each in (FEW, FEW_OF_FP32) for b in ("column", "row")]
PACKED = [QuantizedProblem(m, 4096, 4096, "bfloat16", 4, 128) for m in (1, 64, 4096, 16, 256)]
PACKED += [QuantizedProblem(m, 4096, 4096, "bfloat16", 8, 128, True) for m in (16, 256, 1, 64, 4096)]
CASES = [
    *on(NAMES, (SQUARE, tile(128, 128, 32, 8, 3)), later(SQUARE, tile(64, 128, 64, 4, 2))),
    *on(NAMES, (RAGGED, tile(32, 64, 32, 4, 3)), *TURNED),
    *on(NAMES[:3], *BOXED),  # boxes are NVIDIA's alone
    *on(HOPPER, *TYPED),
    *on(NAMES, (SQUARE, PICKED), (TURN, PICKED), (ROWS, PICKED), (GROUPED[4], PICKED)),
    *on(NAMES, (replace(PLAIN, epilogue=EPILOGUES[1]), PICKED), (replace(PLAIN, epilogue=GATED[0]), PICKED)),
    *(later(name, replace(PLAIN, epilogue=EPILOGUES[0]), PICKED) for name in NAMES),
    *fused(NAMES, [(PLAIN, tile(128, 64, 32, 8, 3)), (ODD, tile(32, 64, 32, 4, 3))], EPILOGUES),
    *fused(NAMES, [(DOUBLE, tile(32, 32, 16, 4, 2))], ["bias=full weighted gelu"]),
    *fused(FROM_HOPPER, on_plain(*BY_DESCRIPTOR), EPILOGUES),
    *fused(HOPPER, [(ODD, tma(64, 64, 64, 4, 4, persistent=True))], EPILOGUES[1:2]),  # no descriptor stores
    *fused(HOPPER, on_plain(*BY_WARPGROUPS), EPILOGUES),
    *fused(NAMES, [(PLAIN, tile(64, 64, 32, 8, 3)), (ODD, tile(32, 32, 32, 4, 3))], GATED),
    *fused(HOPPER, [(SINGLE, tile(32, 32, 16, 4, 2)), (DOUBLE, tile(32, 32, 16, 4, 2))], GATED[1:]),
    *fused(FROM_HOPPER, on_plain(BY_DESCRIPTOR[0], tma(64, 64, 64, 4, 4), BY_DESCRIPTOR[2]), GATED),
    *on(("sm_80", "gfx942"), scaled(INT8, tile(64, 64, 64, 4, 3))),
    *fused(FROM_HOPPER, [(FP8, tile(64, 64, 64, 4, 3))], [SCALED]),
    *fused(FROM_HOPPER, [(INT8, tma(64, 128, 128, 4, 3, persistent=True))], [SCALED]),
    *fused(FROM_HOPPER, [(replace(FP8, b_dtype="float8_e5m2"), tma(64, 64, 128, 4, 3, split=4))], [SCALED]),
    *on(FROM_HOPPER, *pairs((SQUARE, RAGGED), BY_DESCRIPTOR)),
    *on(HOPPER, *WIDEST, *SPECIALISED),
    *on(NAMES, *((problem, tile(64, 64, 32, stages=2)) for problem in GROUPED[1::2])),
    *on(NAMES, *(later(problem, tile(64, 64, 32, stages=2)) for problem in GROUPED[::2])),
    *on(FROM_HOPPER, *by_descriptor()),
    *(case for name in NAMES for case in packed(name)),
    *on(HOPPER, *((problem, PICKED) for problem in (*PACKED[:2], PACKED[5]))),
    *(later("nvidia-h200", problem, PICKED) for problem in (*PACKED[2:5], *PACKED[6:])),
    *on(NAMES[:3], *OF_FEW, (ODD_ROWS, odd_rows)),
    *(later("nvidia-l40s", *case) for case in (*OF_FEW, (ODD_ROWS, odd_rows))),
]


def label(value):
    return value.__name__ if callable(value) else str(getattr(value, "label", value)).replace(" ", "_")


@pytest.mark.parametrize(("name", "problem", "config"), CASES, ids=label)
def test_compiles_and_fits(name, problem, config):
    device = target_device(name)
    fixed = isinstance(config, Config)
    config = config if fixed else config(problem, device)
    assert illegal(config, problem, device) is None
    kernel = launching.compiled_for(problem, config, device)
    taken = ahead.resources(kernel)
    assert kernel.metadata.target == device.target
    assert 0 < taken.registers <= 512
    assert taken.shared <= device.shared_memory
    # Packed weights may spill where the model does not pick a config.
    may_spill = not IS_FITTED or (fixed and isinstance(problem, QuantizedProblem))
    assert taken.excess(device) is None or may_spill
    if problem in (SQUARE, RAGGED) and config.family == "tile":
        assert shared_bytes(config, problem, device) <= taken.shared + SLACK[problem.a_align]
    elif config.family == "warpgroups":
        assert re.search(r"wgmma\.mma_async\S*?m64n\d+k16", kernel.asm["ptx"])
        beside = 1024 if config.num_ctas == 2 else 0  # barriers in PTX
        assert 0 <= warpgroups.shared_bytes(config, problem) - beside - kernel.metadata.shared <= 1024
        assert ("multicast::cluster" in kernel.asm["ptx"]) == (config.num_ctas == 2)
    elif config.family == "descriptor":
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
        assert "griddepcontrol.wait" in kernel.asm["ptx"]
    if problem.op == "grouped" and config.family == "descriptor":
        assert tma_bytes(config, problem) <= taken.shared
        stored = ".global.shared::cta" in kernel.asm["ptx"]
        assert stored == (problem.out_layout == "row" and problem.out_align == 16)


WIDE = [
    ((8, 8, 2**25), (1, 8, 64)),
    ((16, 8, 2**21, 8), (1, 128, 1024, 16)),
    ((2**21, 16, 4, 16), (1024, 1, 16, 64)),
]


@pytest.mark.parametrize(("shape", "x_strides"), WIDE, ids=str)
@pytest.mark.parametrize("config", [turned(64, 64), boxed(8192, 64, 4)], ids=lambda config: config.family)
def test_runs_beyond_32_bits(shape, x_strides, config):
    out = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    problem, device = PermuteProblem.of(shape, x_strides, out, 1), target_device("nvidia-h200")
    assert max(len(run) for run in problem.plane[:2]) > 1
    assert max(problem.spans) >= 2**31
    assert illegal(config, problem, device) is None
    assert resources(launching.compiled_for(problem, config, device)).excess(device) is None


def test_a_refusal_is_one_short_error():
    problem = MatmulProblem(1, 64, 64, 64, "float8_e4m3fn", "bfloat16")
    with pytest.raises(TuningError, match="does not compile for NVIDIA A100") as caught:
        launching.compiled_for(problem, tile(32, 32, 32, 4, 2), target_device("sm_80"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_driver_is_put_back():
    from triton.runtime.driver import driver

    before = driver._active
    launching.compiled_for(TURN, turned(64, 64, 4), target_device("sm_80"))
    with pytest.raises(TuningError):
        launching.compiled_for(
            MatmulProblem(1, 64, 64, 64, "float8_e5m2", "bfloat16", precision="ieee"),
            Config.of(family="tile", BLOCK_M=3, BLOCK_N=16, BLOCK_K=32, GROUP_M=1),
            target_device("sm_90"),
        )
    assert driver._active is before


def test_gated_operands_are_copied():
    problem = replace(ODD, epilogue=GATED[1])
    kernels = kernels_of(problem, tma(64, 64, 64, 4, 4, persistent=True))
    assert [kernel.name for kernel in kernels] == ["repack", "repack", "gated_descriptor"]


def test_gated_tiles_alone():
    """Neither split-K nor warpgroups make gated tiles."""
    problem, device = replace(PLAIN, epilogue=GATED[0]), target_device("nvidia-h200")
    assert "SPLIT_K must be 1" in illegal(tma(64, 64, 64, 4, 4, split=4), problem, device)
    assert "tile and descriptor" in illegal(BY_WARPGROUPS[0], problem, device)
    assert illegal(tma(128, 256, 64, 8, 3, persistent=True, subtiles=2), problem, device).startswith(
        "256 accumulator registers"
    )
    assert waves.families(problem, device) == ["tile", "descriptor"]
    plain, gated = (
        resources(launching.compiled_for(p, tma(64, 64, 64, 4, 4), device)) for p in (PLAIN, problem)
    )
    assert gated.shared == plain.shared * 3 // 2 or gated.shared > plain.shared + 4 * 64 * 64 * 2 - 1024


BY_ROWS = replace(SQUARE, dtype="float32", out_dtype="float32", b_layout="column")
ODD_BY_ROWS = replace(BY_ROWS, batch=3, m=257, n=131, k=1003, a_align=4, b_align=4, out_align=4)


PARTS = MatmulProblem(1, 4096, 4096, 4096, "float32", "float32", precision="fp16x3")
RAGGED_PARTS = MatmulProblem(
    3, 1001, 1003, 9973, "float32", "float32", "column", "column", a_align=4, b_align=4, out_align=4,
    precision="fp16x3", epilogue="bias=row gelu",
)  # fmt: skip
ALONG = replace(PARTS, b_layout="column")
LONG = replace(PARTS, m=512, n=512, k=20000, a_layout="strided", b_layout="strided")
LOWERED = [
    *on(NAMES, (BY_ROWS, tile(32, 64, 16)), (ODD_BY_ROWS, tile(32, 64, 16))),
    ("sm_80", PARTS, tile(128, 64, 32, 8, 3)),
    *on(HOPPER, (RAGGED_PARTS, PICKED), later(LONG, PICKED), later(ALONG, PICKED)),
    ("sm_100", RAGGED_PARTS, PICKED),
]


@pytest.mark.parametrize(("name", "problem", "config"), LOWERED, ids=label)
def test_lowered_launches_fit(name, problem, config, monkeypatch):
    monkeypatch.setattr(problems, "_BY_ROWS_FROM", 1)
    device = target_device(name)
    config = config if isinstance(config, Config) else config(problem, device)
    assert illegal(config, problem, device) is None
    kernels = kernels_of(problem, config, device)
    assert all(fits(ahead.resources(kernel), device) for kernel in kernels)
    if problem.precision == "fp16x3":
        before = ["reset" if problem is ALONG else "find_peaks", "split", "matmul_tile"]
        assert [kernel.name for kernel in kernels] == [*before, f"matmul_{config.family}"]
    else:
        assert len(kernels) == 2


def test_core_of_fp16x3_product():
    core = RAGGED_PARTS.core
    assert (core.dtype, core.k, core.a_align, core.b_align) == ("float16", 3 * 9984, 16, 16)
    layouts = core.a_layout, core.b_layout, LONG.core.a_layout, LONG.core.b_layout
    assert layouts == ("column", "column", "row", "column")
    assert str(core.epilogue) == "scale_a=column scale_b=row bias=row gelu"
    assert core.core == core
    half = replace(PARTS, dtype="float16", precision="ieee")
    for config in (groups(128, 256, 64, 2, 3, persistent=True, subtiles=2), tma(128, 256, 64, 8, 3)):
        assert illegal(config, half, H200) is None
        fault = illegal(config, PARTS, H200)
        assert "registers" in fault or "with Triton 3.6" in fault  # totals count, too
    assert "a sum of 64 is precise" in illegal(tma(64, 64, 128, 4, 3), PARTS, H200)
    with pytest.raises(UnsupportedError, match="compute capability 8"):
        legal_configs(PARTS, target_device("gfx942"))


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_older_gpus_tile_only(target):
    assert waves.families(SQUARE, target_device(target)) == ["tile"]
