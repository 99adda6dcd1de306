"""The tutorial's kernel, which tritile is measured against, in Triton's interpreter."""

import os

import pytest
import torch
import triton
from triton.compiler import ASTSource

from tests.reference import assert_product, values
from tritile.core.device import target_device
from tritile.lab.report import tutorial_baseline as tutorial
from tritile.runtime.interpreter import interpret

BLOCKS = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2}


def stored(tensor, letter):
    """Return the same matrices; for T, each is stored transposed."""
    return tensor if letter == "N" else tensor.mT.contiguous().mT


def check(batch, m, n, k, dtype=torch.float16, layout="NN", precision="ieee"):
    a = stored(values((batch, m, k), dtype), layout[0])
    b = stored(values((batch, k, n), dtype, 1), layout[1])
    out = torch.empty((batch, m, n), dtype=dtype)
    grid = tutorial.grid_of(batch, m, n)(BLOCKS)
    interpret(tutorial.tutorial_kernel, grid, tutorial.arguments(a, b, out, precision), BLOCKS)
    assert_product(out, a, b)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)  # bfloat16 it cannot multiply
def test_layouts_and_dtypes(dtype, layout):
    check(1, 67, 45, 37, dtype, layout)


@pytest.mark.parametrize("size", [(1, 1, 1), (7, 1, 100), (1, 33, 5), (64, 32, 48), (130, 17, 16)], ids=str)
def test_sizes(size):
    check(1, *size)


@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_batch(layout):
    check(3, 35, 21, 19, layout=layout)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32"])
def test_precisions(precision):
    check(1, 33, 21, 70, torch.float32, precision=precision)


def test_configs_are_different():
    assert len({str(config) for config in tutorial.CONFIGS}) == len(tutorial.CONFIGS) == 16
    assert len(tutorial.configs_for(2)) == 16
    assert len(tutorial.configs_for(4)) == 11


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"), reason="triton.jit interprets in this process"
)
def test_it_compiles_for_tensor_cores():
    numbers = ("M", "N", "K", "stride_ab", "stride_am", "stride_bb", "stride_bk", "stride_ob", "stride_om")
    pointers = ("a_ptr", "b_ptr", "out_ptr")
    kernel, config = tutorial.tutorial_kernel, tutorial.CONFIGS[0]
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict.fromkeys(pointers, "*bf16")
    signature |= dict.fromkeys(numbers, "i32")
    constants = {"stride_ak": 1, "stride_bn": 1, "stride_on": 1, "PRECISION": "ieee"} | config.kwargs
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = triton.compile(source, target=target_device("nvidia-h200").target, options=options)
    assert "wgmma" in made.asm["ptx"]
