"""What is fused into a product, as kernels take it."""

import itertools
from typing import Any

import triton.language as tl

from tritile.core.problem import BLOCK_SCALES
from tritile.core.views import MatmulCall, QuantizedCall
from tritile.families.common.work import Buffer


def extra(call: MatmulCall | QuantizedCall, rank: int, first: int = 3) -> tuple[Any, ...] | None:
    """The epilogue's operands, then alpha and beta, as `kernels.epilogue.finished` takes them.

    `rank`: how many dimensions kernels see of the batch; `first`: the first operand's buffer. None where
    nothing is fused. For float64 alpha and beta are compiled in, to keep all their digits.
    """
    epilogue = call.fused.epilogue
    if epilogue.constants is None:
        return None
    found: list[Any] = []
    buffers = itertools.count(first)
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


def up_index(call: MatmulCall) -> int:
    """The buffer of a gated product's second matrix: behind what is fused."""
    return 3 + sum(view is not None for view in call.fused.views)


def block_scales(call: MatmulCall) -> tuple[tuple[Any, ...] | None, tuple[int, int] | None]:
    """Scales within the sum, as `kernels.matmul.block_scale` takes them, and by what they are shared."""
    if call.scales is None:
        return None, None
    first = len(call.tensors) - 2
    of_a, of_b = (Buffer(first), *call.scales.a_strides), (Buffer(first + 1), *call.scales.b_strides)
    return (*of_a, *of_b), BLOCK_SCALES[call.scales.shared]


def verdict(call: MatmulCall) -> tuple[Buffer | None, tuple[int, int] | None]:
    """The word that says whether there is anything to do, and which of its values do."""
    if call.verdict is None:
        return None, None
    return Buffer(len(call.tensors) - 1), (call.verdict.least, call.verdict.end)
