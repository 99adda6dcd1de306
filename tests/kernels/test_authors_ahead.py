"""The authors' kernels compiled ahead of time for GPUs that are not here: they fit, and do as they say."""

import pytest
import torch

from authors import SUBJECTS
from tritile.core.device import target_device
from tritile.runtime import ahead

NAMES = ("sm_80", "sm_90", "sm_100", "gfx942")
ROWS = {"ROWS": 2, "BLOCK": 1024, "num_warps": 4}
ATTENTION = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}


def compiled(name, target, shape, dtype, options):
    """The kernel for inputs of this shape and dtype; tensors are told by their dtypes alone."""
    subject, device = SUBJECTS[name], target_device(target)
    given = subject.inputs(shape, dtype, "cpu")
    values = [v.dtype if isinstance(v, torch.Tensor) else v for v in given.values()]
    with ahead.compiling_for(device):
        kernel = subject.kernel.warmup(*values, grid=(1,), **options)
    taken = ahead.resources(kernel)
    assert (kernel.metadata.target, taken.excess(device)) == (device.target, None)
    return kernel


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_rows_compile(name, dtype, target):
    compiled(name, target, (64, 1001), dtype, ROWS)


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("shape", [(1, 2, 320, 128, 0), (2, 3, 333, 64, 1)], ids=str)
def test_attention_compiles_for_tensor_cores(shape, target):
    kernel = compiled("attention", target, shape, torch.bfloat16, ATTENTION)
    instruction = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "v_mfma"}[target]
    assert instruction in kernel.asm["amdgcn" if target == "gfx942" else "ptx"]


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("softmax", (1, 1), ROWS),
        ("layer_norm", (1, 1), ROWS),
        ("attention", (1, 1, 1, 64, 0), ATTENTION),
        ("attention", (1, 1, 1, 64, 1), ATTENTION),
    ],
    ids=str,
)
def test_sizes_of_one_which_triton_makes_constants(name, shape, options):
    compiled(name, "sm_90", shape, torch.float16, options)


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_aligned_rows_are_read_16_bytes_at_a_time(name):
    text = compiled(name, "sm_90", (64, 1024), torch.bfloat16, ROWS).asm["ptx"]
    assert "ld.global.v4.b32" in text or "ld.global.L1::evict_last.v4.b32" in text
