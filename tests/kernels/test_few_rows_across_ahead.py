"""Products of few rows by a matrix contiguous along N, compiled for GPUs that are not here."""

import itertools
import re
import subprocess
from dataclasses import replace

import pytest
import triton

from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.families.few_rows import across
from tritile.families.space import legal_configs
from tritile.planning import model
from tritile.runtime import ahead
from tritile.runtime.offline import compiling_for, resources

H200 = target_device("nvidia-h200")
EVEN = MatmulProblem(1, 2, 4096, 4096, "bfloat16", "bfloat16")
ODD = replace(EVEN, n=4099, k=4099, a_align=2, b_align=2, out_align=2)
FP32 = replace(ODD, dtype="float32", out_dtype="float32", a_align=4, b_align=4, out_align=4)


def instructions(kernel, folder):
    """Return the names of the kernel's instructions, with their flags."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(binary)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([\w.]+)", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["sm_80", "nvidia-l40s", "nvidia-h200", "sm_100"])
@pytest.mark.parametrize("problem", [EVEN, FP32], ids=str)
def test_compiles_and_fits(name, problem):
    device = target_device(name)
    config = model.beside(problem, device)[0]
    assert config.family == across.NAME
    assert ahead.compile_resources(problem, config, device).excess(device) is None


@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("problem", [EVEN, ODD, FP32], ids=str)
def test_no_config_spills(m, problem):
    for config in legal_configs(replace(problem, m=m), H200, across.NAME):
        assert ahead.compile_resources(replace(problem, m=m), config, H200).spills == 0, config


@pytest.mark.parametrize(("problem", "load"), [(EVEN, "LDG.E.128"), (ODD, "LDG.E.U16"), (FP32, "LDG.E")])
def test_w_is_read_as_wide_as_aligned_and_nothing_goes_through_shared_memory(problem, load, tmp_path):
    problem = replace(problem, m=1)
    for number, config in enumerate(legal_configs(problem, H200, across.NAME)[:3]):
        with compiling_for(H200):
            kernel = ahead.compiled_for(problem, config, H200)
        assert resources(kernel).spills == 0
        folder = tmp_path / str(number)
        folder.mkdir()
        found = instructions(kernel, folder)
        own, unroll, wide = across._shape(config, problem)
        assert found.count(load) >= unroll * own // wide
        ptx = kernel.asm["ptx"]  # in the order of the source: threads exchange sums alone
        assert "bar.sync" not in ptx[: ptx.rindex("ld.global")]


def test_no_more_programs_are_launched_than_registers_hold():
    """Programs that share K run at once."""
    for m, problem in itertools.product((1, 2, 4, 8), (EVEN, ODD, FP32)):
        problem = replace(problem, m=m, a_align=16 if m == 1 else problem.a_align)
        for config in legal_configs(problem, H200, across.NAME):
            taken, threads = ahead.compile_resources(problem, config, H200), 32 * config.num_warps
            held = 65536 // (threads * -(-taken.registers // 8) * 8)
            assert across.resident(config, problem, H200) <= held, (config, problem, taken)
