"""Reduce calls to what kernels take: matrices with strides, or an index space with two sets of them."""

from collections.abc import Callable
from typing import Any, Final

from tritile.core.pointer import Pointer
from tritile.core.problem import Tiled
from tritile.core.views.grouped import GroupedCall, Scales, posed_groups
from tritile.core.views.permutes import PermuteCall, posed_permute
from tritile.core.views.products import (
    UNFUSED,
    BlockScales,
    Fused,
    Make,
    MatmulCall,
    Placed,
    Verdict,
    View,
    posed_product,
    spread,
)
from tritile.core.views.quantized import QuantizedCall, posed_quantized

__all__ = [
    "UNFUSED", "BlockScales", "Call", "Fused", "GroupedCall", "Make", "MatmulCall", "PermuteCall", "Placed",
    "QuantizedCall", "Scales", "Verdict", "View", "posed", "spread",
]  # fmt: skip

Call = MatmulCall | GroupedCall | PermuteCall | QuantizedCall

_POSERS: Final[dict[str, Callable[[Any, Make], Call]]] = {
    "matmul": posed_product,
    "grouped": posed_groups,
    "permute": posed_permute,
    "linear_quantized": posed_quantized,
}


def posed(problem: Tiled, make: Make = Pointer.named) -> Call:
    """Return a call that poses `problem`, on memory that `make(dtype, elements)` provides.

    Without it, stand-ins for memory serve, as where nothing runs. Memory is made in the order of the call's
    `tensors`. A complex element of a product is made as two real ones, any other element of 16 bytes as two
    of int64.
    """
    return _POSERS[problem.op](problem, make)
