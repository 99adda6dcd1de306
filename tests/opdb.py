"""Calls that torch's own tests make of its products (`op_db`), and tritile's answers, within their bounds."""

import pytest
import torch

import tritile
from tests.reference import Sides, assert_fused, assert_product

PLAIN = ("matmul", "mm", "bmm", "mv")
NAMES = (*PLAIN, "addmm", "baddbmm", "nn.functional.linear")
NAMED = {"mv": "matmul"}  # what is called otherwise here


def samples(name: str, device: str, dtype: torch.dtype):
    """Samples of an operator of torch, all variants; skips where torch's own tests cannot be imported."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.name == name and op.variant_test_name in ("", "decomposed"):
            yield from op.sample_inputs(device, dtype)


def check(name: str, sample, dtype: torch.dtype, precision: str = "ieee") -> None:
    """tritile's answer to a sample is within the bound of a product.

    Of complex numbers it is torch's own.
    """
    tensors, words = (sample.input, *sample.args), sample.kwargs
    if dtype.is_complex:
        ours = getattr(tritile, NAMED.get(name, name.rpartition(".")[2]))
        theirs = torch.nn.functional.linear if name.endswith("linear") else getattr(torch, name)
        with tritile.mode(backends="triton,aten"):
            got = ours(*tensors, **words)
        torch.testing.assert_close(got, theirs(*tensors, **words), rtol=0, atol=0)
        return
    if name in PLAIN:
        got = getattr(tritile, NAMED.get(name, name))(*tensors, **words)
        assert_product(got, *tensors, precision)
        return
    if name == "nn.functional.linear":
        x, weight, *bias = tensors
        got = tritile.linear(*tensors, **words)
        if weight.ndim == 1:  # as a matrix of one row
            weight, got = weight[None], got[..., None]
        a, b, sides = x, weight.mT, Sides(bias=(bias or [words.get("bias")])[0])
    else:
        added, a, b = tensors
        got = getattr(tritile, name)(*tensors, **words)
        sides = Sides(bias=added, **words)
    assert_fused(got, a, b, sides, precision)
