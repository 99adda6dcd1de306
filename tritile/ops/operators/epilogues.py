"""Define `tritile::linear`, `addmm`, `baddbmm` and `gated_linear`."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritile.core.epilogue import activated
from tritile.ops import fused
from tritile.ops.fused import check_activation
from tritile.ops.gated import eager as eager_gated
from tritile.ops.gated import gated_of
from tritile.ops.memo import name_of_role
from tritile.ops.operators.batches import batched_addmm, batched_baddbmm, batched_gated, batched_linear
from tritile.ops.operators.gradients import Linear, Weighted
from tritile.ops.operators.library import autocast, batch, define, differentiate
from tritile.ops.operators.products import refuse_fp8


def composed(
    product: Callable[..., torch.Tensor], activation: str | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """Return `product(residual)`, with an activation applied by torch, before the residual."""
    if not activation:
        return product(residual)
    y = activated(product(None), activation)
    return y if residual is None else (y + residual).to(y.dtype)


def _record_linear(
    input: Any, weight: Any, bias: Any, activation: Any, residual: Any, out_dtype: Any, precision: Any
) -> torch.Tensor:
    refuse_fp8("linear", input=input, weight=weight)
    check_activation("linear", activation, input)

    def product(residual: Any) -> torch.Tensor:
        return Linear.of(LINEAR, input, weight, bias, None, residual, out_dtype, precision)

    return composed(product, activation, residual)


LINEAR = define("linear", fused.eager_linear, fused.linear_of)
differentiate(LINEAR, _record_linear)
batch(LINEAR, batched_linear)
autocast(LINEAR, "input", "weight")


def _define_weighted(op: str, rule: Callable[..., Any]) -> None:
    """Define "addmm" or "baddbmm"."""
    of_a, of_b = (name_of_role(op, role) for role in "ab")

    kernel = functools.partial(fused.eager_weighted, op)
    overload = define(op, kernel, functools.partial(fused.weighted_of, op))

    def record(
        input: Any, a: Any, b: Any, beta: Any, alpha: Any, activation: Any, *options: Any
    ) -> torch.Tensor:
        refuse_fp8(op, **{of_a: a, of_b: b})
        check_activation(op, activation, a)
        y = Weighted.of(overload, input, a, b, beta, alpha, None, *options)
        return activated(y, activation or "")

    differentiate(overload, record)
    batch(overload, rule)
    autocast(overload, of_a, of_b)


_define_weighted("addmm", batched_addmm)
_define_weighted("baddbmm", batched_baddbmm)


def _record_gated(
    input: Any, weight_gate: Any, weight_up: Any, activation: Any, bias_gate: Any, bias_up: Any,
    out_dtype: Any, precision: Any,
) -> torch.Tensor:  # fmt: skip
    """Compute both products, whose values the derivative needs."""
    gated_of(
        input, weight_gate, weight_up, activation, bias_gate, bias_up, out_dtype, precision
    )  # its checks
    options = {"out_dtype": out_dtype, "precision": precision}
    gate, up = LINEAR(input, weight_gate, bias_gate, **options), LINEAR(input, weight_up, bias_up, **options)
    return activated(gate, activation or "") * up


GATED_LINEAR = define("gated_linear", eager_gated, gated_of)
differentiate(GATED_LINEAR, _record_gated)
batch(GATED_LINEAR, batched_gated)
autocast(GATED_LINEAR, "input", "weight_gate", "weight_up")
