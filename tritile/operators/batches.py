"""How operators go over a batch that torch.vmap makes: as a batch of theirs, without a loop.

Each rule takes in_dims, which of each argument's dimensions is the batch or None, and all arguments; it gives
the result, and which of its dimensions is the batch.
"""

from typing import Any

import torch

Dims = tuple[Any, ...]
Batched = tuple[torch.Tensor, int]


def first(tensor: torch.Tensor, dim: int | None, rank: int) -> torch.Tensor:
    """A tensor with its batch in front, and ones after it until what it has besides is of this rank.

    One without a batch stays as it is.
    """
    if dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    missing = rank - (tensor.ndim - 1)
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:]) if missing > 0 else tensor


def batched_matmul(in_dims: Dims, a: torch.Tensor, b: torch.Tensor, *words: Any) -> Batched:
    """The rule of `tritile::matmul`. What all of a batch is multiplied by is one operand of one product."""
    out_dtype, precision = words

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        op = torch.ops.tritile.matmul.default
        return op(left, right, out_dtype=out_dtype, precision=precision)

    of_a, of_b, *_ = in_dims
    if of_b is None and b.ndim <= 2:
        return product(a.movedim(of_a, 0), b), 0
    if of_a is None and b.ndim == 2:  # vectors, which lie side by side as a matrix
        out = product(a, b.movedim(of_b, -1))
        return out, out.ndim - 1
    ranks = [tensor.ndim - (dim is not None) for tensor, dim in ((a, of_a), (b, of_b))]
    left = a.movedim(of_a, 0) if of_a is not None else a
    right = b.movedim(of_b, 0) if of_b is not None else b
    left = left.unsqueeze(-2) if ranks[0] == 1 else left
    right = right.unsqueeze(-1) if ranks[1] == 1 else right
    rank = max(2, *ranks)
    left = left if of_a is None else first(left, 0, rank)
    right = right if of_b is None else first(right, 0, rank)
    out = product(left, right)
    out = out.squeeze(-2) if ranks[0] == 1 else out
    return out.squeeze(-1) if ranks[1] == 1 else out, 0
