"""Apply an epilogue to the sums of a product by torch: where no kernel runs, and as a reference."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return an activation of `tritile.core.problem.ACTIVATIONS`, or x where it is ""."""
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return {"": lambda y: y, "relu": F.relu, "silu": F.silu}[activation](x)


def finished(
    sums: torch.Tensor,
    sides: Sequence[torch.Tensor | None],
    activation: str = "",
    alpha: complex = 1.0,
    beta: complex = 1.0,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return activation(alpha * scale_a * scale_b * sums + beta * bias) * (up + bias_up) + residual.

    The result has the dtype of `sums` if that is float64 or complex, else float32. `sides` broadcast to the
    shape of `sums` and come in the order of `core.problem.SIDES`. Zero points are already subtracted from
    sums. `up`: sums by the second matrix of a gated product.
    """
    kind = sums.dtype if sums.dtype == torch.float64 or sums.is_complex() else torch.float32
    scale_a, scale_b, bias, residual, bias_up, *_ = (None if t is None else t.to(kind) for t in sides)
    result = sums.to(kind)
    for scale in (scale_a, scale_b):
        result = result if scale is None else result * scale
    result = result if alpha == 1 else result * alpha  # times 1, a complex infinity has parts that are NaN
    result = result if bias is None else result + (bias if beta == 1 else bias * beta)
    result = activated(result, activation)
    if up is not None:
        result = result * (up.to(kind) if bias_up is None else up.to(kind) + bias_up)
    return result if residual is None else result + residual


def composed(
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    alpha: complex = 1.0,
    beta: complex = 1.0,
) -> torch.Tensor:
    """Return activation(alpha * sums + beta * bias) + residual in the dtype of sums, which it may change.

    A bias with beta = 0 is not read.
    """
    if alpha != 1:
        sums.mul_(alpha)
    if bias is not None and beta != 0:
        sums.add_(bias, alpha=beta)
    sums = activated(sums, activation)
    # autograd may have kept the activation for its derivative
    return sums if residual is None else (sums + residual).to(sums.dtype)
