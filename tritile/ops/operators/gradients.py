"""Differentiate operators by tritile's own operators, so that derivatives have derivatives in turn.

With g the gradient of a b, that of a is g b^H and that of b is a^H g, each summed over expanded dimensions.
The tangent of a b is a' b + a b'. Transposed operands are views.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch

from tritile.core.quantized import meaning
from tritile.ops.dispatch import NAMES, call_overload
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
    """Return g times a number, or g itself where the number is 1."""
    return g if type(weight) in (int, float) and weight == 1 else g * weight


def _conjugate(weight: Any) -> Any:
    """Return the conjugate of a number: a gradient is multiplied by it where the value is by the number."""
    return weight.conjugate() if isinstance(weight, complex) else weight


def _gradient_of_added(g: torch.Tensor, like: Kind | None) -> torch.Tensor | None:
    """Return the gradient of a tensor of this shape and dtype that is added to a product."""
    return None if like is None else g.sum_to_size(like[0]).to(like[1])


def _kind_of(tensor: Any, needed: bool) -> Kind | None:
    return (tensor.shape, tensor.dtype) if needed else None


class Form(NamedTuple):
    """Say by the names of its arguments what an operator computes: alpha a b + beta added + ... .

    b is the transpose of the argument where `is_transposed`. What is added is multiplied by 1 where the
    operator has no `beta`.
    """

    a: str
    b: str
    added: tuple[str, ...] = ()
    is_transposed: bool = False


FORMS: Final = {
    "matmul": Form("input", "other"),
    "linear": Form("input", "weight", ("bias", "residual"), is_transposed=True),
    "addmm": Form("mat1", "mat2", ("input",)),
    "baddbmm": Form("batch1", "batch2", ("input",)),
    "scaled_matmul": Form("a", "b", ("bias", "residual")),  # a and b have no gradients
}


class Product(Formula):
    """Differentiate a product with what is added to it, without an activation, also of vectors.

    What is added is not kept.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        name, *values = inputs
        given = dict(zip(NAMES[name], values, strict=True))
        ctx.needs = dict(zip(NAMES[name], ctx.needs_input_grad[1:], strict=True))
        ctx.form, ctx.names = FORMS[name], NAMES[name]
        a, b = given[ctx.form.a], given[ctx.form.b]
        needs_a, needs_b = ctx.needs[ctx.form.a], ctx.needs[ctx.form.b]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.save_for_forward(a, b, output)
        ctx.shapes = a.shape, b.shape
        ctx.added = {each: _kind_of(given[each], ctx.needs[each]) for each in ctx.form.added}
        ctx.alpha, ctx.beta = given.get("alpha", 1), given.get("beta", 1)
        ctx.precision = given.get("precision")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (g,), (a, b), (of_a, of_b) = grads, ctx.saved_tensors, ctx.shapes
        found = {
            each: _gradient_of_added(_weighted(g, _conjugate(ctx.beta)), kind)
            for each, kind in ctx.added.items()
        }
        g = g.unsqueeze(-1) if len(of_b) == 1 else g
        g = g.unsqueeze(-2) if len(of_a) == 1 else g
        alpha = _conjugate(ctx.alpha)
        if b is not None:
            left = _gradient_of_left(g, b, ctx.form.is_transposed, ctx.precision)
            left = left.sum_to_size(of_a if len(of_a) > 1 else (1, *of_a)).reshape(of_a)
            found[ctx.form.a] = _weighted(left, alpha)
        if a is not None:
            right = _gradient_of_right(g, a, len(of_b), ctx.form.is_transposed, ctx.precision)
            rows = (1, *of_b) if ctx.form.is_transposed else (*of_b, 1)
            right = right.sum_to_size(of_b if len(of_b) > 1 else rows).reshape(of_b)
            found[ctx.form.b] = _weighted(right, alpha)
        return None, *(found.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        (a, b, output), of = ctx.saved_tensors, dict(zip(ctx.names, tangents[1:], strict=True))
        terms: list[torch.Tensor | None] = []
        for x, y in ((of[ctx.form.a], b), (a, of[ctx.form.b])):
            if x is not None and y is not None:
                how = (output.dtype, ctx.precision)
                values = ("linear", x, y, None, None, None) if ctx.form.is_transposed else ("matmul", x, y)
                terms.append(_weighted(call_overload(*values, *how), ctx.alpha))
        terms += [None if of[each] is None else _weighted(of[each], ctx.beta) for each in ctx.form.added]
        return _sum(terms, output)


def _gradient_of_left(g: torch.Tensor, b: torch.Tensor, is_transposed: bool, precision: Any) -> torch.Tensor:
    """Return the gradient of a, a matrix, before it is summed over expanded dimensions."""
    if is_transposed:
        rows = b if b.ndim > 1 else b.unsqueeze(0)
        return _multiplied(g, rows.conj(), b.dtype, precision)
    columns = b if b.ndim > 1 else b.unsqueeze(-1)
    return _multiplied(g, columns.mH, b.dtype, precision)


def _gradient_of_right(
    g: torch.Tensor, a: torch.Tensor, rank: int, is_transposed: bool, precision: Any
) -> torch.Tensor:
    """Return the gradient of b, of `rank` dimensions, as a matrix: one product where b serves a batch."""
    a = a if a.ndim > 1 else a.unsqueeze(0)
    if a.ndim > 2 and rank <= 2:
        a, g = a.flatten(0, -2), g.flatten(0, -2)
    if is_transposed:
        return _multiplied(g.mT, a.conj(), a.dtype, precision)
    return _multiplied(a.mH, g, a.dtype, precision)


class Grouped(Formula):
    """Differentiate `tritile::grouped_matmul` by products of the same groups, whatever they share.

    Where groups share rows of a, or columns of b, the gradient of the other operand is a product of groups
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
        how = (offs, None, None, None, ctx.precision)
        grad_a = None if b is None else call_overload("grouped_matmul", g.to(b.dtype), b.mT, *how)
        grad_b = None if a is None else call_overload("grouped_matmul", a.mT, g.to(a.dtype), *how)
        return None, grad_a, grad_b, *[None] * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        (a, b, offs, output), (_, of_a, of_b, *_) = ctx.saved_tensors, tangents
        how = (offs, None, None, output.dtype, ctx.precision)
        pairs = [(x, y) for x, y in ((of_a, b), (a, of_b)) if x is not None and y is not None]
        return _sum([call_overload("grouped_matmul", x, y, *how) for x, y in pairs], output)


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
