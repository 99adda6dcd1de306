"""Define sharding rules of the operators, for tensors of `torch.distributed.tensor`.

A rule lists, for one dimension of a device mesh, placements of the operands and the placement of the result
that they give where every rank calls the operator on its own shards. torch takes the option that moves the
least data. Products are linear. Where K is sharded, or an operand is a sum over ranks, the result is a sum
(Partial), and so is what is added to it. Activations and gates are not linear: no sum passes through them.

Each rank rounds its part of a sum to the result's dtype before the parts are added, as torch does.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from tritile.core.of_torch import know_words, schema_of

Placements = tuple[Placement, ...]
Option = tuple[Placement, Placements]  # of the result and of the operands
Rules = list[tuple[list[Placement], list[Placement]]]  # of results and of given tensors, for torch

WHOLE: Final = Replicate()
SUM: Final = Partial()


def _aligned(dim: int, rank: int, shape: Sequence[int]) -> Placement:
    """Return the placement of a tensor that broadcasts to `rank` dimensions, of which `dim` is sharded."""
    own = dim - (rank - len(shape))
    return Shard(own) if own >= 0 and shape[own] != 1 else WHOLE


def _products(a: Sequence[int], b: Sequence[int]) -> list[Option]:
    """List the options of `torch.matmul`: batches, rows, columns, K, and sums of either operand."""
    batch = max(len(a), len(b), 2) - 2
    options: list[Option] = [(WHOLE, (WHOLE, WHOLE))]
    for dim in range(batch):
        sides = _aligned(dim, batch, a[:-2]), _aligned(dim, batch, b[:-2])
        if sides != (WHOLE, WHOLE):
            options.append((Shard(dim), sides))
    if len(a) > 1:
        options.append((Shard(batch), (Shard(len(a) - 2), WHOLE)))
    if len(b) > 1:
        options.append((Shard(batch + (len(a) > 1)), (WHOLE, Shard(len(b) - 1))))
    options.append((SUM, (Shard(len(a) - 1), Shard(max(len(b) - 2, 0)))))
    return [*options, (SUM, (SUM, WHOLE)), (SUM, (WHOLE, SUM))]


def _linears(x: Any, weight: Any) -> list[Option]:
    """List the options of x @ weight^T, whose result has the rank of x where weight is a matrix."""
    last = weight.ndim - 1

    def transposed(placement: Placement) -> Placement:
        return Shard(last - placement.dim) if isinstance(placement, Shard) else placement

    options = _products(x.shape, tuple(weight.shape)[::-1])
    return [(out, (of_x, transposed(of_weight))) for out, (of_x, of_weight) in options]


def _rules(options: Sequence[Option], rank: int = 0, added: Sequence[Any] = (), summed: bool = True) -> Rules:
    """Extend options by the tensors that are added to a result of this rank; drop sums unless `summed`."""
    shapes = [tuple(tensor.shape) for tensor in added if tensor is not None]
    return [
        ([out], [*each, *(_aligned(out.dim, rank, s) if isinstance(out, Shard) else out for s in shapes)])
        for out, each in options
        if summed or out != SUM
    ]


def matmul(a: Any, b: Any, **_: Any) -> Rules:
    """List the rules of `tritile::matmul`."""
    return _rules(_products(a.shape, b.shape))


def linear(
    x: Any, weight: Any, bias: Any = None, activation: str | None = None, residual: Any = None, **_: Any
) -> Rules:
    """List the rules of `tritile::linear`."""
    rank = x.ndim - 2 + weight.ndim
    return _rules(_linears(x, weight), rank, (bias, residual), summed=activation is None)


def addmm(input: Any, a: Any, b: Any, *, activation: str | None = None, **_: Any) -> Rules:
    """List the rules of `tritile::addmm` and `tritile::baddbmm`, whose first operand is added."""
    rules = _rules(_products(a.shape, b.shape), a.ndim, (input,), summed=activation is None)
    return [(out, [added, *operands]) for out, (*operands, added) in rules]


def gated_linear(
    x: Any, weight_gate: Any, weight_up: Any, _: Any = "silu", bias_gate: Any = None, bias_up: Any = None,
    **__: Any,
) -> Rules:  # fmt: skip
    """List the rules of `tritile::gated_linear`, whose weights and biases are sharded alike."""
    options = [(out, (of_x, of_both, of_both)) for out, (of_x, of_both) in _linears(x, weight_gate)]
    return _rules(options, x.ndim, (bias_gate, bias_up), summed=False)


def permute(x: Any, dims: Sequence[int]) -> Rules:
    """List the rules of `tritile::permute`."""
    options: list[Option] = [(WHOLE, (WHOLE,)), (SUM, (SUM,))]
    return _rules(options + [(Shard(to), (Shard(dim % x.ndim),)) for to, dim in enumerate(dims)])


def grouped_matmul(
    a: Any, b: Any, offs: Any = None, scale_a: Any = None, scale_b: Any = None, **_: Any
) -> Rules:
    """List the rules of `tritile::grouped_matmul`, all of whose groups are on every rank.

    The dimension that groups share is whole on every rank. Rows, columns or K that each group has for itself
    may be sharded. With scales nothing is sharded.
    """
    if scale_a is not None or scale_b is not None:
        given = [tensor for tensor in (a, b, offs, scale_a, scale_b) if tensor is not None]
        return _rules([(WHOLE, (WHOLE,) * len(given))])
    if a.ndim == b.ndim == 3:
        options = _products(a.shape, b.shape)
    else:
        options = [(WHOLE, (WHOLE, WHOLE)), (SUM, (SUM, WHOLE)), (SUM, (WHOLE, SUM))]
        rank = 2 if a.ndim + b.ndim == 5 else 3
        if b.ndim == 3 or a.ndim == 2 == b.ndim:  # groups do not share columns
            options.append((Shard(rank - 1), (WHOLE, Shard(b.ndim - 1))))
        if a.ndim == 3 or a.ndim == 2 == b.ndim:  # groups do not share rows
            options.append((Shard(rank - 2), (Shard(a.ndim - 2), WHOLE)))
        if a.ndim + b.ndim == 5:  # groups do not share K
            options.append((SUM, (Shard(a.ndim - 1), Shard(b.ndim - 2))))
    if offs is not None:
        options = [(out, (*operands, WHOLE)) for out, operands in options]
    return _rules(options)


def _along(scale: Any, dim: int, size: int) -> Placement | None:
    """Return the placement of scales where a dimension is sharded; None where several elements share one."""
    if scale is None or scale.shape.numel() == 1:
        return WHOLE
    return Shard(dim) if scale.shape[dim] == size else None


def scaled_matmul(
    a: Any, b: Any, scale_a: Any, scale_b: Any, _: Any = None, bias: Any = None,
    activation: str | None = None, residual: Any = None, __: Any = False, zero_a: Any = None,
    zero_b: Any = None,
) -> Rules:  # fmt: skip
    """List the rules of `tritile::scaled_matmul`: rows, columns, and K unless scales are of a part of it."""
    rows = [_along(scale, 0, a.shape[0]) for scale in (scale_a, zero_a)]
    columns = [_along(scale, 1, b.shape[1]) for scale in (scale_b, zero_b)]
    options: list[tuple[Placement, tuple[Placement | None, ...]]] = [(WHOLE, (WHOLE,) * 6)]
    options.append((Shard(0), (Shard(0), WHOLE, rows[0], WHOLE, rows[1], WHOLE)))
    options.append((Shard(1), (WHOLE, Shard(1), WHOLE, columns[0], WHOLE, columns[1])))
    by_k = [scale.shape.numel() > 1 and scale.shape[dim] > 1 for scale, dim in ((scale_a, 1), (scale_b, 0))]
    if activation is None and not any(by_k):
        options.append((SUM, (Shard(1), Shard(0), *[WHOLE] * 4)))
    rules: Rules = []
    for out, each in options:
        placements = [placement for placement in each if placement is not None]
        if len(placements) == len(each):
            ((_, tensors),) = _rules([(out, tuple(placements[:4]))], 2, (bias, residual))
            zeros = zip((zero_a, zero_b), placements[4:], strict=True)
            rules.append(([out], [*tensors, *(placement for zero, placement in zeros if zero is not None)]))
    return rules


def linear_quantized(
    x: Any, packed: Any, scales: Any, zeros: Any = None, bias: Any = None, **_: Any
) -> Rules:
    """List the rules of `tritile::linear_quantized`, whose weight is whole on every rank."""
    weight = (WHOLE,) * (2 if zeros is None else 3)
    options: list[Option] = [(Shard(dim), (Shard(dim), *weight)) for dim in range(x.ndim - 1)]
    return _rules([(WHOLE, (WHOLE, *weight)), *options, (SUM, (SUM, *weight))], x.ndim, (bias,))


RULES: Final[dict[str, Callable[..., Rules]]] = {
    "matmul": matmul,
    "linear": linear,
    "addmm": addmm,
    "baddbmm": addmm,
    "gated_linear": gated_linear,
    "permute": permute,
    "grouped_matmul": grouped_matmul,
    "scaled_matmul": scaled_matmul,
    "linear_quantized": linear_quantized,
}


@functools.cache
def register() -> None:
    """Register the rules with torch, once `ops.operators` has defined the operators."""
    for name, rule in RULES.items():
        operator = getattr(torch.ops.tritile, name).default
        register_sharding(operator)(rule)
        # torch caches what it found by tensors and integers only, unless it is told about other arguments.
        names = [argument.name for argument in schema_of(operator).arguments if argument.kwarg_only]
        know_words(operator, names)
