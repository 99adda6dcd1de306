"""Derivatives of every operator, of first and second order, and batches of vmap: beside torch's own."""

import pytest
import torch
from torch.autograd import forward_ad, gradgradcheck

from tests.operators import DOUBLES, SAMPLES, Sample

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning")


# One of each formula.
FEW = [s for s in DOUBLES if s.label in ("vector by batch", "conjugated", "silu", "weights", "dims")]


def wanting(sample: Sample) -> tuple[torch.Tensor, ...]:
    """Its tensors, laid out as they are, of all of which gradients are wanted."""
    return tuple(tensor.detach().requires_grad_() for tensor in sample.tensors)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for rounding: sums of at most 12 terms of size 1, through at most four products in a row."""
    assert got.dtype == wanted.dtype
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, wanted, rtol=64 * eps, atol=256 * eps)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_gradients_are_those_of_torch(sample):
    ours, theirs = wanting(sample), wanting(sample)
    got, wanted = sample.call(*ours), sample.peer(*theirs)
    close(got, wanted.contiguous())
    seed = torch.randn_like(wanted)
    for mine, other in zip(
        torch.autograd.grad(got, ours, seed), torch.autograd.grad(wanted, theirs, seed), strict=True
    ):
        close(mine, other)


@pytest.mark.parametrize("sample", FEW, ids=lambda sample: sample.id)
def test_derivatives_of_second_order(sample):
    assert gradgradcheck(sample.call, wanting(sample), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_tangents_are_those_of_torch(sample):
    tangents = [torch.randn_like(tensor) for tensor in sample.tensors]

    def tangent(call):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, v) for t, v in zip(sample.tensors, tangents, strict=True)]
            return forward_ad.unpack_dual(call(*duals)).tangent

    close(tangent(sample.call), tangent(sample.peer).contiguous())


@pytest.mark.parametrize("sample", DOUBLES, ids=lambda sample: sample.id)
def test_vmap_over_any_argument_and_dimension(sample):
    for which in range(len(sample.tensors)):
        dims = [None] * len(sample.tensors)
        dims[which] = which % 2 - 1  # the last dimension, or the first
        check_vmap(sample, tuple(dims))
    check_vmap(sample, (1,) * len(sample.tensors))


def check_vmap(sample, dims):
    """Batches of 2, each with other numbers, against torch on each of them."""
    stacks = [
        tensor if dim is None else torch.stack([tensor, tensor.flip(0) + 1], min(dim, tensor.ndim))
        for tensor, dim in zip(sample.tensors, dims, strict=True)
    ]
    dims = tuple(dim if dim is None else min(dim, t.ndim - 1) for dim, t in zip(dims, stacks, strict=True))
    got = torch.vmap(sample.call, dims)(*stacks)
    each = [
        sample.peer(*(t if dim is None else t.select(dim, i) for t, dim in zip(stacks, dims, strict=True)))
        for i in range(2)
    ]
    close(got, torch.stack(each))
