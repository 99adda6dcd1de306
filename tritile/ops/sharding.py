"""Define sharding rules of the operators, for tensors of `torch.distributed.tensor`.

A rule lists, for one dimension of a device mesh, placements of the operands and the placement of the result
that they give where every rank calls the operator on its own shards. torch takes the option that moves the
least data. Rules follow from names of dimensions: one that the result has may be sharded, in all tensors that
have it. Products are linear. Where K is sharded, or an operand is a sum over ranks, the result is a sum
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

Rules = list[tuple[list[Placement], list[Placement]]]  # of results and of given tensors, for torch
Dims = tuple[Any, ...]  # the name of each dimension of a tensor, None for one that is whole on every rank

WHOLE: Final = Replicate()
SUM: Final = Partial()


def _rules(
    result: Dims, factors: Sequence[Dims], added: Sequence[Dims] = (), sums: Sequence[int] = (), k: Any = None
) -> Rules:
    """List the rules of a result of factors and of what is added to it.

    `sums` are the factors that may be a sum over ranks each. `k` is the dimension along which products are
    summed, None where it may not be sharded. Leave both out where an activation follows.
    """

    def along(name: Any, tensor: Dims) -> Placement:
        return Shard(tensor.index(name)) if name is not None and name in tensor else WHOLE

    rules: Rules = [([WHOLE], [WHOLE] * (len(factors) + len(added)))]
    for name in result:
        if any(name is not None and name in tensor for tensor in factors):
            rules.append(([along(name, result)], [along(name, tensor) for tensor in (*factors, *added)]))
    if k is not None:
        rules.append(([SUM], [*(along(k, tensor) for tensor in factors), *[SUM] * len(added)]))
    for place in sums:
        each: list[Placement] = [SUM if i == place else WHOLE for i in range(len(factors))]
        rules.append(([SUM], [*each, *[SUM] * len(added)]))
    return rules


def _product(a: Sequence[int], b: Sequence[int]) -> tuple[Dims, Dims, Dims]:
    """Name the dimensions of a product's result and operands. A batch dimension of size 1 has no name."""
    rank = max(len(a), len(b), 2) - 2

    def batch(shape: Sequence[int]) -> Dims:
        before = rank - len(shape[:-2])
        return tuple(before + i if size != 1 else None for i, size in enumerate(shape[:-2]))

    rows, columns = ("m",) * (len(a) > 1), ("n",) * (len(b) > 1)
    return (*range(rank), *rows, *columns), (*batch(a), *rows, "k"), (*batch(b), "k", *columns)


def _added(result: Dims, *tensors: Any) -> list[Dims]:
    """Name the dimensions of the tensors that broadcast to the result, None for those of size 1."""
    return [
        tuple(
            name if size != 1 else None
            for name, size in zip(result[len(result) - t.ndim :], t.shape, strict=True)
        )
        for t in tensors
        if t is not None
    ]


def matmul(a: Any, b: Any, **_: Any) -> Rules:
    """List the rules of `tritile::matmul`: batches, rows, columns, K, and sums of either operand."""
    result, *factors = _product(a.shape, b.shape)
    return _rules(result, factors, (), (0, 1), "k")


def linear(
    x: Any, weight: Any, bias: Any = None, activation: str | None = None, residual: Any = None, **_: Any
) -> Rules:
    """List the rules of `tritile::linear`."""
    result, of_x, of_weight = _product(x.shape, tuple(weight.shape)[::-1])
    sums = ((0, 1), "k") if activation is None else ()
    return _rules(result, (of_x, of_weight[::-1]), _added(result, bias, residual), *sums)


def addmm(input: Any, a: Any, b: Any, *, activation: str | None = None, **_: Any) -> Rules:
    """List the rules of `tritile::addmm` and `tritile::baddbmm`, whose first operand is added."""
    result, *factors = _product(a.shape, b.shape)
    sums = ((0, 1), "k") if activation is None else ()
    rules = _rules(result, factors, _added(result, input), *sums)
    return [(out, [added, *operands]) for out, (*operands, added) in rules]


