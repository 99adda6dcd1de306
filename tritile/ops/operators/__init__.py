"""Operators of `torch.ops.tritile`: tritile's calls as its dispatcher, compiler and transforms see them."""

from tritile.ops.operators import copies, epilogues, groups, products, quantized

__all__ = ["copies", "epilogues", "groups", "products", "quantized"]
