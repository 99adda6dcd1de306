"""Weights of few bits, and what products with them should be."""

import torch

import tritile
from tests.reference import assert_product, values

KINDS = [(bits, group, zeros) for bits in (4, 8) for group in (32, 64, 128) for zeros in (False, True)]


def weight_of(n, k, dtype, bits=4, group=128, zeros=False, seed=1, device="cpu"):
    original = values((n, k), dtype, seed, device) + 0.25
    return tritile.quantize(original, bits=bits, group_size=group, zero_points=zeros)


def on_16_bytes(x):
    """The same values in rows that start on 16 bytes, with NaN between them, which descriptors need."""
    buffer = torch.empty(x.shape[0], -(-x.shape[1] // 8) * 8, dtype=x.dtype, device=x.device)
    buffer.fill_(float("nan"))[:, : x.shape[1]] = x
    return buffer[:, : x.shape[1]]


def assert_linear(out, x, weight, bias=None, exact=None):
    """x by what the numbers stand for, by the bound of `assert_product`: a bias is one more column of K.

    Configs that scale sums leave the weight exact, others round it to x's type; None: all of out by either.
    """
    if exact is None:
        try:
            return assert_linear(out, x, weight, bias, True)
        except AssertionError:
            return assert_linear(out, x, weight, bias, False)
    plain = weight.dequantize(torch.float64 if exact else None).double()
    if bias is not None:
        x = torch.cat([x.double(), torch.ones_like(x[..., :1], dtype=torch.float64)], -1)
        plain = torch.cat([plain, bias.double()[:, None]], -1)
    assert_product(out, x.float(), plain.t() if exact else plain.float().t())
    return None
