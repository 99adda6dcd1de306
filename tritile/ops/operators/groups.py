"""Define `tritile::grouped_matmul`."""

from typing import Any

import torch

from tritile.core.problem import Tiled
from tritile.ops import groups
from tritile.ops.described import described
from tritile.ops.grouped import eager
from tritile.ops.groups import OP, Operands
from tritile.ops.operators.gradients import added, tangent_terms
from tritile.ops.operators.library import Formula, autocast, define, differentiate, refuse
from tritile.ops.operators.planning import StandIn, plan_ahead
from tritile.ops.operators.products import refuse_fp8
from tritile.ops.products import check_precision


def _fake(
    a: Any, b: Any, offs: Any = None, scale_a: Any = None, scale_b: Any = None, *, out_dtype: Any = None,
    precision: Any = None, out: Any = None,
) -> torch.Tensor:  # fmt: skip
    of = Operands(a, b, offs, scale_a, scale_b)
    shape, dtype, how = groups.result_of(of, out, out_dtype, precision)
    result = a.new_empty(shape, dtype=dtype) if out is None else out

    def problem(like: StandIn) -> Tiled:
        parts = Operands(*(None if tensor is None else like(tensor).resolve_neg() for tensor in of))
        if offs is None and scale_a is None:  # a plain batch
            return described(parts.a, parts.b, like(result), check_precision(OP, a.dtype, precision)).problem
        return groups.described(parts, like(result), how).problem

    plan_ahead(a.device, problem)
    return result


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
    refuse_fp8(OP, a=a, b=b)
    refuse(OP, ("scale_a", scale_a), ("scale_b", scale_b))
    return Grouped.of(GROUPED_MATMUL, a, b, offs, scale_a, scale_b, *options)


GROUPED_MATMUL = define(
    OP,
    "Tensor a, Tensor b, Tensor? offs=None, Tensor? scale_a=None, Tensor? scale_b=None, *, "
    "ScalarType? out_dtype=None, str? precision=None",
    eager,
    _fake,
    into=True,
)
differentiate(GROUPED_MATMUL, _record)
autocast(GROUPED_MATMUL, "a", "b")
