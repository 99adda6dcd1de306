"""How operators run on tensors that are spread over ranks: sharding rules for `torch.distributed.tensor`.

Each rule tells, for one dimension of a device mesh, which placements of the operands give which placement
of the result where every rank calls the operator on what it holds; torch takes the one for which it must move
least, and moves that. Products are linear: where K is spread over ranks, or an operand is a sum over them,
the result is a sum too (Partial), and so is what is added to it. Activations and gates are not linear:
nothing passes them as a sum.

Results that are sums over ranks are rounded to the result's dtype before they are added, as torch's own are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from tritile.core.of_torch import know_words, schema_of

Placements = tuple[Placement, ...]
Option = tuple[Placement, Placements]  # of the result, and of operands
Rules = list[tuple[list[Placement], list[Placement]]]  # of all tensors given, as torch wants them

WHOLE: Final = Replicate()
SUM: Final = Partial()


def _aligned(dim: int, rank: int, shape: Sequence[int]) -> Placement:
    """The placement of a tensor that broadcasts to `rank` dimensions where `dim` of these is sharded."""
    own = dim - (rank - len(shape))
    return Shard(own) if own >= 0 and shape[own] != 1 else WHOLE


def _products(a: Sequence[int], b: Sequence[int]) -> list[Option]:
    """Options of `torch.matmul` of these shapes: batches, rows, columns, K, and sums of either operand."""
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
    """The same of x @ weight^T, whose result has the rank of x where weight is a matrix."""
    last = weight.ndim - 1

    def turned(placement: Placement) -> Placement:
        return Shard(last - placement.dim) if isinstance(placement, Shard) else placement

    options = _products(x.shape, tuple(weight.shape)[::-1])
    return [(out, (of_x, turned(of_weight))) for out, (of_x, of_weight) in options]


def _rules(options: Sequence[Option], rank: int = 0, added: Sequence[Any] = (), summed: bool = True) -> Rules:
    """Options with the tensors that are added to a result of this rank; without sums unless `summed`."""
    shapes = [tuple(tensor.shape) for tensor in added if tensor is not None]
    return [
        ([out], [*each, *(_aligned(out.dim, rank, s) if isinstance(out, Shard) else out for s in shapes)])
        for out, each in options
        if summed or out != SUM
    ]


def matmul(a: Any, b: Any, **_: Any) -> Rules:
    """Rules of `tritile::matmul`."""
    return _rules(_products(a.shape, b.shape))


def linear(
    x: Any, weight: Any, bias: Any = None, activation: str | None = None, residual: Any = None, **_: Any
) -> Rules:
    """Rules of `tritile::linear`."""
    rank = x.ndim - 2 + weight.ndim
    return _rules(_linears(x, weight), rank, (bias, residual), summed=activation is None)


def addmm(input: Any, a: Any, b: Any, *, activation: str | None = None, **_: Any) -> Rules:
    """Rules of `tritile::addmm` and `tritile::baddbmm`, whose first operand is the one that is added."""
    rules = _rules(_products(a.shape, b.shape), a.ndim, (input,), summed=activation is None)
    return [(out, [added, *operands]) for out, (*operands, added) in rules]


def gated_linear(
    x: Any, weight_gate: Any, weight_up: Any, _: Any = "silu", bias_gate: Any = None, bias_up: Any = None,
    **__: Any,
) -> Rules:  # fmt: skip
    """Rules of `tritile::gated_linear`, whose weights and biases are sharded alike."""
    options = [(out, (of_x, of_both, of_both)) for out, (of_x, of_both) in _linears(x, weight_gate)]
    return _rules(options, x.ndim, (bias_gate, bias_up), summed=False)


def permute(x: Any, dims: Sequence[int]) -> Rules:
    """Rules of `tritile::permute`."""
    options: list[Option] = [(WHOLE, (WHOLE,)), (SUM, (SUM,))]
    return _rules(options + [(Shard(to), (Shard(dim % x.ndim),)) for to, dim in enumerate(dims)])


def grouped_matmul(
    a: Any, b: Any, offs: Any = None, scale_a: Any = None, scale_b: Any = None, **_: Any
) -> Rules:
    """Rules of `tritile::grouped_matmul`: every rank has all groups, whose sizes it knows.

    What groups share is on every rank; rows, columns or K that each has for itself may be spread. Where there
    are scales nothing is.
    """
    if scale_a is not None or scale_b is not None:
        given = [tensor for tensor in (a, b, offs, scale_a, scale_b) if tensor is not None]
        return _rules([(WHOLE, (WHOLE,) * len(given))])
    if a.ndim == b.ndim == 3:
        options = _products(a.shape, b.shape)
    else:
        options = [(WHOLE, (WHOLE, WHOLE)), (SUM, (SUM, WHOLE)), (SUM, (WHOLE, SUM))]
        rank = 2 if a.ndim + b.ndim == 5 else 3
        if b.ndim == 3 or a.ndim == 2 == b.ndim:  # columns are not shared by groups
            options.append((Shard(rank - 1), (WHOLE, Shard(b.ndim - 1))))
        if a.ndim == 3 or a.ndim == 2 == b.ndim:  # nor are rows
            options.append((Shard(rank - 2), (Shard(a.ndim - 2), WHOLE)))
        if a.ndim + b.ndim == 5:  # nor is K
            options.append((SUM, (Shard(a.ndim - 1), Shard(b.ndim - 2))))
    if offs is not None:
        options = [(out, (*operands, WHOLE)) for out, operands in options]
    return _rules(options)


def _along(scale: Any, dim: int, size: int) -> Placement | None:
    """The placement of scales where this dimension is sharded; None where several of it share one."""
    if scale is None or scale.shape.numel() == 1:
        return WHOLE
    return Shard(dim) if scale.shape[dim] == size else None


def scaled_matmul(
    a: Any, b: Any, scale_a: Any, scale_b: Any, _: Any = None, bias: Any = None,
    activation: str | None = None, residual: Any = None, __: Any = False, zero_a: Any = None,
    zero_b: Any = None,
) -> Rules:  # fmt: skip
    """Rules of `tritile::scaled_matmul`: rows, columns, and K where no scale is of a part of it."""
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
    """Rules of `tritile::linear_quantized`, whose weight every rank has whole."""
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
    """Tell torch the rules of all operators that have one, which `ops.operators` must have defined."""
    for name, rule in RULES.items():
        operator = getattr(torch.ops.tritile, name).default
        register_sharding(operator)(rule)
        # What torch has found it keeps, by tensors and whole numbers alone unless it is told of the rest.
        words = [argument.name for argument in schema_of(operator).arguments if argument.kwarg_only]
        know_words(operator, words)
