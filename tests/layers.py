"""Linear layers to convert, and what layers of few bits should give."""

import torch
from torch import nn

from tests.packed import assert_linear
from tests.reference import values
from tritile.nn import convert

TOKENS = torch.tensor([[1, 4, 10], [0, 0, 7]])


class Net(nn.Module):
    """An embedding whose weight the head shares, a block of layers, and one layer under two names."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.embed = nn.Embedding(11, 8, dtype=dtype)
        self.up, self.down = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 8, bias=False, dtype=dtype)
        self.again = self.up
        self.head = nn.Linear(8, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))))


def layer_of(k=40, n=7, dtype=torch.bfloat16, bias=True, seed=0, device="cpu"):
    """torch's layer, with weights of both signs."""
    layer = nn.Linear(k, n, bias, device, dtype)
    with torch.no_grad():
        layer.weight.copy_(values((n, k), dtype, seed, device))
    return layer


def converted(model, kind, **how):
    """The model itself, each layer converted."""
    convert(model, kind, always=kind == "linear", **how)
    return model


def assert_packed(layer, x):
    """What a call gives is the product with the weight of few bits, exact or rounded to x's dtype."""
    got, rows = layer(x), x.reshape(-1, x.shape[-1])
    assert got.dtype == x.dtype
    assert got.shape == (*x.shape[:-1], layer.out_features)
    assert_linear(got.reshape(-1, layer.out_features), rows, layer.weight, layer.bias)
