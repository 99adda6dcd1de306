"""Register tritile's operations with torch's dispatcher, compiler and transforms as `torch.ops.tritile`."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tritile.core.epilogue import activated
from tritile.ops.call import REQUESTS, run_plain
from tritile.ops.dispatch import call_overload
from tritile.ops.fused import check_activation
from tritile.ops.operators import batches
from tritile.ops.operators.gradients import FORMS, Grouped, Permute, Product, Quantized
from tritile.ops.operators.library import define, refuse
from tritile.ops.permute import options_of


def _composed(
    product: Callable[[Any], torch.Tensor], activation: str | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """Return `product(residual)`, with an activation applied by torch, before the residual."""
    if not activation:
        return product(residual)
    y = activated(product(None), activation)
    return y if residual is None else (y + residual).to(y.dtype)


def _record_linear(
    input: Any, weight: Any, bias: Any, activation: Any, residual: Any, *how: Any
) -> torch.Tensor:
    check_activation("linear", activation, input)

    def product(residual: Any) -> torch.Tensor:
        return Product.of("linear", input, weight, bias, None, residual, *how)

    return _composed(product, activation, residual)


def _define_weighted(op: str) -> None:
    def record(input: Any, a: Any, b: Any, beta: Any, alpha: Any, activation: Any, *how: Any) -> torch.Tensor:
        check_activation(op, activation, a)
        if alpha == 0:  # through a product with K = 0 the factors have zeros for gradients
            REQUESTS[op](input, a, b, beta, alpha, activation, *how).checked(None)
            a, b = a[..., :0], b[..., :0, :]
        return activated(Product.of(op, input, a, b, beta, alpha, None, *how), activation or "")

    rule = batches.batched_addmm if op == "addmm" else batches.batched_baddbmm
    define(op, record, rule, FORMS[op][:2])


def _record_gated(
    input: Any, gate: Any, up: Any, activation: Any, bias_gate: Any, bias_up: Any, *how: Any
) -> torch.Tensor:
    """Compute both products, whose values the derivative needs."""
    REQUESTS["gated_linear"](input, gate, up, activation, bias_gate, bias_up, *how)  # its checks
    of_gate = call_overload("linear", input, gate, bias_gate, None, None, *how)
    of_up = call_overload("linear", input, up, bias_up, None, None, *how)
    return activated(of_gate, activation or "") * of_up


def _record_scaled(
    a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any, bias: Any, activation: Any, residual: Any,
    *rest: Any,
) -> torch.Tensor:  # fmt: skip
    refuse("scaled_matmul", ("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b))
    check_activation("scaled_matmul", activation)

    def product(residual: Any) -> torch.Tensor:
        return Product.of("scaled_matmul", a, b, scale_a, scale_b, out_dtype, bias, None, residual, *rest)

    return _composed(product, activation, residual)


def _record_grouped(a: Any, b: Any, offs: Any, scale_a: Any, scale_b: Any, *options: Any) -> torch.Tensor:
    refuse("grouped_matmul", ("scale_a", scale_a), ("scale_b", scale_b))
    return Grouped.of("grouped_matmul", a, b, offs, scale_a, scale_b, *options)


def _record_quantized(x: Any, packed: Any, scales: Any, *rest: Any) -> torch.Tensor:
    refuse("linear", ("weight.scales", scales))
    return Quantized.of("linear_quantized", x, packed, scales, *rest)


def _permute(input: Any, dims: Any, out: Any = None) -> torch.Tensor:
    return run_plain("permute", (input,), out, options_of(dims))


define("matmul", functools.partial(Product.of, "matmul"), batches.batched_matmul, ("input", "other"))
define("linear", _record_linear, batches.batched_linear, ("input", "weight"))
_define_weighted("addmm")
_define_weighted("baddbmm")
define("gated_linear", _record_gated, batches.batched_gated, ("input", "weight_gate", "weight_up"))
define("scaled_matmul", _record_scaled)
define("grouped_matmul", _record_grouped, operands=("a", "b"))
define("permute", functools.partial(Permute.of, "permute"), batches.batched_permute, kernel=_permute)
define("linear_quantized", _record_quantized, batches.batched_quantized, ("input",), like="scales")
