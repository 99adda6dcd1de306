"""Kernels compiled for GPUs that are not here: problems, what fits, and what they are compiled to."""

import subprocess

import pytest
import triton

from tests import configs
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import MatmulProblem
from tritile.core.versions import parsed
from tritile.families import launching
from tritile.families.space import illegal
from tritile.runtime.ahead import compiling_for

NAMES = ("sm_80", "nvidia-h200", "sm_100", "gfx942")
H200 = target_device("nvidia-h200")
SQUARE = MatmulProblem(1, 4096, 4096, 4096, "float16", "float16")
RAGGED = MatmulProblem(3, 1001, 1003, 997, "float16", "float32", a_layout="column", a_align=2, b_align=2)
TURN = PermuteProblem.transposed(1, 4096, 4096, 2)
# Bytes a thread that the assemblers of some versions keep out of registers, where the others spill nothing.
SPILLED = {(3, 6): 112, (3, 8): 112}.get(parsed(triton.__version__), 0)
# Families were fitted on the Triton of the shipped tables: others need other registers and instructions.
IS_FITTED = parsed(triton.__version__) == (3, 7)
fitted = pytest.mark.skipif(not IS_FITTED, reason="registers and instructions of Triton 3.7")
groups = configs.warpgroups


def fits(found, device):
    """Whether a GPU has what a kernel takes, spills within what this Triton's assembler may."""
    return found.shared <= device.shared_memory and found.spills <= SPILLED


def later(*case):
    """A case of which others cover each value: `make test-stacks` compiles it, `make test` does not."""
    return pytest.param(*case, marks=pytest.mark.stacks)


def pairs(first, second):
    """Every pair: `make test` compiles as many of them as have each value once, `make test-stacks` all."""
    return [
        (a, b) if j % len(first) == i or i % len(second) == j else later(a, b)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def compiled(problem, config, device=H200):
    """Compile the call's own kernel by a legal config."""
    assert illegal(config, problem, device) is None
    return launching.compiled_for(problem, config, device)


def kernels_of(problem, config, device=H200):
    """Compile all kernels of a call."""
    with compiling_for(device):
        return [compile_one() for compile_one in launching.compiles_for(problem, config, device)]


def instructions(kernel, folder):
    """Disassemble a kernel; `folder` is for its binary."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(binary)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