def gated_linear(
    x: Any, weight_gate: Any, weight_up: Any, _: Any = "silu", bias_gate: Any = None, bias_up: Any = None,
    **__: Any,
) -> Rules:  # fmt: skip
    """List the rules of `tritile::gated_linear`, whose weights and biases are sharded alike."""
    result, of_x, of_weight = _product(x.shape, tuple(weight_gate.shape)[::-1])
    return _rules(result, (of_x, of_weight[::-1], of_weight[::-1]), _added(result, bias_gate, bias_up))


def permute(x: Any, dims: Sequence[int]) -> Rules:
    """List the rules of `tritile::permute`."""
    return _rules(tuple(dim % x.ndim for dim in dims), [tuple(range(x.ndim))], (), (0,))


# Dimensions of the result, of a and of b, and K, by the number of dimensions of a and b. Those that groups
# share, and the groups themselves, are whole on every rank.
_GROUPED: Final[dict[tuple[int, int], tuple[Dims, Dims, Dims, Any]]] = {
    (2, 3): ((None, "n"), (None, "k"), (None, "k", "n"), "k"),
    (3, 2): (("m", None), (None, "m", "k"), ("k", None), "k"),
    (2, 2): ((None, "m", "n"), ("m", None), (None, "n"), None),
}


def grouped_matmul(
    a: Any, b: Any, offs: Any = None, scale_a: Any = None, scale_b: Any = None, **_: Any
) -> Rules:
    """List the rules of `tritile::grouped_matmul`. With scales nothing is sharded."""
    if scale_a is not None or scale_b is not None:
        given = [tensor for tensor in (a, b, offs, scale_a, scale_b) if tensor is not None]
        return _rules((), [()] * len(given))
    if offs is None:
        return matmul(a, b)
    result, of_a, of_b, k = _GROUPED[a.ndim, b.ndim]
    return _rules(result, (of_a, of_b, ()), (), (0, 1), k)


def scaled_matmul(
    a: Any, b: Any, scale_a: Any, scale_b: Any, _: Any = None, bias: Any = None,
    activation: str | None = None, residual: Any = None, __: Any = False, zero_a: Any = None,
    zero_b: Any = None,
) -> Rules:  # fmt: skip
    """List the rules of `tritile::scaled_matmul`: rows, columns, and K unless scales are of a part of it."""
    by_k = [t.shape.numel() > 1 and t.shape[dim] > 1 for t, dim in ((scale_a, 1), (scale_b, 0))]
    many = [t for t in (scale_a, zero_a, scale_b, zero_b) if t is not None and t.shape.numel() > 1]
    m = "m" if all(t.shape[0] == a.shape[0] for t in many if t is scale_a or t is zero_a) else None
    n = "n" if all(t.shape[1] == b.shape[1] for t in many if t is scale_b or t is zero_b) else None
    k = "k" if activation is None and not any(by_k) else None
    names = ((scale_a, (m, None)), (scale_b, (None, n)), (zero_a, (m, None)), (zero_b, (None, n)))
    sides: list[Dims] = [dims if t.shape.numel() > 1 else () for t, dims in names if t is not None]
    added = _added((m, n), bias, residual)
    rules = _rules((m, n), [(m, k), (k, n), *sides], added, (), k)
    last = 2 + len(sides)  # zero points come behind what is added
    return [(out, [*each[:4], *each[last:], *each[4:last]]) for out, each in rules]


def linear_quantized(
    x: Any, packed: Any, scales: Any, zeros: Any = None, bias: Any = None, **_: Any
) -> Rules:
    """List the rules of `tritile::linear_quantized`, whose weight is whole on every rank."""
    result = (*range(x.ndim - 1), None)
    weight: list[Dims] = [()] * (2 if zeros is None else 3)
    return _rules(result, [result, *weight], _added(result, bias), (0,))


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
