"""Define how operators handle a batch that torch.vmap makes: as a batch of their own, without a loop.

A rule takes in_dims, which holds each argument's batch dimension or None, and all arguments. It returns the
result and its batch dimension.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tritile.core.epilogue import activated
from tritile.errors import UnsupportedError
from tritile.ops.dispatch import call_overload

Dims = tuple[Any, ...]
Batched = tuple[torch.Tensor, int]


def _first(tensor: Any, dim: int | None, rank: int) -> Any:
    """Move a tensor's batch to the front, followed by ones until the rest has this rank.

    A tensor without a batch is returned as it is.
    """
    if dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    missing = rank - (tensor.ndim - 1)
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:]) if missing > 0 else tensor


def _factors(in_dims: Dims, input: Any, a: Any, b: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the size of the batch, and the factors with it in front, expanded if they have none."""
    size = next(t.shape[d] for t, d in zip((input, a, b), in_dims, strict=False) if d is not None)
    a, b = (
        t.expand(size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip((a, b), in_dims[1:3], strict=True)
    )
    return size, a, b


def _finished(sums: torch.Tensor, bias: Any, activation: Any, residual: Any) -> torch.Tensor:
    """Return activation(sums + bias) + residual, computed by torch in the dtype of sums."""
    y = sums if bias is None else (sums + bias).to(sums.dtype)
    y = activated(y, activation or "")
    return y if residual is None else (y + residual).to(sums.dtype)


def batched_matmul(in_dims: Dims, a: torch.Tensor, b: torch.Tensor, *options: Any) -> Batched:
    """Batch `tritile::matmul`: one product if one operand serves the whole batch."""
    of_a, of_b, *_ = in_dims
    if of_b is None and b.ndim <= 2:
        return call_overload("matmul", a.movedim(of_a, 0), b, *options), 0
    if of_a is None and b.ndim == 2:  # the batch of vectors is a matrix
        out = call_overload("matmul", a, b.movedim(of_b, -1), *options)
        return out, out.ndim - 1
    factors, vectors, rank = [], [], 2
    for tensor, dim, at in ((a, of_a, -2), (b, of_b, -1)):
        own = tensor.ndim - (dim is not None)
        front = tensor if dim is None else tensor.movedim(dim, 0)
        factors.append((front.unsqueeze(at) if own == 1 else front, None if dim is None else 0))
        vectors += [at] if own == 1 else []
        rank = max(rank, own)
    out = call_overload("matmul", *(_first(*factor, rank) for factor in factors), *options)
    for at in vectors:
        out = out.squeeze(at)
    return out, 0


def batched_linear(
    in_dims: Dims,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    activation: Any,
    residual: Any,
    *options: Any,
) -> Batched:
    """Batch `tritile::linear`. With a batch of weights, torch finishes a batch of products."""
    of_x, of_weight, of_bias, _, of_residual, *_ = in_dims
    rank = x.ndim - (of_x is not None) - (weight.ndim - (of_weight is not None) == 1)
    bias, residual = _first(bias, of_bias, rank), _first(residual, of_residual, rank)
    if of_weight is None and of_x is not None:
        return call_overload("linear", x.movedim(of_x, 0), weight, bias, activation, residual, *options), 0
    if of_weight is not None:
        matrices = weight.movedim(of_weight, 0)
        matrices = matrices.mT if matrices.ndim == 3 else matrices
        out, dim = batched_matmul((of_x, 0), x, matrices, *options)
        out = out.movedim(dim, 0)
    else:  # only bias or residual has a batch
        out = call_overload("matmul", x, weight.t(), *options).unsqueeze(0)
    return _finished(out, bias, activation, residual), 0


def batched_addmm(in_dims: Dims, input: Any, a: torch.Tensor, b: torch.Tensor, *options: Any) -> Batched:
    """Batch `tritile::addmm` as `baddbmm`, with operands that have no batch expanded over it."""
    _, a, b = _factors(in_dims, input, a, b)
    return call_overload("baddbmm", _first(input, in_dims[0], 2), a, b, *options), 0


def batched_baddbmm(in_dims: Dims, input: Any, a: torch.Tensor, b: torch.Tensor, *options: Any) -> Batched:
    size, a, b = _factors(in_dims, input, a, b)
    batch, a, b = a.shape[1], a.flatten(0, 1), b.flatten(0, 1)
    input = _first(input, in_dims[0], 3)
    if input.ndim >= 3:  # has a batch of vmap, of baddbmm or both
        input = input.expand(size, batch, *input.shape[-2:]).flatten(0, 1)
    return call_overload("baddbmm", input, a, b, *options).unflatten(0, (size, batch)), 0


def batched_gated(
    in_dims: Dims, x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: Any, bias_gate: Any,
    bias_up: Any, *options: Any,
) -> Batched:  # fmt: skip
    """Batch `tritile::gated_linear`. With a batch of weights, torch joins two products."""
    of_x, of_gate, of_up, _, of_bias_gate, of_bias_up, *_ = in_dims
    if of_x is not None and of_gate is None and of_up is None:
        biases = _first(bias_gate, of_bias_gate, x.ndim - 1), _first(bias_up, of_bias_up, x.ndim - 1)
        return call_overload("gated_linear", x.movedim(of_x, 0), gate, up, activation, *biases, *options), 0

    def part(weight: torch.Tensor, dim: int | None, bias: Any, of_bias: int | None, act: Any) -> torch.Tensor:
        dims = (of_x, dim, of_bias, None, None)
        if any(d is not None for d in dims):
            return batched_linear(dims, x, weight, bias, act, None, *options)[0]
        return call_overload("linear", x, weight, bias, act, None, *options)

    of_gate_part = part(gate, of_gate, bias_gate, of_bias_gate, activation)
    return of_gate_part * part(up, of_up, bias_up, of_bias_up, None), 0


def batched_quantized(
    in_dims: Dims, x: torch.Tensor, packed: Any, scales: Any, zeros: Any, bias: Any, *options: Any
) -> Batched:
    """Batch by rows: all rows make one product. Raise UnsupportedError for a batch of weights."""
    of_x, *of_parts, of_bias = in_dims[:5]
    if any(dim is not None for dim in of_parts):
        raise UnsupportedError("linear: vmap gives a batch of quantized weights: expected one weight for all")
    rows = x.unsqueeze(0) if of_x is None else x.movedim(of_x, 0)
    if of_bias is None:
        return call_overload("linear_quantized", rows, packed, scales, zeros, bias, *options), 0
    sums = call_overload("linear_quantized", rows, packed, scales, zeros, None, *options)
    return _finished(sums, _first(bias, of_bias, rows.ndim - 1), "", None), 0


def batched_permute(in_dims: Dims, x: torch.Tensor, dims: Sequence[int]) -> Batched:
    """Keep the batch in front."""
    behind = [1 + dim % max(1, x.ndim - 1) for dim in dims]
    return call_overload("permute", x.movedim(in_dims[0], 0), [0, *behind]), 0
