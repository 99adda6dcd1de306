"""Products of groups as a torch user writes them: the baseline of `tritile.grouped_matmul`."""

from collections.abc import Callable

import torch

from tritile.core import of_torch
from tritile.core.problem import FP8_DTYPES
from tritile.core.views import GroupedCall, View
from tritile.tune.subject import operands


def _as_a_user_has_it(view: View, groups: int) -> torch.Tensor:
    """Return one matrix, or a matrix for each group."""
    return operands.matrix(view, groups) if view.batch_strides else operands.matrix(view, 1)[0]


def inputs(call: GroupedCall) -> list[torch.Tensor]:
    """Return a, b and offs, then the scales where there are any."""
    a, b = (_as_a_user_has_it(view, call.groups) for view in (call.a, call.b))
    if call.scales is None:
        return [a, b, call.offs]
    by_row, by_column = (own.tensor for own in call.scales)
    return [a, b, call.offs, by_row, by_column.view(call.groups, -1) if call.ragged == "m" else by_column]


def result(call: GroupedCall) -> torch.Tensor:
    """Return the tensor that a call writes."""
    return _as_a_user_has_it(call.out, call.groups)


def product(call: GroupedCall) -> Callable[..., torch.Tensor]:
    """Return a function that multiplies what `inputs` returns; it allocates its results.

    torch's fast path takes bfloat16, and float8_e4m3fn with scales. For other dtypes torch reads the offsets
    on the host, which raises under graph capture.
    """
    if call.dtype not in FP8_DTYPES:
        return lambda a, b, offs: of_torch.grouped_mm(a, b, offs=offs)
    kind, fast = getattr(torch, call.out_dtype), call.precision == "fast"

    return lambda a, b, offs, scale_a, scale_b: of_torch.scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=offs, out_dtype=kind, use_fast_accum=fast
    )
