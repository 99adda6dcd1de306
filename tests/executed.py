"""Carry out described calls of products and permutations by torch, where they say that tensors lie."""

import torch

from tritile.core.call import MatmulCall, PermuteCall
from tritile.core.epilogue import SIDES, apply_epilogue


def executed(call, config=None):
    """Write the result of a described call, computed in 64 bits and rounded once."""
    if isinstance(call, PermuteCall):
        return permuted(call)
    assert isinstance(call, MatmulCall)
    assert not call.scales
    a, b, out = (seen(view, call.batch_shape) for view in (call.a, call.b, call.out))
    sides = [seen(call.sides[name], call.batch_shape) if name in call.sides else None for name in SIDES]
    a, b = a.double(), b.double()
    sums = a @ b
    up = None if call.up is None else a @ seen(call.up, call.batch_shape).double()
    out.copy_(apply_epilogue(sums, sides, call.activation, call.alpha, call.beta, up))
    return None


def seen(view, batch):
    """The matrices of a view, as a tensor."""
    memory, steps = raw(view.tensor), (*view.batch_strides, *view.strides)
    return memory.as_strided((*batch, *view.shape), steps, memory.storage_offset())


def raw(memory):
    """The numbers as they lie in memory, as a kernel reads them."""
    return torch._neg_view(memory) if memory.is_neg() else memory


def permuted(call):
    """Copy words, two of which make an element of 16 bytes, and invert the bits that the call says."""
    problem = call.problem
    lanes = 2 if problem.itemsize == 16 else 1

    def words(memory, strides):
        memory, steps = raw(memory.tensor), (*(lanes * step for step in strides), 1)
        return memory.as_strided((*problem.shape, lanes), steps, memory.storage_offset())

    x = words(call.x, problem.x_strides).clone()
    x[..., 0] ^= call.flip[0] if lanes == 2 else 0
    x[..., -1] ^= call.flip[1]
    words(call.out, problem.out_strides).copy_(x)
