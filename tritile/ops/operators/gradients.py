"""Differentiate operators by tritile's own operators, so that derivatives have derivatives in turn.

With g the gradient of a b, that of a is g b^H and that of b is a^H g, each summed over expanded dimensions.
The tangent of a b is a' b + a b'. Transposed operands are views.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tritile.core.quantized import meaning
from tritile.ops.dispatch import NAMES, TENSORS, WEIGHTS, call_overload, name_of_role
from tritile.ops.operators.library import Formula

Kind = tuple[tuple[int, ...], torch.dtype]


def _multiplied(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, precision: Any = None) -> torch.Tensor:
    """Return a b in this dtype, to which both are cast."""
    return call_overload("matmul", a.to(dtype), b.to(dtype), None, precision)


def _sum(terms: Iterable[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of tangents, in the shape and dtype of the result that they belong to."""
    first, *rest = (term for term in terms if term is not None)
    for term in rest:
        first = first + term
    return first.expand(like.shape).to(like.dtype)


def _weighted(g: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return g times a number, or g itself if the number is 1."""
    return g if type(weight) in (int, float) and weight == 1 else g * weight


def _conjugate(weight: Any) -> Any:
    """Return the conjugate of a number: the gradient of a value times a number is multiplied by it."""
    return weight.conjugate() if isinstance(weight, complex) else weight


def _gradient_of_added(g: torch.Tensor, like: Kind | None) -> torch.Tensor | None:
    """Return the gradient of a tensor of this shape and dtype that is added to a product."""
    return None if like is None else g.sum_to_size(like[0]).to(like[1])


def _kind_of(tensor: Any, needed: bool) -> Kind | None:
    return (tensor.shape, tensor.dtype) if needed else None


class Product(Formula):
    """Differentiate a product with what is added to it, without an activation, also of vectors.

    What is added is not kept.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        op, *values = inputs
        ctx.names, needs = NAMES[op], dict(zip(NAMES[op], ctx.needs_input_grad[1:], strict=True))
        arguments = dict(zip(ctx.names, values, strict=True))
        ctx.a, ctx.b = name_of_role(op, "a"), name_of_role(op, "b")
        ctx.is_transposed = op in WEIGHTS
        a, b = arguments[ctx.a], arguments[ctx.b]
        ctx.save_for_backward(a if needs[ctx.b] else None, b if needs[ctx.a] else None)
        ctx.save_for_forward(a, b, output)
        ctx.shapes = a.shape, b.shape
        added = [name for role, name in TENSORS[op] if role in ("bias", "residual")]
        ctx.added = {name: _kind_of(arguments[name], needs[name]) for name in added}
        ctx.alpha, ctx.beta = arguments.get("alpha", 1), arguments.get("beta", 1)
        ctx.precision = arguments.get("precision")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (g,), (a, b), (of_a, of_b) = grads, ctx.saved_tensors, ctx.shapes
        weighted = _weighted(g, _conjugate(ctx.beta))
        found = {name: _gradient_of_added(weighted, kind) for name, kind in ctx.added.items()}
        # A vector is a matrix of one row or column, and a weight of one row is transposed.
        as_a, as_b = _as_matrix(of_a, True), _as_matrix(of_b, ctx.is_transposed)
        g = g.unsqueeze(-1) if len(of_b) == 1 else g
        g = g.unsqueeze(-2) if len(of_a) == 1 else g
        alpha = _conjugate(ctx.alpha)
        if b is not None:
            b = b.view(as_b) if b.ndim == 1 else b
            left = _multiplied(g, b.conj() if ctx.is_transposed else b.mH, b.dtype, ctx.precision)
            found[ctx.a] = _weighted(left.sum_to_size(as_a).reshape(of_a), alpha)
        if a is not None:
            a = a.unsqueeze(0) if a.ndim == 1 else a
            if a.ndim > 2 and len(of_b) <= 2:  # one product if b serves a batch
                a, g = a.flatten(0, -2), g.flatten(0, -2)
            one, other = (g.mT, a.conj()) if ctx.is_transposed else (a.mH, g)
            right = _multiplied(one, other, a.dtype, ctx.precision)
            found[ctx.b] = _weighted(right.sum_to_size(as_b).reshape(of_b), alpha)
        return None, *(found.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        (a, b, output), of = ctx.saved_tensors, dict(zip(ctx.names, tangents[1:], strict=True))
        terms: list[torch.Tensor | None] = []
        for x, y in ((of[ctx.a], b), (a, of[ctx.b])):
            if x is not None and y is not None:
                options = (output.dtype, ctx.precision)
                values = ("linear", x, y, None, None, None) if ctx.is_transposed else ("matmul", x, y)
                terms.append(_weighted(call_overload(*values, *options), ctx.alpha))
        terms += [None if of[each] is None else _weighted(of[each], ctx.beta) for each in ctx.added]
        return _sum(terms, output)


def _as_matrix(shape: tuple[int, ...], is_row: bool) -> tuple[int, ...]:
    if len(shape) > 1:
        return shape
    return (1, *shape) if is_row else (*shape, 1)


class Grouped(Formula):
    """Differentiate `tritile::grouped_matmul` by products of the same groups, whatever they share.

    If groups share rows of a, or columns of b, the gradient of the other operand is a product of groups
    that share K, and the reverse.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, a, b, offs, _, _, _, ctx.precision = inputs
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, offs)
        ctx.save_for_forward(a, b, offs, output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (g,), (a, b, offs) = grads, ctx.saved_tensors
        options = (offs, None, None, None, ctx.precision)
        grad_a = None if b is None else call_overload("grouped_matmul", g.to(b.dtype), b.mT, *options)
        grad_b = None if a is None else call_overload("grouped_matmul", a.mT, g.to(a.dtype), *options)
        return None, grad_a, grad_b, *[None] * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        (a, b, offs, output), (_, of_a, of_b, *_) = ctx.saved_tensors, tangents
        options = (offs, None, None, output.dtype, ctx.precision)
        pairs = [(x, y) for x, y in ((of_a, b), (a, of_b)) if x is not None and y is not None]
        return _sum([call_overload("grouped_matmul", x, y, *options) for x, y in pairs], output)


class Quantized(Formula):
    """Differentiate `tritile::linear_quantized` with respect to x, by the dequantized weight, and to bias."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, _, packed, scales, zeros, bias, *ctx.options = inputs
        ctx.save_for_backward(packed, scales, zeros)
        ctx.save_for_forward(packed, scales, zeros, output)
        ctx.added = _kind_of(bias, ctx.needs_input_grad[5])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (g,), (packed, scales, zeros) = grads, ctx.saved_tensors
        bits, group_size, n, k = ctx.options
        grad_x = None
        if ctx.needs_input_grad[1]:
            weight = meaning(packed, scales, zeros, (n, k), bits, group_size).to(scales.dtype)
            grad_x = _multiplied(g, weight, scales.dtype)
        return None, grad_x, None, None, None, _gradient_of_added(g, ctx.added), *[None] * 4

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        (*weight, output), (_, of_x, _, _, _, of_bias, *_) = ctx.saved_tensors, tangents
        values = (of_x, *weight, None, *ctx.options)
        return _sum([None if of_x is None else call_overload("linear_quantized", *values), of_bias], output)


class Permute(Formula):
    """Differentiate `tritile::permute`: by the inverse permutation backward, the same one forward."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, x, dims = inputs
        ctx.dims = [dim % max(1, x.ndim) for dim in dims]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = [ctx.dims.index(i) for i in range(len(ctx.dims))]
        return None, call_overload("permute", grads[0], back), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return call_overload("permute", tangents[1], ctx.dims)
