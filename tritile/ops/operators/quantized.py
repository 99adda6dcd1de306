"""Define `tritile::scaled_matmul` and `tritile::linear_quantized`: products of operands of few bits."""

from typing import Any, Final

import torch

from tritile.core.quantized import QuantizedWeight, meaning
from tritile.errors import UnsupportedError
from tritile.ops import linear as weights
from tritile.ops.fused import check_activation
from tritile.ops.operators.batches import Batched, finished, first
from tritile.ops.operators.gradients import added, gradient_of_added, kind_of, multiplied
from tritile.ops.operators.library import Formula, autocast, define, refuse
from tritile.ops.operators.products import composed
from tritile.ops.scaled import eager, scaled_of
from tritile.ops.signatures import NAMED

_SCALED: Final = "scaled_matmul"
_NAMED: Final = NAMED["linear_quantized"]


class Scaled(Formula):
    """Differentiate `tritile::scaled_matmul` with respect to bias and residual, without an activation."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep shapes and dtypes only."""
        bias, residual = inputs[6], inputs[8]
        ctx.added = kind_of(bias, ctx.needs_input_grad[6]), kind_of(residual, ctx.needs_input_grad[8])
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of bias and residual."""
        bias, residual = (gradient_of_added(grads[0], like) for like in ctx.added)
        return *[None] * 6, bias, None, residual, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """Return the tangent of the result."""
        (output,) = ctx.saved_tensors
        return added([t for t in (tangents[6], tangents[8]) if t is not None], output)


def _record_scaled(
    a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any, bias: Any, activation: Any, residual: Any,
    *rest: Any,
) -> torch.Tensor:  # fmt: skip
    refuse(_SCALED, ("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b))
    check_activation(_SCALED, activation)

    def product(residual: Any) -> torch.Tensor:
        return Scaled.of(SCALED_MATMUL, a, b, scale_a, scale_b, out_dtype, bias, None, residual, *rest)

    return composed(product, activation, residual)


SCALED_MATMUL = define(_SCALED, eager, scaled_of, _record_scaled)


def _quantized(
    x: Any, packed: Any, scales: Any, zeros: Any = None, bias: Any = None, *, bits: int, group_size: int,
    n: int, k: int,
) -> torch.Tensor:  # fmt: skip
    weight = QuantizedWeight(packed, scales, zeros, bits, group_size, (n, k))
    return weights.eager(x, weight, bias)


def _asked(
    x: Any, packed: Any, scales: Any, zeros: Any, bias: Any, bits: int, group_size: int, n: int, k: int
) -> weights.QuantizedLinear:
    return weights.QuantizedLinear(x, QuantizedWeight(packed, scales, zeros, bits, group_size, (n, k)), bias)


class LinearQuantized(Formula):
    """Differentiate `tritile::linear_quantized` with respect to x, by the dequantized weight, and to bias."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep the weight packed."""
        _, _, packed, scales, zeros, bias, *ctx.options = inputs
        ctx.save_for_backward(packed, scales, zeros)
        ctx.save_for_forward(packed, scales, zeros, output)
        ctx.added = kind_of(bias, ctx.needs_input_grad[5])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and bias."""
        (g,), (packed, scales, zeros) = grads, ctx.saved_tensors
        bits, group_size, n, k = ctx.options
        grad_x = None
        if ctx.needs_input_grad[1]:
            weight = meaning(packed, scales, zeros, (n, k), bits, group_size).to(scales.dtype)
            grad_x = multiplied(g, weight, scales.dtype, None)
        return None, grad_x, None, None, None, gradient_of_added(g, ctx.added), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """Return the tangent of the result."""
        (packed, scales, zeros, output), (_, of_x, _, _, _, of_bias, *_) = ctx.saved_tensors, tangents
        options = dict(zip(_NAMED, ctx.options, strict=True))
        terms = [] if of_x is None else [LINEAR_QUANTIZED(of_x, packed, scales, zeros, **options)]
        return added([*terms, *(t for t in (of_bias,) if t is not None)], output)


def _record_quantized(x: Any, packed: Any, scales: Any, *rest: Any) -> torch.Tensor:
    refuse("linear", ("weight.scales", scales))
    return LinearQuantized.of(LINEAR_QUANTIZED, x, packed, scales, *rest)


def _batched_quantized(
    in_dims: tuple[Any, ...], x: Any, packed: Any, scales: Any, zeros: Any, bias: Any, *options: Any
) -> Batched:
    """Batch by rows: all rows make one product. Raise UnsupportedError for a batch of weights."""
    of_x, *of_parts, of_bias = in_dims[:5]
    if any(dim is not None for dim in of_parts):
        raise UnsupportedError("linear: vmap gives a batch of quantized weights: wanted one weight for all")
    names = dict(zip(_NAMED, options, strict=True))
    if of_bias is None:
        return LINEAR_QUANTIZED(x.movedim(of_x, 0), packed, scales, zeros, bias, **names), 0
    rank = x.ndim - (of_x is not None)
    rows = x.unsqueeze(0) if of_x is None else x.movedim(of_x, 0)
    sums = LINEAR_QUANTIZED(rows, packed, scales, zeros, **names)
    return finished(sums, first(bias, of_bias, rank), "", None), 0


LINEAR_QUANTIZED = define("linear_quantized", _quantized, _asked, _record_quantized, _batched_quantized)
autocast(LINEAR_QUANTIZED, "input", dtype_of="scales")
