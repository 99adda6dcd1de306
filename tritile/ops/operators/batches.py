"""Define how operators handle a batch that torch.vmap makes: as a batch of their own, without a loop.

A rule takes in_dims, which holds each argument's batch dimension or None, and all arguments. It returns the
result and its batch dimension.
"""

from typing import Any

import torch

from tritile.core.epilogue import activated

Dims = tuple[Any, ...]
Batched = tuple[torch.Tensor, int]


def first(tensor: torch.Tensor, dim: int | None, rank: int) -> torch.Tensor:
    """Move a tensor's batch to the front, followed by ones until the rest has this rank.

    A tensor without a batch is returned as it is.
    """
    if dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    missing = rank - (tensor.ndim - 1)
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:]) if missing > 0 else tensor


def batched_matmul(in_dims: Dims, a: torch.Tensor, b: torch.Tensor, *options: Any) -> Batched:
    """Batch `tritile::matmul`: one product where one operand serves the whole batch."""
    out_dtype, precision = options

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        op = torch.ops.tritile.matmul.default
        return op(left, right, out_dtype=out_dtype, precision=precision)

    of_a, of_b, *_ = in_dims
    if of_b is None and b.ndim <= 2:
        return product(a.movedim(of_a, 0), b), 0
    if of_a is None and b.ndim == 2:  # the batch of vectors is a matrix
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


def _lifted(in_dims: Dims, values: tuple[Any, ...], rank: int) -> list[Any]:
    """Prepare tensors that broadcast to a result of this rank: move each batch in front of its dimensions."""
    return [
        value if dim is None else first(value, dim, rank) for value, dim in zip(values, in_dims, strict=True)
    ]


def batched_linear(
    in_dims: Dims, x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: Any, residual: Any,
    *options: Any,
) -> Batched:  # fmt: skip
    """Batch `tritile::linear`. With a batch of weights, torch finishes a batch of products."""
    of_x, of_weight, of_bias, _, of_residual, *_ = in_dims
    rank = x.ndim - (of_x is not None) - (weight.ndim - (of_weight is not None) == 1)
    bias, residual = _lifted((of_bias, of_residual), (bias, residual), rank)
    if of_weight is None and of_x is not None:
        op = torch.ops.tritile.linear.default
        rest = {"residual": residual, "out_dtype": options[0], "precision": options[1]}
        return op(x.movedim(of_x, 0), weight, bias, activation=activation, **rest), 0
    if of_weight is not None:
        matrices = weight.movedim(of_weight, 0)
        matrices = matrices.mT if matrices.ndim == 3 else matrices
        out, dim = batched_matmul((of_x, 0), x, matrices, *options)
        out = out.movedim(dim, 0)
    else:  # only bias or residual has a batch
        op = torch.ops.tritile.matmul.default
        out = op(x, weight.t(), out_dtype=options[0], precision=options[1]).unsqueeze(0)
    out = finished(out, bias, activation, residual)
    return out, 0


def finished(sums: torch.Tensor, bias: Any, activation: Any, residual: Any) -> torch.Tensor:
    """Return activation(sums + bias) + residual, computed by torch in the dtype of sums."""
    y = sums if bias is None else (sums + bias).to(sums.dtype)
    y = activated(y, activation or "")
    return y if residual is None else (y + residual).to(sums.dtype)


def batched_addmm(in_dims: Dims, input: Any, a: torch.Tensor, b: torch.Tensor, *options: Any) -> Batched:
    """Batch `tritile::addmm` as `baddbmm`, with operands that have no batch expanded over it."""
    size = next(t.shape[d] for t, d in zip((input, a, b), in_dims, strict=False) if d is not None)
    (input,) = _lifted(in_dims[:1], (input,), 2)
    a, b = (
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((a, b), in_dims[1:3], strict=True)
    )
    return _baddbmm(input, a, b, options), 0


def _baddbmm(input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, options: tuple[Any, ...]) -> torch.Tensor:
    names = ("beta", "alpha", "activation", "out_dtype", "precision")
    return torch.ops.tritile.baddbmm.default(input, a, b, **dict(zip(names, options, strict=True)))


def batched_baddbmm(in_dims: Dims, input: Any, a: torch.Tensor, b: torch.Tensor, *options: Any) -> Batched:
    """Batch `tritile::baddbmm`: both batches become one."""
    of_input, *of_both = in_dims[:3]
    size = next(t.shape[d] for t, d in zip((input, a, b), in_dims, strict=False) if d is not None)
    a, b = (
        (t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)
        for t, dim in zip((a, b), of_both, strict=True)
    )
    batch = a.shape[0] // size if size else 0
    (input,) = _lifted((of_input,), (input,), 3)
    if input.ndim >= 3:  # has a batch of vmap, of baddbmm or both
        input = input.expand(size, batch, *input.shape[-2:]).flatten(0, 1)
    return _baddbmm(input, a, b, options).unflatten(0, (size, batch)), 0


def batched_gated(
    in_dims: Dims, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Any, bias_gate: Any,
    bias_up: Any, *options: Any,
) -> Batched:  # fmt: skip
    """Batch `tritile::gated_linear`. With a batch of weights, torch joins two products."""
    of_x, of_gate, of_up, _, of_bias_gate, of_bias_up, *_ = in_dims
    rank = x.ndim - (of_x is not None)
    if of_x is not None and of_gate is None and of_up is None:
        biases = _lifted((of_bias_gate, of_bias_up), (bias_gate, bias_up), rank)
        names = ("bias_gate", "bias_up", "out_dtype", "precision")
        named = dict(zip(names, (*biases, *options), strict=True))
        op = torch.ops.tritile.gated_linear.default
        return op(x.movedim(of_x, 0), gate, up, activation=activation, **named), 0

    def part(weight: torch.Tensor, dim: int | None, bias: Any, of_bias: int | None, how: Any) -> torch.Tensor:
        dims = (of_x, dim, of_bias, None, None)
        if any(d is not None for d in dims):
            return batched_linear(dims, x, weight, bias, how, None, *options)[0]
        linear = torch.ops.tritile.linear.default
        return linear(x, weight, bias, activation=how, out_dtype=options[0], precision=options[1])

    return part(gate, of_gate, bias_gate, of_bias_gate, activation) * part(
        up, of_up, bias_up, of_bias_up, None
    ), 0
