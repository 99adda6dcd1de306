"""Define `tritile::grouped_matmul`."""

from typing import Any

import torch

from tritile.ops.grouped import eager, grouped_of
from tritile.ops.groups import OP
from tritile.ops.operators.gradients import added, tangent_terms
from tritile.ops.operators.library import Formula, define, refuse


class Grouped(Formula):
    """Differentiate `tritile::grouped_matmul` by products of the same groups, whatever they share.

    Where groups share rows of a, or columns of b, the gradient of the other operand is a product of groups
    that share K, and the reverse.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep each operand that the gradient of the other needs, and offs."""
        _, a, b, offs, _, _, _, ctx.precision = inputs
        ctx.save_for_backward(
            a if ctx.needs_input_grad[2] else None, b if ctx.needs_input_grad[1] else None, offs
        )
        ctx.save_for_forward(a, b, offs, output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of a and b."""
        (g,), (a, b, offs) = grads, ctx.saved_tensors
        how = {"precision": ctx.precision}
        grad_a = None if b is None else GROUPED_MATMUL(g.to(b.dtype), b.mT, offs, **how)
        grad_b = None if a is None else GROUPED_MATMUL(a.mT, g.to(a.dtype), offs, **how)
        return None, grad_a, grad_b, *[None] * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """Return the tangent of the result."""
        (a, b, offs, output), (_, of_a, of_b, *_) = ctx.saved_tensors, tangents
        options = {"offs": offs, "out_dtype": output.dtype, "precision": ctx.precision}
        return added(tangent_terms(GROUPED_MATMUL, a, b, of_a, of_b, **options), output)


def _record(a: Any, b: Any, offs: Any, scale_a: Any, scale_b: Any, *options: Any) -> torch.Tensor:
    refuse(OP, ("scale_a", scale_a), ("scale_b", scale_b))
    return Grouped.of(GROUPED_MATMUL, a, b, offs, scale_a, scale_b, *options)


GROUPED_MATMUL = define(OP, eager, grouped_of, _record, operands=("a", "b"))
