"""Define `tritile::matmul`, `linear`, `addmm`, `baddbmm` and `gated_linear`."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritile.core.epilogue import activated
from tritile.ops import fused, gated, matmul
from tritile.ops.fused import check_activation
from tritile.ops.memo import name_of_role
from tritile.ops.operators import batches
from tritile.ops.operators.gradients import Linear, Matmul, Weighted
from tritile.ops.operators.library import define
from tritile.ops.products import matmul_of


def composed(
    product: Callable[..., torch.Tensor], activation: str | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """Return `product(residual)`, with an activation applied by torch, before the residual."""
    if not activation:
        return product(residual)
    y = activated(product(None), activation)
    return y if residual is None else (y + residual).to(y.dtype)


def _record_matmul(*values: Any) -> torch.Tensor:
    return Matmul.of(MATMUL, *values)


def _record_linear(
    input: Any, weight: Any, bias: Any, activation: Any, residual: Any, *how: Any
) -> torch.Tensor:
    check_activation("linear", activation, input)

    def product(residual: Any) -> torch.Tensor:
        return Linear.of(LINEAR, input, weight, bias, None, residual, *how)

    return composed(product, activation, residual)


def _define_weighted(op: str, rule: Callable[..., Any]) -> None:
    """Define "addmm" or "baddbmm"."""

    def record(input: Any, a: Any, b: Any, beta: Any, alpha: Any, activation: Any, *how: Any) -> torch.Tensor:
        check_activation(op, activation, a)
        return activated(Weighted.of(overload, input, a, b, beta, alpha, None, *how), activation or "")

    kernel, asked = functools.partial(fused.eager_weighted, op), functools.partial(fused.weighted_of, op)
    overload = define(op, kernel, asked, record, rule, (name_of_role(op, "a"), name_of_role(op, "b")))


def _record_gated(
    input: Any, gate: Any, up: Any, activation: Any, bias_gate: Any, bias_up: Any, *how: Any
) -> torch.Tensor:
    """Compute both products, whose values the derivative needs."""
    gated.gated_of(input, gate, up, activation, bias_gate, bias_up, *how)  # its checks
    of_gate = LINEAR(input, gate, bias_gate, out_dtype=how[0], precision=how[1])
    of_up = LINEAR(input, up, bias_up, out_dtype=how[0], precision=how[1])
    return activated(of_gate, activation or "") * of_up


MATMUL = define("matmul", matmul.eager, matmul_of, _record_matmul, batches.batched_matmul, ("input", "other"))
LINEAR = define(
    "linear", fused.eager_linear, fused.linear_of, _record_linear, batches.batched_linear, ("input", "weight")
)
_define_weighted("addmm", batches.batched_addmm)
_define_weighted("baddbmm", batches.batched_baddbmm)
_GATED = ("input", "weight_gate", "weight_up")
GATED_LINEAR = define(
    "gated_linear", gated.eager, gated.gated_of, _record_gated, batches.batched_gated, _GATED
)
