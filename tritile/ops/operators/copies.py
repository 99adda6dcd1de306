"""Define `tritile::permute`, which `tritile.transpose` and `tritile.contiguous` call too."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tritile.core.of_torch import OpOverload
from tritile.ops.operators.batches import Batched
from tritile.ops.operators.library import Formula, define
from tritile.ops.permute import eager, permute_of


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


PERMUTE: OpOverload = define(
    "permute",
    functools.partial(eager, "permute"),
    permute_of,
    lambda input, dims: Permute.of(PERMUTE, input, dims),
    _batched,
)
