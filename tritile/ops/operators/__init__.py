"""Register tritile's operations with torch's dispatcher, compiler and transforms as `torch.ops.tritile`."""

from tritile.ops.operators import copies, groups, products, quantized

__all__ = ["copies", "groups", "products", "quantized"]
