"""Kernels compiled ahead of time, for GPUs that are not here: they compile, fit, and use the tensor cores."""

import itertools
import math
import re
from dataclasses import replace

import pytest

from tests.ahead import (
    H200,
    NAMES,
    RAGGED,
    SQUARE,
    TURN,
    compiled,
    fits,
    groups,
    instructions,
    kernels_of,
    later,
)
from tests.configs import boxed, tile, tma, turned
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.core.problem import matmul as problems
from tritile.errors import TuningError
from tritile.families.common import warpgroups
from tritile.families.matmul_tile.family import shared_bytes
from tritile.families.space import illegal
from tritile.planning import model
from tritile.runtime import ahead

# Bytes by which the estimate may be above what is compiled, by alignment: loads of 2 bytes are not
# asynchronous, so that no stage of them is kept, and the estimate counts one for each all the same.
SLACK = {16: 0, 2: 8192}
ODD_TURN = PermuteProblem.turned(2, 1001, 1003, 16)
ODD_BYTES = PermuteProblem.turned(2, 1001, 1003, 1)
THIN_BYTES = PermuteProblem.turned(1, 3, 100001, 1)


MATMULS = [
    (SQUARE, tile(128, 128, 32, 8, 3)),
    (SQUARE, tile(64, 128, 64, 4, 2)),
    (RAGGED, tile(32, 64, 32, 4, 3)),
]
TRANSPOSES = [
    (TURN, turned(64, 64, 4)),
    (ODD_TURN, turned(16, 32, 4)),
    (TURN, turned(128, 64, 8, family="packed")),
    (ODD_BYTES, turned(64, 128, 8, family="packed")),
    (THIN_BYTES, boxed(64, 1, 8192)),
]
CASES = [
    pytest.param(name, problem, config, id=f"{name}-{problem.label}-{config}".replace(" ", "_"))
    for name in NAMES
    for problem, config in (*MATMULS, *TRANSPOSES)
    if name != "gfx942" or config.family != "box"  # which is NVIDIA's alone
]


@pytest.mark.parametrize(("name", "problem", "config"), CASES)
def test_compiles_and_fits(name, problem, config):
    device = target_device(name)
    assert illegal(config, problem, device) is None
    kernel = ahead.compiled_for(problem, config, device)
    taken = ahead.resources(kernel)
    assert kernel.metadata.target == device.target
    assert 0 < taken.registers <= 512
    assert taken.excess(device) is None
    if isinstance(problem, MatmulProblem):
        assert shared_bytes(config, problem, device) <= taken.shared + SLACK[problem.a_align]


@pytest.mark.parametrize("problem", [TURN, ODD_TURN], ids=lambda problem: problem.label)
def test_permutations_compile_as_they_run(problem):
    """Stand-ins for tensors all have one address, which does not make a call one in place."""
    kernel = compiled(problem, turned(16, 32))
    assert kernel.name == "permute_tile"


WIDE = [
    ((8, 8, 2**25), (1, 8, 64)),
    ((16, 8, 2**21, 8), (1, 128, 1024, 16)),
    ((2**21, 16, 4, 16), (1024, 1, 16, 64)),
]


@pytest.mark.parametrize(("shape", "x_strides"), WIDE, ids=str)
@pytest.mark.parametrize("family", ["tile", "packed"])
def test_runs_of_several_dimensions_compile_beyond_32_bits(shape, x_strides, family):
    out = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    problem, device = PermuteProblem.of(shape, x_strides, out, 1), target_device("nvidia-h200")
    assert max(len(run) for run in problem.plane[:2]) > 1
    assert max(problem.spans) >= 2**31
    config = turned(64, 64, family=family)
    if illegal(config, problem, device) is None:
        assert ahead.compile_resources(problem, config, device).excess(device) is None
    else:
        assert family == "packed"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", [SQUARE, TURN], ids=lambda problem: problem.op)
def test_the_models_pick_compiles_without_spills(name, problem):
    device = target_device(name)
    taken = ahead.compile_resources(problem, model.pick(problem, device), device)
    assert (taken.spills, taken.excess(device)) == (0, None)


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
def test_tensor_cores_and_asynchronous_copies_are_used(name, text, instruction):
    kernel = ahead.compiled_for(SQUARE, tile(128, 128, 32, 8, 3), target_device(name))
    assert instruction in kernel.asm[text]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_every_dtype_compiles_for_hopper(dtype):
    out = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}.get(dtype, dtype)
    problem = MatmulProblem(1, 513, 256, 320, dtype, out, precision="ieee")
    device = target_device("nvidia-h200")
    # Twice as deep fp64 spills with triton 3.8.
    taken = ahead.compile_resources(problem, tile(32, 32, 16 if dtype == "float64" else 32, 4, 2), device)
    assert taken.excess(device) is None


def test_tf32_compiles_for_hopper():
    problem = MatmulProblem(1, 512, 512, 512, "float32", "float32", precision="tf32")
    kernel = compiled(problem, tile(64, 64, 32))
    assert "wgmma" in kernel.asm["ptx"] or "mma.sync" in kernel.asm["ptx"]
    assert "tf32" in kernel.asm["ptx"]


