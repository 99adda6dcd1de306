"""Run the public operations: check the arguments, allocate the output, launch the kernel.

Whoever imports one of them has all of them, and torch's dispatcher has them as torch.ops.tritile.
"""

from tritile.ops import grouped, operators, permute, plan, products, quantize

__all__ = ["grouped", "operators", "permute", "plan", "products", "quantize"]
