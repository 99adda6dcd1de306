"""Define `tritile::permute`, which `tritile.transpose` and `tritile.contiguous` call too."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tritile.ops import permute as ops
from tritile.ops.checks import check_out, check_tensor
from tritile.ops.operators.batches import Batched
from tritile.ops.operators.library import Formula, batch, define, differentiate
from tritile.ops.operators.planning import plan_ahead


def _fake(input: torch.Tensor, dims: Sequence[int], *, out: torch.Tensor | None = None) -> torch.Tensor:
    check_tensor("permute", "input", input)
    order = ops.ordered(input.ndim, list(dims))
    shape = tuple(input.shape[d] for d in order)
    if out is not None:
        check_out("permute", out, shape, input.dtype, input)
    result = input.new_empty(shape) if out is None else out
    plan_ahead(input.device, lambda like: ops.described(like(input), like(result), order).problem)
    return result


class Permute(Formula):
    """Differentiate `tritile::permute`: by the inverse permutation backward, the same one forward."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep the order of dimensions."""
        _, x, dims = inputs
        ctx.dims = [dim % max(1, x.ndim) for dim in dims]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of x."""
        back = [ctx.dims.index(i) for i in range(len(ctx.dims))]
        return None, PERMUTE(grads[0], back), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        """Return the tangent of the copy."""
        return PERMUTE(tangents[1], ctx.dims)


def _batched(in_dims: tuple[Any, ...], x: torch.Tensor, dims: Sequence[int]) -> Batched:
    """Keep the batch in front."""
    ndim = x.ndim - 1
    return PERMUTE(x.movedim(in_dims[0], 0), [0, *(1 + dim % max(1, ndim) for dim in dims)]), 0


PERMUTE = define(
    "permute", "Tensor input, int[] dims", functools.partial(ops.eager, "permute"), _fake, into=True
)
differentiate(PERMUTE, lambda input, dims: Permute.of(PERMUTE, input, dims))
batch(PERMUTE, _batched)
