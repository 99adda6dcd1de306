"""Interpreted twins of kernels, and digests, follow what a kernel calls, wherever it is named."""

import torch
import triton
import triton.language as tl

from tests.unit import helpers_for_kernels as helpers
from tritile.interpreter import interpret
from tritile.source import source_hash


@triton.jit
def doubled(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, helpers.twice(tl.load(x_ptr + i, mask=i < n)), mask=i < n)


def closed_over(inner):
    @triton.jit
    def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(y_ptr + i, inner(tl.load(x_ptr + i, mask=i < n)), mask=i < n)

    return kernel


@triton.jit
def thrice(x):
    return x + x + x


def result(kernel):
    x, y = torch.arange(5.0), torch.zeros(5)
    interpret(kernel, (1,), (x, y, 5), {"BLOCK": 8})
    return y.tolist()


def test_a_helper_in_another_module():
    assert result(doubled) == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_a_helper_in_a_closure():
    assert result(closed_over(thrice)) == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert result(closed_over(helpers.twice)) == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_the_digest_follows_helpers(monkeypatch):
    assert source_hash(closed_over(thrice)) != source_hash(closed_over(helpers.twice))
    assert source_hash(closed_over(thrice)) == source_hash(closed_over(thrice))
    before = source_hash(doubled)
    monkeypatch.setattr(helpers, "twice", thrice)
    assert source_hash(doubled) != before


def test_the_library_is_left_as_it_was():
    owners = (tl, tl.core, tl.tensor)
    before = [dict(vars(owner)) for owner in owners]
    result(doubled)
    for owner, attributes in zip(owners, before, strict=True):
        assert dict(vars(owner)) == attributes
