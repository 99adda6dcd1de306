"""Say which calls torch's own kernel may make, and how: the backend `aten` of an operation.

torch has to compute the same, with a result of the same dtype and layout, from the tensors as they lie. What
of this follows from sizes and layouts is in `tritile.planning.aten`; here is what follows from arguments and
from torch's settings. Every setting that is read is part of what a prepared call is remembered by.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from tritile.core.of_torch import is_deterministic, unsafe_view
from tritile.core.problem import Tiled
from tritile.ops.memo import IN_FP32, ByTorch, default_precision
from tritile.planning.aten import is_alone

# Bound now: a program may put tritile's functions in the place of torch's.
_MULTIPLY: Final = torch.matmul
_ADD: Final = torch.addmm
_LINEAR: Final = torch.nn.functional.linear


def by_torch(of: Any, problem: Tiled, how: str, out: Any) -> ByTorch | None:
    """Return torch's call for what was asked; None where torch may not make it.

    `problem` describes it, and `how` is its precision.

    Under `torch.use_deterministic_algorithms` it may only where no kernel of tritile's can: cuBLAS then wants
    a workspace of its own. Nor in "ieee" by name: tritile's sums of float32 are compensated, torch's are not.
    """
    make = _MAKES.get(of.op)
    if make is None or (is_deterministic() and not is_alone(problem)):
        return None
    if of.first.dtype in IN_FP32:
        setting = default_precision()
        if of.precision == "ieee" or how != ("ieee" if setting == "none" else setting):
            return None
    if out is not None and out.ndim > 2 and not out.is_contiguous():
        return None  # torch would multiply, and then refuse to view it as matrices
    return make(of, out)


def _matmul(of: Any, out: Any) -> ByTorch | None:
    a, b = of.tensors
    if not _as_they_lie(a, b):
        return None
    return _MULTIPLY if out is None else lambda a, b, out: _MULTIPLY(a, b, out=out)


def _is_matrix(tensor: torch.Tensor) -> bool:
    """True if the last two dimensions are a matrix as BLAS has it: contiguous along one, without overlap."""
    (m, n), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    by_rows = (column == 1 or n == 1) and (row >= n or m == 1)
    by_columns = (row == 1 or m == 1) and (column >= m or n == 1)
    return by_rows or by_columns


def _as_they_lie(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if torch.matmul copies no operand, and multiplies as many matrices as tritile would.

    a has batch dimensions that fold into its rows, or those of b, none of them expanded.
    """
    if b.ndim < 2 or a.ndim < b.ndim or not (_is_matrix(a) and _is_matrix(b)):
        return False
    if a.ndim == 2:
        return True
    try:
        if b.ndim == 2:
            a.view(-1, a.shape[-1])
            return True
        if a.shape[:-2] != b.shape[:-2]:
            return False
        for operand in (a, b):
            operand.view(-1, *operand.shape[-2:])
            steps = zip(operand.shape[:-2], operand.stride(), strict=False)
            if any(size > 1 and step == 0 for size, step in steps):
                return False
    except RuntimeError:
        return False
    return True


def _linear(of: Any, out: Any) -> ByTorch | None:
    x, weight, bias, residual = of.tensors
    plain = residual is None and not of.extras.activation and weight.ndim == 2 and x.ndim >= 2
    if not plain or not _as_they_lie(x, weight.t()):
        return None
    if bias is None and out is None:
        return lambda x, weight, bias, residual: _LINEAR(x, weight)
    if bias is None:
        return lambda x, weight, bias, residual, out: _MULTIPLY(x, weight.t(), out=out)
    if bias.ndim != 1 or bias.dtype != x.dtype:
        return None
    if x.ndim == 2 and out is None:
        return lambda x, weight, bias, residual: _ADD(bias, x, weight.t())
    if x.ndim == 2:
        return lambda x, weight, bias, residual, out: _ADD(bias, x, weight.t(), out=out)
    return _linear_of_batch


def _linear_of_batch(x: Any, weight: Any, bias: Any, residual: Any, out: Any = None) -> torch.Tensor:
    """One launch, rounded once, and no view, unlike torch's linear for x of more than two dimensions."""
    rows, columns = x.view(-1, x.shape[-1]), weight.t()
    if out is not None:
        _ADD(bias, rows, columns, out=out.view(-1, out.shape[-1]))
        return out
    found: torch.Tensor = unsafe_view(_ADD(bias, rows, columns), (*x.shape[:-1], weight.shape[0]))
    return found


_MAKES: Final[dict[str, Callable[[Any, Any], ByTorch | None]]] = {"matmul": _matmul, "linear": _linear}

# What a traced call becomes that torch may make: torch's compiler takes its own functions apart, and fuses.
LOWERED: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "matmul": lambda input, other: _MULTIPLY(input, other),
    "linear": lambda input, weight, bias, residual: _LINEAR(input, weight, bias),
}
