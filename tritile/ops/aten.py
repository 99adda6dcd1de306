"""Say which calls torch's own kernel may make, and how: the backend `aten` of an operation.

torch has to compute the same, with a result of the same dtype and layout, from the tensors as they lie. What
of this follows from sizes and layouts is in `tritile.planning.aten`; here is what follows from arguments and
from torch's settings. Every setting that is read is part of what a prepared call is remembered by.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F

from tritile.core.of_torch import int_mm, is_deterministic, scaled_mm
from tritile.core.problem import FP8_DTYPES
from tritile.ops.checks import name_of
from tritile.ops.memo import IN_FP32, ByTorch, default_precision


def by_torch(of: Any, how: str, out: Any) -> ByTorch | None:
    """Return torch's call for what was asked, in the precision `how`; None where torch may not make it.

    Under `torch.use_deterministic_algorithms` it never does: cuBLAS then wants a workspace of its own.
    """
    make = _MAKES.get(of.op)
    if make is None or is_deterministic():
        return None
    if of.first.dtype in IN_FP32 and how != (default_precision().replace("none", "ieee")):
        return None
    return make(of, how, out)


def _matmul(of: Any, how: str, out: Any) -> ByTorch | None:
    a, b = of.tensors
    function: Callable[..., torch.Tensor] = torch.matmul
    if a.dtype == torch.int8 or name_of(a.dtype) in FP8_DTYPES:
        if a.ndim != 2 or b.ndim != 2:
            return None
        function = int_mm
    elif not _is_view(a, b):
        return None
    if name_of(a.dtype) in FP8_DTYPES:
        one = torch.ones((), device=a.device)
        words = {"out_dtype": of.out_dtype or torch.bfloat16, "use_fast_accum": how == "fast"}
        function = functools.partial(_scaled, one, words)
    return function if out is None else lambda a, b, out: function(a, b, out=out)


def _scaled(
    one: torch.Tensor, words: dict[str, Any], a: torch.Tensor, b: torch.Tensor, **out: Any
) -> torch.Tensor:
    made: torch.Tensor = scaled_mm(a, b, one, one, **words, **out)
    return made


def _is_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if torch.matmul copies no operand to broadcast it, and returns a contiguous result."""
    if b.ndim < 2 or a.ndim < max(2, b.ndim):
        return False
    if a.ndim == b.ndim == 2:
        return True
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        for operand in (a, b):
            operand.expand(*batch, *operand.shape[-2:]).view(-1, *operand.shape[-2:])
        if b.ndim == 2:
            a.view(-1, a.shape[-1])
    except RuntimeError:
        return False
    return True


def _linear(of: Any, how: str, out: Any) -> ByTorch | None:
    x, weight, bias, residual = of.tensors
    plain = residual is None and not of.extras.activation and weight.ndim == 2 and x.ndim >= 2
    if not plain or not _is_view(x, weight.t()):
        return None
    if bias is not None and (bias.ndim != 1 or bias.dtype != x.dtype):
        return None
    if out is None:
        return lambda x, weight, bias, residual: F.linear(x, weight, bias)
    if bias is None:
        return lambda x, weight, bias, residual, out: torch.matmul(x, weight.t(), out=out)
    return (lambda x, w, bias, residual, out: torch.addmm(bias, x, w.t(), out=out)) if x.ndim == 2 else None


_MAKES: Final[dict[str, Callable[[Any, str, Any], ByTorch | None]]] = {"matmul": _matmul, "linear": _linear}
