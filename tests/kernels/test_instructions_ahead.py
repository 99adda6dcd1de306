"""Compiled kernels have the instructions which numerics say, load as wide as they may, and fuse alike."""

import re
from collections import Counter

import pytest

from tests.ahead import RAGGED, SQUARE, compiled, fits, groups
from tests.configs import HAS_PAIRS, numerics, pair, split
from tests.unit.test_invariant import (
    AMPERE,
    CONSUMER,
    FP8,
    FUSED,
    HALF,
    HOPPER,
    PACKED,
    TF32,
    of_type,
    replace,
    specialised,
    tile,
    tma,
)
from tritile.core.config import Config
from tritile.core.device import TARGETS, target_device
from tritile.core.problem import MatmulProblem
from tritile.families.launching import compiled_for
from tritile.families.space import illegal
from tritile.runtime.ahead import resources

BLACKWELL = TARGETS["sm_100"]
MATRIX = re.compile(r"wgmma\.mma_async\S*?m64n\d+(k\d+)|(tcgen05\.mma)\S*|mma\.sync\S*?(m\d+n\d+k\d+)")
SIZES = {"m": 70, "n": 520, "k": 1008}


def ptx_of(config, problem, device):
    problem = replace(problem, **SIZES, invariant=False)
    assert illegal(config, problem, device) is None
    return compiled_for(problem, config, device).asm["ptx"]


WARPGROUP = [
    (tile(64, 32, 64), HALF, HOPPER, "k16"),
    (tma(64, 64, 64, persistent=True), HALF, HOPPER, "k16"),
    (specialised(64, 96, 64, 1), HALF, HOPPER, "k16"),
    (tile(64, 64, 64), replace(HALF, b_layout="row", a_layout="column", a_align=2), HOPPER, "k16"),
    (tma(64, 64, 64), TF32, HOPPER, "k8"),
    (tile(64, 64, 32), replace(TF32, b_layout="row"), HOPPER, "k8"),
    (tile(64, 32, 128, warps=16, stages=2), replace(FP8, a_align=1, b_layout="row"), HOPPER, "k32"),
    (Config.of(4, 3, "tile", **FUSED, SPLIT_K=1), PACKED, HOPPER, "k16"),
    (tile(64, 64, 64), HALF, BLACKWELL, "tcgen05.mma"),
]
WARP = [
    (tile(32, 64, 64), HALF, HOPPER, "m16n8k16"),
    (tile(64, 64, 32, warps=2), HALF, HOPPER, "m16n8k16"),
    (tile(16, 16, 32), HALF, AMPERE, "m16n8k16"),
    (tile(64, 64, 64), HALF, CONSUMER, "m16n8k16"),
    (tile(128, 32, 128, warps=16, stages=2), FP8, BLACKWELL, "m16n8k16"),
]


@pytest.mark.parametrize(
    ("config", "problem", "device", "wanted", "kind"),
    [(*case, "warpgroup") for case in WARPGROUP] + [(*case, "warp") for case in WARP],
)
def test_instructions(config, problem, device, wanted, kind):
    assert numerics(config, problem, device).instruction == kind
    found = {next(filter(None, parts)) for parts in MATRIX.findall(ptx_of(config, problem, device))}
    assert found == {wanted}


def test_plain_fp32_has_no_matrix_instruction():
    problem = of_type("float32")
    assert numerics(tile(32, 32, 32), problem, HOPPER).instruction == "fma"
    assert not MATRIX.search(ptx_of(tile(32, 32, 32), problem, HOPPER))


# By how many elements of the result a thread has.
MADE = {tile(64, 64, 32): 32, tma(64, 64, 64): 32, tma(128, 64, 64): 64, specialised(64, 128, 64, 1): 64}


def arithmetic(config, epilogue):
    """How many operations of each kind there are for an element, but for those that several share."""
    ptx = ptx_of(config, of_type("bfloat16", epilogue=epilogue), HOPPER)
    found = Counter(re.findall(r"\b(fma|add|sub|div|ex2)(?:\.\w+)*\.f32\b", ptx))
    return {operation: count / MADE[config] for operation, count in found.items()}


