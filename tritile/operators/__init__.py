"""Operators of `torch.ops.tritile`: tritile's calls as its dispatcher, compiler and transforms see them."""

from tritile.operators import products

__all__ = ["products"]
