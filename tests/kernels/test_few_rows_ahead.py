"""Products of few rows compiled for GPUs that are not here: they fit, and read the matrix in words."""

import re
import subprocess
from dataclasses import replace

import pytest
import triton

from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.families.few_rows.family import shared_bytes
from tritile.families.space import illegal
from tritile.planning import model
from tritile.runtime import ahead
from tritile.runtime.offline import compiling_for, resources

H200 = target_device("nvidia-h200")
EVEN = MatmulProblem(1, 2, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
ODD = replace(EVEN, n=4099, k=4099, a_align=2, b_align=2, out_align=2)
FP32 = replace(ODD, dtype="float32", out_dtype="float32", a_align=4, b_align=4, out_align=4)


def instructions(kernel, folder):
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(binary)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["sm_80", "nvidia-l40s", "nvidia-h200", "sm_100"])
@pytest.mark.parametrize("problem", [EVEN, FP32], ids=str)
def test_compiles_and_fits(name, problem):
    device = target_device(name)
    config = model.beside(problem, device)[0]
    assert ahead.compile_resources(problem, config, device).excess(device) is None


@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("problem", [EVEN, ODD, FP32], ids=str)
def test_no_config_spills_or_takes_more_shared_memory_than_told(m, problem):
    problem = replace(problem, m=m)
    for config in model.beside(problem, H200)[:2]:
        taken = ahead.compile_resources(problem, config, H200)
        assert taken.spills == 0
        assert taken.shared <= max(1024, shared_bytes(config, problem))  # 1024 to sum over threads


@pytest.mark.parametrize(("stages", "load"), [(4, "LDGSTS"), (1, "LDG")])
@pytest.mark.parametrize("problem", [EVEN, ODD], ids=str)
def test_the_matrix_is_read_in_words_wherever_its_rows_begin(problem, stages, load, tmp_path):
    config = Config.of(4, stages, "few_rows", BLOCK_M=2, BLOCK_N=16, BLOCK_K=512 if stages == 1 else 256)
    assert illegal(config, problem, H200) is None
    with compiling_for(H200):
        kernel = ahead.compiled_for(problem, config, H200)
    assert resources(kernel).spills == 0
    found = re.findall(rf"\b{load}\.[\w.]*128\b", instructions(kernel, tmp_path))
    # 4 or 8 words of the tile for each thread, of every stage before the loop and of one in it
    assert len(found) >= (8 if stages == 1 else 4 * stages)
