"""Differentiate products by tritile's own operators, so that derivatives have derivatives in turn.

With g the gradient of a b, that of a is g b^H and that of b is a^H g, each summed over expanded dimensions.
The tangent of a b is a' b + a b'. Transposed operands are views.
"""

from typing import Any

import torch

from tritile.ops.operators.library import Formula

Shape = tuple[int, ...]


def multiplied(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, precision: str | None) -> torch.Tensor:
    """Return a b in this dtype, to which both are cast."""
    return torch.ops.tritile.matmul.default(a.to(dtype), b.to(dtype), precision=precision)


def gradient_of_left(g: torch.Tensor, b: torch.Tensor, shape: Shape, precision: str | None) -> torch.Tensor:
    """Return the gradient of a, whose shape is (..., M, K), from the gradient g of a b."""
    return multiplied(g, b.mH, b.dtype, precision).sum_to_size(shape)


def gradient_of_right(g: torch.Tensor, a: torch.Tensor, shape: Shape, precision: str | None) -> torch.Tensor:
    """Return the gradient of b, whose shape is (..., K, N), from the gradient g of a b.

    Where one matrix b serves a whole batch, its gradient is one product.
    """
    if a.ndim > 2 and len(shape) == 2:
        a, g = a.flatten(0, -2), g.flatten(0, -2)
    return multiplied(a.mH, g, a.dtype, precision).sum_to_size(shape)


def added(terms: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of tangents, in the shape and dtype of the result that they belong to."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.expand(like.shape).to(like.dtype)


def tangent_terms(op: Any, a: Any, b: Any, of_a: Any, of_b: Any, **options: Any) -> list[torch.Tensor]:
    """Return a' b and a b', multiplied by op, without a product of which an operand is None."""
    return [op(x, y, **options) for x, y in ((of_a, b), (a, of_b)) if x is not None and y is not None]


class Matmul(Formula):
    """Differentiate `tritile::matmul`, also of vectors."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep each operand that the gradient of the other needs."""
        _, a, b, _, ctx.precision = inputs
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.save_for_forward(a, b, output)
        ctx.shapes = a.shape, b.shape

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of a and b."""
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
        """Return the tangent of the product."""
        (a, b, output), (_, of_a, of_b, *_) = ctx.saved_tensors, tangents
        op, options = (
            torch.ops.tritile.matmul.default,
            {"out_dtype": output.dtype, "precision": ctx.precision},
        )
        return added(tangent_terms(op, a, b, of_a, of_b, **options), output)


def multiply(g: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return g times a number, or g itself where the number is 1."""
    return g if type(weight) in (int, float) and weight == 1 else g * weight


def conjugate(weight: Any) -> Any:
    """Return the conjugate of a number: a gradient is multiplied by it where the value is by the number."""
    return weight.conjugate() if isinstance(weight, complex) else weight


def gradient_of_added(g: torch.Tensor, like: tuple[Shape, torch.dtype] | None) -> torch.Tensor | None:
    """Return the gradient of a tensor of this shape and dtype that is added to a product."""
    return None if like is None else g.sum_to_size(like[0]).to(like[1])


def kind_of(tensor: Any, needed: bool) -> tuple[Shape, torch.dtype] | None:
    """Return the shape and dtype that `gradient_of_added` takes, None where no gradient is needed."""
    return (tensor.shape, tensor.dtype) if needed else None


class Linear(Formula):
    """Differentiate `tritile::linear` without an activation. bias and residual are not kept."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep x and weight, each where the gradient of the other needs it."""
        _, x, weight, bias, _, residual, _, ctx.precision = inputs
        _, needs_x, needs_weight, needs_bias, _, needs_residual, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.save_for_forward(x, weight, output)
        ctx.shapes = x.shape, weight.shape
        ctx.added = kind_of(bias, needs_bias), kind_of(residual, needs_residual)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, weight, bias and residual; weight's is one product for a whole batch."""
        (whole,), (x, weight), (of_x, of_weight) = grads, ctx.saved_tensors, ctx.shapes
        bias, residual = (gradient_of_added(whole, like) for like in ctx.added)
        g = whole.unsqueeze(-1) if len(of_weight) == 1 else whole
        grad_x = grad_weight = None
        if weight is not None:
            rows = weight if len(of_weight) == 2 else weight.unsqueeze(0)
            grad_x = multiplied(g, rows.conj(), weight.dtype, ctx.precision)
        if x is not None:
            x, g = (t.flatten(0, -2) if len(of_x) > 1 else t.unsqueeze(0) for t in (x, g))
            grad_weight = multiplied(g.mT, x.conj(), x.dtype, ctx.precision).reshape(of_weight)
        return None, grad_x, grad_weight, bias, None, residual, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """Return the tangent of the result."""
        (x, weight, output), (_, of_x, of_weight, bias, _, residual, *_) = ctx.saved_tensors, tangents
        op, options = (
            torch.ops.tritile.linear.default,
            {"out_dtype": output.dtype, "precision": ctx.precision},
        )
        terms = tangent_terms(op, x, weight, of_x, of_weight, **options)
        return added([*terms, *(t for t in (bias, residual) if t is not None)], output)


class Weighted(Formula):
    """Differentiate `tritile::addmm` and `baddbmm` without an activation. input is not kept."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep each operand that the gradient of the other needs."""
        _, added_to, a, b, ctx.beta, ctx.alpha, _, _, ctx.precision = inputs
        _, needs_input, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.save_for_forward(a, b, output)
        ctx.added, ctx.shapes = kind_of(added_to, needs_input), (a.shape, b.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input, a and b."""
        (g,), (a, b), (of_a, of_b) = grads, ctx.saved_tensors, ctx.shapes
        grad_input = gradient_of_added(multiply(g, conjugate(ctx.beta)), ctx.added)
        grad_a = None if b is None else gradient_of_left(g, b, of_a, ctx.precision)
        grad_b = None if a is None else gradient_of_right(g, a, of_b, ctx.precision)
        both = (None if grad is None else multiply(grad, conjugate(ctx.alpha)) for grad in (grad_a, grad_b))
        return None, grad_input, *both, *[None] * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """Return the tangent of the result."""
        (a, b, output), (_, of_input, of_a, of_b, *_) = ctx.saved_tensors, tangents
        op, options = (
            torch.ops.tritile.matmul.default,
            {"out_dtype": output.dtype, "precision": ctx.precision},
        )
        terms = [multiply(term, ctx.alpha) for term in tangent_terms(op, a, b, of_a, of_b, **options)]
        return added([*terms, *([] if of_input is None else [multiply(of_input, ctx.beta)])], output)