@pytest.mark.parametrize(
    ("epilogue", "fused"),
    [
        ("bias=full weighted", 1),
        ("scale_a=column scale_b=row bias=row", 1),
        ("bias=row residual=full gelu_tanh", 1),
        ("residual=full silu", 0),
    ],
)
def test_the_same_multiplications_are_fused(epilogue, fused):
    found = [arithmetic(config, epilogue) for config in MADE]
    assert found == [found[0]] * len(MADE)
    assert found[0].get("fma", 0) == fused


@pytest.mark.parametrize("spread", ["full", "row"])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        *((config, "bfloat16") for config in MADE),
        (tile(32, 32, 32), "float32"),
        (tile(16, 64, 32), "float32"),
    ],
)
def test_alpha_is_fused_not_beta(config, dtype, spread):
    """What is added to one row differs by column alone: its bits are those of a full matrix's row."""
    ptx = ptx_of(config, of_type(dtype, epilogue=f"bias={spread} weighted"), HOPPER)
    parameters = dict(re.findall(r"ld\.param\.b32\s+(%r\d+), \[\w+_param_(\d+)\]", ptx))

    def factors(operation):
        pairs = re.findall(operation + r"\.f32\s+%r\d+, (%r\d+), (%r\d+)", ptx)
        return {int(parameters[name]) for pair in pairs for name in pair if name in parameters}

    (alpha,), (beta,) = factors(r"fma\.rn"), factors("mul")
    assert beta == alpha + 1  # in the order of the kernel's arguments


@pytest.mark.parametrize(
    ("name", "text", "instruction"),
    [
        ("sm_80", "ptx", "mma.sync"),
        ("sm_80", "ptx", "cp.async"),
        ("nvidia-h200", "ptx", "wgmma"),
        ("nvidia-h200", "ptx", "cp.async"),
        ("sm_100", "ptx", "tcgen05"),
        ("gfx942", "amdgcn", "v_mfma"),
    ],
)
def test_tensor_cores_and_async_copies(name, text, instruction):
    kernel = compiled_for(SQUARE, tile(128, 128, 32, 8, 3), target_device(name))
    assert instruction in kernel.asm[text]


def test_tf32_compiles_for_hopper():
    problem = MatmulProblem(1, 512, 512, 512, "float32", "float32", precision="tf32")
    ptx = compiled(problem, tile(64, 64, 32)).asm["ptx"]
    assert "wgmma" in ptx or "mma.sync" in ptx
    assert "tf32" in ptx


@pytest.mark.parametrize(("size", "align", "wide"), [(1024, 16, True), (1000, 16, True), (1024, 2, False)])
def test_alignment_decides_the_width_of_loads(size, align, wide):
    """Rows that are a multiple of 8 elements apart are enough for 16 bytes."""
    problem = MatmulProblem(1, size, size, size, "float16", "float16", a_align=align, b_align=align)
    kernel = compiled(problem, tile(64, 64, 32))
    sixteen = "cp.async.cg.shared.global [ %" in kernel.asm["ptx"] and ", 0x10" in kernel.asm["ptx"]
    assert sixteen == wide


ATOMICS, CLUSTERS = r"\batom\.", r"barrier\.cluster|multicast::cluster|\bmapa\."
OPTIONS = [
    (SQUARE, tile(64, 64, 64), set()),
    (SQUARE, tma(64, 64, 64), set()),
    (SQUARE, tma(128, 64, 64, persistent=True), set()),
    (SQUARE, tma(64, 64, 64, split=4), {ATOMICS}),
    (SQUARE, groups(128, 128, 64, 2, 4), set()),
    (RAGGED, groups(128, 128, 64, 2, 4, persistent=True), set()),
    (RAGGED, split(128, 128, 2, 4), {ATOMICS}),
    *([(SQUARE, pair(128, 192, 2, 4), {CLUSTERS})] * HAS_PAIRS),
]


@pytest.mark.parametrize(("problem", "config", "wanted"), OPTIONS, ids=str)
def test_options_off_leave_no_code(problem, config, wanted):
    """Counters are for programs that share K, clusters are for pairs, and nothing is spilled."""
    kernel = compiled(problem, config)
    assert {found for found in (ATOMICS, CLUSTERS) if re.search(found, kernel.asm["ptx"])} == wanted
    assert fits(resources(kernel), HOPPER)
