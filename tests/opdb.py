"""Calls that torch's own tests make of its products (`op_db`), and tritile's answers, within their bounds."""

import pytest
import torch

import tritile
from tests.complexes import assert_complex
from tests.reference import Sides, assert_fused, assert_product

NAMES = ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "nn.functional.linear")


def samples(name: str, device: str, dtype: torch.dtype):
    """Samples of an operator of torch, all variants; skips where torch's own tests cannot be imported."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.name == name and op.variant_test_name in ("", "decomposed"):
            yield from op.sample_inputs(device, dtype)


def check(name: str, sample, dtype: torch.dtype, precision: str = "ieee") -> bool:
    """Whether tritile takes a sample; if so its answer is within the bound of a product."""
    tensors = (sample.input, *sample.args)
    if dtype.is_complex and name not in ("matmul", "mm", "bmm", "mv"):
        return False  # no epilogue has complex numbers
    if name in ("matmul", "mm", "bmm", "mv"):
        got = tritile.matmul(*tensors)
        if dtype.is_complex:
            assert_complex(got, *tensors, precision) if got.numel() else None
        else:
            assert_product(got, *tensors, precision)
    elif name == "nn.functional.linear":
        x, weight, *bias = tensors
        got = tritile.linear(x, weight, *bias, **sample.kwargs)
        assert_fused(got, x, weight.mT, Sides(bias=(bias or [sample.kwargs.get("bias")])[0]), precision)
    else:
        added, a, b = tensors
        got = getattr(tritile, name)(added, a, b, **sample.kwargs)
        assert_fused(got, a, b, Sides(bias=added, **sample.kwargs), precision)
    return True
