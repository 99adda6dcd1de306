"""Linear layers to convert, and what layers of few bits should give."""

import torch
from torch import nn

from tests.reference import Sides, assert_fused, values
from tritile.nn import QuantizedLinear
from tritile.nn.float8 import _by_row


def layer_of(k=40, n=7, dtype=torch.bfloat16, bias=True, seed=0, device="cpu"):
    """torch's layer, with weights of both signs."""
    layer = nn.Linear(k, n, bias, device, dtype)
    with torch.no_grad():
        layer.weight.copy_(values((n, k), dtype, seed, device))
    return layer


def meant(layer):
    """The weight that a layer of few bits stands for, in float64."""
    if isinstance(layer, QuantizedLinear):
        return layer.weight.dequantize(torch.float64)
    return layer.weight.double() * layer.scale.double()


def assert_packed(layer, x):
    """What a call gives is the product with what the layer stands for, of x as the layer rounds it."""
    got, rows = layer(x), x.reshape(-1, x.shape[-1])
    assert got.dtype == x.dtype
    assert got.shape == (*x.shape[:-1], layer.out_features)
    flat = got.reshape(-1, layer.out_features)
    if isinstance(layer, QuantizedLinear):  # all of it by the exact weight, or by that rounded to x's type
        sides = Sides(bias=layer.bias)
        try:
            return assert_fused(flat, rows, meant(layer).t(), sides)
        except AssertionError:
            return assert_fused(flat, rows, layer.weight.dequantize().t(), sides)
    (a, of_a), (b, of_b) = _by_row(rows), (layer.weight, layer.scale)
    sides = Sides(of_a, of_b.t(), layer.bias, activation=layer.activation or "")
    return assert_fused(flat, a, b.t(), sides)