@pytest.mark.parametrize(("size", "align", "wide"), [(1024, 16, True), (1000, 16, True), (1024, 2, False)])
def test_alignment_decides_the_width_of_loads(size, align, wide):
    """Rows that are a multiple of 8 elements apart are enough for 16 bytes."""
    problem = MatmulProblem(1, size, size, size, "float16", "float16", a_align=align, b_align=align)
    kernel = compiled(problem, tile(64, 64, 32))
    sixteen = "cp.async.cg.shared.global [ %" in kernel.asm["ptx"] and ", 0x10" in kernel.asm["ptx"]
    assert sixteen == wide


def test_a_refusal_is_one_short_error():
    problem = MatmulProblem(1, 64, 64, 64, "float8_e4m3fn", "bfloat16")
    with pytest.raises(TuningError, match="does not compile for NVIDIA A100") as caught:
        ahead.compiled_for(problem, tile(32, 32, 32, 4, 2), target_device("sm_80"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_driver_is_put_back():
    from triton.runtime.driver import driver

    before = driver._active
    ahead.compiled_for(TURN, turned(64, 64, 4), target_device("sm_80"))
    with pytest.raises(TuningError):
        ahead.compiled_for(
            MatmulProblem(1, 64, 64, 64, "float8_e5m2", "bfloat16", precision="ieee"),
            Config.of(family="tile", BLOCK_M=3, BLOCK_N=16, BLOCK_K=32, GROUP_M=1),
            target_device("sm_90"),
        )
    assert driver._active is before


@pytest.mark.parametrize("problem", [SQUARE, RAGGED], ids=str)
@pytest.mark.parametrize("target", ["nvidia-h200", "sm_100"])
@pytest.mark.parametrize(
    "config",
    [
        tma(128, 128, 64, 8, 3, persistent=True),
        tma(64, 64, 64, 4, 4, split=4),
        tma(16, 64, 128, 4, 4),
    ],
    ids=str,
)
def test_descriptor_kernels_compile_from_hopper_on(problem, target, config):
    device = target_device(target)
    kernel = compiled(problem, config, device)
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    assert "griddepcontrol.wait" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= device.shared_memory


@pytest.mark.parametrize(
    ("tile", "layouts"),
    [
        *itertools.product([(128, 128)], itertools.product(("row", "column"), repeat=2)),
        ((64, 256), ("row", "column")),
        *(later((64, 256), layouts) for layouts in (("row", "row"), ("column", "row"), ("column", "column"))),
    ],
    ids=str,
)
def test_products_of_tensor_cores_run_on_while_others_start(layouts, tile, tmp_path):
    """ptxas makes each wait for the one before where it does not see that all is well."""
    problem = replace(SQUARE, a_layout=layouts[0], b_layout=layouts[1])
    text = instructions(compiled(problem, tma(*tile, 64, 8, 4)), tmp_path)
    assert 1 <= text.count("WARPGROUP.ARRIVE") < text.count("HGMMA")


POINTED = replace(SQUARE, m=201, n=203, k=520, out_align=2)
NT, TN, TT = (
    replace(SQUARE, a_layout=a, b_layout=b)
    for a, b in (("row", "column"), ("column", "row"), ("column", "column"))
)
FULL, HALVED = (replace(SQUARE, epilogue=text) for text in ("bias=row residual=full gelu", "bias=full silu"))
SPECIALISED = [
    (SQUARE, groups(256, 144, 64, 2, 2, persistent=True, subtiles=2)),
    (RAGGED, groups(128, 128, 64, 2, 4, persistent=True)),
    (RAGGED, groups(192, 96, 64, 3, 3)),
    (SQUARE, groups(64, 64, 64, 1, 6)),
    later(SQUARE, groups(128, 128, 64, 2, 4, persistent=True)),
    later(SQUARE, groups(192, 96, 64, 3, 3)),
    later(RAGGED, groups(64, 64, 64, 1, 6)),
    later(RAGGED, groups(256, 144, 64, 2, 2, persistent=True, subtiles=2)),
    *(later(problem, groups(64, 16, 64, 1, 10)) for problem in (SQUARE, RAGGED)),
    *(later(problem, groups(192, 80, 64, 3, 4, persistent=True)) for problem in (SQUARE, RAGGED)),
]


@pytest.mark.parametrize(("problem", "config"), SPECIALISED, ids=str)
def test_specialised_products_compile_for_hopper(problem, config):
    """No spills, and as much shared memory as is estimated, or a little less."""
    kernel = compiled(problem, config)
    taken = ahead.resources(kernel)
    assert re.search(r"wgmma\.mma_async\S*?m64n\d+k16", kernel.asm["ptx"])
    assert (taken.spills, taken.excess(H200)) == (0, None)
    assert 0 <= warpgroups.shared_bytes(config, problem) - kernel.metadata.shared <= 1024


BY_ROWS = replace(SQUARE, dtype="float32", out_dtype="float32", b_layout="column")
ODD_ROWS = replace(BY_ROWS, batch=3, m=257, n=131, k=1003, a_align=4, b_align=4, out_align=4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", [BY_ROWS, ODD_ROWS], ids=str)
def test_fp32_products_that_copy_b_row_by_row_first(name, problem, monkeypatch):
    monkeypatch.setattr(problems, "_BY_ROWS_FROM", 1)
    device, config = target_device(name), tile(32, 64, 16)
    assert illegal(config, problem, device) is None
    kernels = kernels_of(problem, config, device)
    assert len(kernels) == 2
    assert all(fits(ahead.resources(kernel), device) for kernel in kernels)


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_older_gpus_have_the_tile_kernel_alone(target):
    assert model.families(SQUARE, target_device(target)) == ["tile"]
