"""Layers that multiply by tritile, and `convert`, which makes those of a model such layers."""

from tritile.nn.convert import convert
from tritile.nn.float8 import Float8Linear
from tritile.nn.linear import Linear
from tritile.nn.quantized import QuantizedLinear

__all__ = ["Float8Linear", "Linear", "QuantizedLinear", "convert"]
