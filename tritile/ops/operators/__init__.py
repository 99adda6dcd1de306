"""Register tritile's operations with torch's dispatcher, compiler and transforms as `torch.ops.tritile`."""

from tritile.ops.operators import copies, epilogues, groups, products, quantized

__all__ = ["copies", "epilogues", "groups", "products", "quantized"]
