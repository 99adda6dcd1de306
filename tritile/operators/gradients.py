"""Derivatives of products, made of tritile's own operators, so that they have derivatives in turn.

With g the gradient of a b, that of a is g b^H and that of b is a^H g, each summed over what was stretched.
The tangent of a b is a' b + a b'. Operands that are turned about are views.
"""

from typing import Any

import torch

from tritile.operators.library import Formula

Shape = tuple[int, ...]


def multiplied(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, precision: str | None) -> torch.Tensor:
    """a b, both in this dtype, which is the result's."""
    return torch.ops.tritile.matmul.default(a.to(dtype), b.to(dtype), precision=precision)


def gradient_of_left(g: torch.Tensor, b: torch.Tensor, shape: Shape, precision: str | None) -> torch.Tensor:
    """The gradient of an a (..., M, K) of this shape, g being that of a b."""
    return multiplied(g, b.mH, b.dtype, precision).sum_to_size(shape)


def gradient_of_right(g: torch.Tensor, a: torch.Tensor, shape: Shape, precision: str | None) -> torch.Tensor:
    """The gradient of a b (..., K, N) of this shape. One matrix for a whole batch gets it of one product."""
    if a.ndim > 2 and len(shape) == 2:
        a, g = a.flatten(0, -2), g.flatten(0, -2)
    return multiplied(a.mH, g, a.dtype, precision).sum_to_size(shape)


def added(terms: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The sum of tangents, as large as the result that they are a tangent of."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.expand(like.shape).to(like.dtype)


class Matmul(Formula):
    """The derivative of `tritile::matmul`, vectors included."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keeps each operand that the other one's gradient takes."""
        _, a, b, _, ctx.precision = inputs
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.save_for_forward(a, b, output)
        ctx.shapes = a.shape, b.shape

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Those of a and b."""
        (g,), (a, b), (of_a, of_b) = grads, ctx.saved_tensors, ctx.shapes
        g = g.unsqueeze(-1) if len(of_b) == 1 else g
        g = g.unsqueeze(-2) if len(of_a) == 1 else g
        grad_a = grad_b = None
        if b is not None:
            matrices = b.unsqueeze(-1) if len(of_b) == 1 else b
            shape = (1, *of_a) if len(of_a) == 1 else of_a
            grad_a = gradient_of_left(g, matrices, shape, ctx.precision).reshape(of_a)
        if a is not None:
            matrices = a.unsqueeze(0) if len(of_a) == 1 else a
            shape = (*of_b, 1) if len(of_b) == 1 else of_b
            grad_b = gradient_of_right(g, matrices, shape, ctx.precision).reshape(of_b)
        return None, grad_a, grad_b, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """That of the product."""
        (a, b, output), (_, of_a, of_b, *_) = ctx.saved_tensors, tangents
        pairs = [(x, y) for x, y in ((of_a, b), (a, of_b)) if x is not None and y is not None]
        product = torch.ops.tritile.matmul.default
        terms = [product(x, y, out_dtype=output.dtype, precision=ctx.precision) for x, y in pairs]
        return added(terms, output)
