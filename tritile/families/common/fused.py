"""Pass what is fused into a product, as kernels take it."""

from typing import Any

import triton.language as tl

from tritile.core.views import Fused, MatmulCall
from tritile.families.common.work import Buffer, buffer_of


def extra(fused: Fused, rank: int, dtype: str = "") -> tuple[Any, ...] | None:
    """Return the epilogue's operands, then alpha and beta, as `common.epilogue.finished` takes them.

    `rank`: the number of batch dimensions that kernels see. Return None where nothing is fused. If `dtype`,
    the operands' dtype, is float64, alpha and beta are compiled in, to keep all their digits.
    """
    epilogue = fused.epilogue
    if epilogue.constants is None:
        return None
    found: list[Any] = []
    for name, view in fused.named:
        if view is None:
            found += [None] * (3 + rank)
        else:
            missing = (0,) * (rank - len(view.batch_strides))
            found += [buffer_of(view.tensor, name), *view.strides, *missing, *view.batch_strides]
    weights: list[Any] = [fused.alpha, fused.beta] if epilogue.weighted else [None, None]
    if dtype == "float64" and epilogue.weighted:
        weights = [tl.constexpr(weight) for weight in weights]  # Triton passes a float as fp32
    return (*found, *weights)


def fallback_flag(call: MatmulCall) -> tuple[Buffer | None, tuple[int, int] | None]:
    if call.verdict is None:
        return None, None
    return buffer_of(call.verdict.word, "verdict"), (call.verdict.least, call.verdict.end)
