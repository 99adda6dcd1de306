"""Turn products over, whose kernels want the operand of few rows first."""

from dataclasses import replace
from typing import Any

from tritile.core.views import MatmulCall, Placed, View
from tritile.families.common.work import buffer_of


def _named(view: View, role: str, dtype: str) -> View:
    """Return a view that names its buffer, so that a transposed call names those of the caller's."""
    return replace(view, tensor=Placed(buffer_of(view.tensor, role).buffer, dtype, view.tensor.data_ptr()))


def transposed(call: MatmulCall) -> MatmulCall:
    """Return the call as out.T = b.T @ a.T; buffers keep the names that the caller's have."""
    fused: dict[str, Any] = {
        name: view and _named(view, name, call.out_dtype) for name, view in call.fused.named
    }
    return replace(
        call,
        a=_named(call.a, "a", call.dtype),
        b=_named(call.b, "b", call.dtype),
        out=_named(call.out, "out", call.out_dtype),
        fused=replace(call.fused, **fused),
    ).transposed
