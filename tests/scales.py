"""Scales of quantised operands, and what products with them should be."""

import torch

from tests.reference import FP8, Sides, assert_within, finished64, sums64

NOTHING = Sides()


def scale(*shape, seed=9):
    """Positive scales between 1/32 and 1/2, that differ."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) * 0.45 + 1 / 32


def expanded(scales, rows, k, shared):
    """A scale for each element of a (rows, k), of scales for each `shared` rows and 128 of k."""
    return scales.repeat_interleave(shared, 0)[:rows].repeat_interleave(128, 1)[:, :k]


def assert_block_scaled(got, a, b, scale_a, scale_b, shared, sides=NOTHING, precision="ieee"):
    """In float64 of the scaled operands; beside a plain product's error, four steps for a block's scales."""
    (m, k), n = a.shape, b.shape[1]
    wide_a = a.double() * expanded(scale_a, m, k, shared[0])
    wide_b = b.double() * expanded(scale_b.mT, n, k, shared[1]).mT
    sums, error, eps = sums64(wide_a.float(), wide_b.float(), precision, got.is_cuda)
    sums = wide_a @ wide_b
    # On tensor cores sums of fp8 keep 13 bits within a block, in instructions of 32.
    in_block = 128 / 32 * 2.0**-13 if got.is_cuda and a.dtype in FP8 else 0.0
    error = error + (4 * eps + in_block) * (wide_a.abs() @ wide_b.abs())
    assert_within(got, *finished64(sums, error, sides, eps))


def blocks_of(m, n, k, shared):
    blocks = -(-k // 128)
    return scale(-(-m // shared[0]), blocks), scale(blocks, -(-n // shared[1]), seed=10)
