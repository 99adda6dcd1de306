"""Register tritile's operations with torch's dispatcher, compiler and transforms as `torch.ops.tritile`."""

from tritile.ops.operators import defined

__all__ = ["defined"]
