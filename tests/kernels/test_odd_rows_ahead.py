"""Products by a matrix of odd rows compiled for GPUs that are not here: they fit, and read it in words."""

import re
import subprocess
from dataclasses import replace

import pytest
import triton

from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.families.odd_rows.family import NAME, shared_bytes
from tritile.families.space import legal_configs
from tritile.runtime import ahead
from tritile.runtime.offline import compiling_for, resources

H200 = target_device("nvidia-h200")
ODD = MatmulProblem(
    1, 64, 8191, 8191, "bfloat16", "bfloat16", b_layout="column", a_align=2, b_align=2, out_align=2
)


@pytest.mark.parametrize("name", ["sm_80", "nvidia-l40s", "sm_100"])
def test_compiles_and_fits(name):
    device = target_device(name)
    config = legal_configs(ODD, device, NAME)[0]
    assert ahead.compile_resources(ODD, config, device).excess(device) is None


@pytest.mark.parametrize("m", [9, 32, 64, 128])
def test_the_matrix_is_read_in_words_and_nothing_spills(m, tmp_path):
    problem = replace(ODD, m=m)
    for config in legal_configs(problem, H200, NAME):
        if config["SPLIT_K"] > 2:
            continue
        with compiling_for(H200):
            kernel = ahead.compiled_for(problem, config, H200)
        taken = resources(kernel)
        assert taken.spills == 0
        assert taken.shared <= shared_bytes(config, problem, H200)
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(binary)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        copies = re.findall(r"\bLDGSTS\.[\w.]*", text)
        assert copies
        assert all(".128" in copy for copy in copies)
