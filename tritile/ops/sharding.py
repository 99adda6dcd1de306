"""Sharding rules of the operators, for tensors of `torch.distributed.tensor`.

A rule is about one dimension of a device mesh: placements of the operands, and the placement of the result if
every rank calls the operator on its own shards. torch takes the rule that moves the least data. Rules follow
from names of dimensions: one that the result has may be sharded, in all tensors that have it. Products are
linear: with K sharded, or an operand that is a sum over ranks, the result is a sum over ranks (Partial), and
so must be what is added to it. No sum passes through an activation or a gate.

Each rank rounds its part of a sum to the result's dtype before the parts are added, as torch does. Operators
without a rule here compute on whole tensors: torch gathers what is sharded.
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


def _rules(result: Dims, factors: Sequence[Dims], added: Sequence[Dims] = (), linear: bool = False) -> Rules:
    def along(name: Any, tensor: Dims) -> Placement:
        return Shard(tensor.index(name)) if name in tensor else WHOLE

    tensors, added_sums = (*factors, *added), [SUM] * len(added)
    rules: Rules = [([WHOLE], [WHOLE] * len(tensors))]
    for name in result:
        if any(name in factor for factor in factors):
            rules.append(([along(name, result)], [along(name, tensor) for tensor in tensors]))
    if linear and all("k" in factor for factor in factors):
        rules.append(([SUM], [*(along("k", factor) for factor in factors), *added_sums]))
    for place in range(len(factors)) if linear else ():
        each = [SUM if i == place else WHOLE for i in range(len(factors))]
        rules.append(([SUM], [*each, *added_sums]))
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
    given = [(result[len(result) - t.ndim :], t.shape) for t in tensors if t is not None]
    return [
        tuple(name if size != 1 else None for name, size in zip(names, shape, strict=True))
        for names, shape in given
    ]


def matmul(a: Any, b: Any, **_: Any) -> Rules:
    result, *factors = _product(a.shape, b.shape)
    return _rules(result, factors, (), True)


def linear(
    x: Any, weight: Any, bias: Any = None, activation: str | None = None, residual: Any = None, **_: Any
) -> Rules:
    result, of_x, of_weight = _product(x.shape, tuple(weight.shape)[::-1])
    return _rules(result, (of_x, of_weight[::-1]), _added(result, bias, residual), activation is None)


def addmm(input: Any, a: Any, b: Any, *, activation: str | None = None, **_: Any) -> Rules:
    """The rules of `tritile::addmm` and `tritile::baddbmm`, whose first operand is added."""
    result, *factors = _product(a.shape, b.shape)
    rules = _rules(result, factors, _added(result, input), activation is None)
    return [(out, [added, *operands]) for out, (*operands, added) in rules]


def gated_linear(
    x: Any, weight_gate: Any, weight_up: Any, _: Any = "silu", bias_gate: Any = None, bias_up: Any = None,
    **__: Any,
) -> Rules:  # fmt: skip
    """Both weights, and both biases, are sharded alike."""
    result, of_x, of_weight = _product(x.shape, tuple(weight_gate.shape)[::-1])
    return _rules(result, (of_x, of_weight[::-1], of_weight[::-1]), _added(result, bias_gate, bias_up))


def permute(x: Any, dims: Sequence[int]) -> Rules:
    return _rules(tuple(dim % x.ndim for dim in dims), [tuple(range(x.ndim))], (), True)


def replicated(*given: Any, **_: Any) -> Rules:
    return _rules((), [()] * sum(hasattr(each, "ndim") for each in given))


RULES: Final[dict[str, Callable[..., Rules]]] = {
    "matmul": matmul, "linear": linear, "addmm": addmm, "baddbmm": addmm, "gated_linear": gated_linear,
    "permute": permute, "grouped_matmul": replicated, "scaled_matmul": replicated,
    "linear_quantized": replicated,
}  # fmt: skip


@functools.cache
def register() -> None:
    """Register the rules with torch, once `ops.operators` has defined the operators."""
    for name, rule in RULES.items():
        operator = getattr(torch.ops.tritile, name).default
        register_sharding(operator)(rule)
        # torch caches what it found by tensors and integers only, unless it is told about other arguments.
        names = [argument.name for argument in schema_of(operator).arguments if argument.kwarg_only]
        know_words(operator, names)
