"""What is fused into the store of a product, as kernels take it."""

from typing import Any

import triton.language as tl

from tritile.views import MatmulCall, QuantizedCall
from tritile.work.values import Buffer


def extra(call: MatmulCall | QuantizedCall, rank: int, first: int = 3) -> tuple[Any, ...] | None:
    """The epilogue's operands, then alpha and beta, as `kernels.epilogue.finished` takes them.

    `rank`: how many dimensions kernels see of the batch; `first`: the first operand's buffer. None where
    nothing is fused. For float64 alpha and beta are compiled in, to keep all their digits.
    """
    epilogue = call.fused.epilogue
    if epilogue.constants is None:
        return None
    found: list[Any] = []
    buffers = iter(range(first, len(call.tensors)))
    for view in call.fused.views:
        if view is None:
            found += [None] * (3 + rank)
        else:
            missing = (0,) * (rank - len(view.batch_strides))
            found += [Buffer(next(buffers)), *view.strides, *missing, *view.batch_strides]
    weights: list[Any] = [call.fused.alpha, call.fused.beta] if epilogue.weighted else [None, None]
    if call.dtype == "float64" and epilogue.weighted:
        weights = [tl.constexpr(weight) for weight in weights]  # Triton passes a float as fp32
    return (*found, *weights)
