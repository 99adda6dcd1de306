"""The authors' kernels compiled ahead of time for GPUs that are not here: they fit, and do as they say."""

import pytest
import torch

from authors import SUBJECTS
from tritile.core.device import target_device
from tritile.runtime import ahead

INSTRUCTIONS = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "v_mfma"}
ROWS = {"ROWS": 2, "BLOCK": 1024, "num_warps": 4}
ATTENTION = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def compiled(name, target, shape, dtype=torch.bfloat16):
    """The kernel's code for inputs of this shape; tensors are told by their dtypes alone."""
    subject, device = SUBJECTS[name], target_device(target)
    given = subject.inputs(shape, dtype, "cpu")
    values = [v.dtype if isinstance(v, torch.Tensor) else v for v in given.values()]
    with ahead.compiling_for(device):
        kernel = subject.kernel.warmup(*values, grid=(1,), **(ATTENTION if name == "attention" else ROWS))
    assert (kernel.metadata.target, ahead.resources(kernel).excess(device)) == (device.target, None)
    return kernel.asm["amdgcn" if target == "gfx942" else "ptx"]


@pytest.mark.parametrize("target", INSTRUCTIONS)
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_rows_compile(name, target):
    compiled(name, target, (64, 1001))


@pytest.mark.parametrize("target", INSTRUCTIONS)
def test_attention_compiles_for_tensor_cores(target):
    assert INSTRUCTIONS[target] in compiled("attention", target, (2, 3, 333, 64, 1))


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("softmax", (64, 1001), torch.float32),
        ("layer_norm", (64, 1001), torch.float32),
        ("softmax", (1, 1), torch.float16),  # sizes of one, which Triton makes constants
        ("layer_norm", (1, 1), torch.float16),
        ("attention", (1, 1, 1, 64, 0), torch.float16),
        ("attention", (1, 1, 1, 64, 1), torch.float16),
        ("attention", (1, 2, 320, 128, 0), torch.bfloat16),
    ],
    ids=str,
)
def test_other_dtypes_and_sizes_compile(name, shape, dtype):
    compiled(name, "sm_90", shape, dtype)


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_aligned_rows_read_16_bytes(name):
    text = compiled(name, "sm_90", (64, 1024))
    assert "ld.global.v4.b32" in text or "ld.global.L1::evict_last.v4.b32" in text
