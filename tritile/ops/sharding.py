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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from tritile.core.torch_private import know_words, schema_of
from tritile.ops.dispatch import NAMES, TENSORS, WEIGHTS, operator_of

Rules = list[tuple[list[Placement], list[Placement]]]  # of the result and of the tensors, for torch
Dims = tuple[Any, ...]  # the name of each dimension of a tensor, None for one that is whole on every rank

WHOLE: Final = Replicate()
SUM: Final = Partial()


def _rules(result: Dims, tensors: Mapping[str, Dims], factors: Sequence[str], linear: bool) -> Rules:
    """Return the rules of a product of `factors`, to which the other tensors are added."""

    def along(name: Any, tensor: Dims) -> Placement:
        return Shard(tensor.index(name)) if name in tensor else WHOLE

    rules: Rules = [([WHOLE], [WHOLE] * len(tensors))]
    for name in result:
        if any(name in tensors[factor] for factor in factors):
            rules.append(([along(name, result)], [along(name, tensor) for tensor in tensors.values()]))
    if linear and all("k" in tensors[factor] for factor in factors):
        each = [along("k", tensor) if role in factors else SUM for role, tensor in tensors.items()]
        rules.append(([SUM], each))
    for one in factors if linear else ():
        rules.append(([SUM], [WHOLE if role in factors and role != one else SUM for role in tensors]))
    return rules


def _product(a: Sequence[int], b: Sequence[int]) -> tuple[Dims, Dims, Dims]:
    """Name the dimensions of a product's result and operands. A batch dimension of size 1 has no name."""
    rank = max(len(a), len(b), 2) - 2

    def batch(shape: Sequence[int]) -> Dims:
        before = rank - len(shape[:-2])
        return tuple(before + i if size != 1 else None for i, size in enumerate(shape[:-2]))

    rows, columns = ("m",) * (len(a) > 1), ("n",) * (len(b) > 1)
    return (*range(rank), *rows, *columns), (*batch(a), *rows, "k"), (*batch(b), "k", *columns)


def product(op: str, *args: Any, **named: Any) -> Rules:
    """Return the rules of a product. Both weights of a gated one, and both biases, are sharded alike."""
    arguments = dict(zip(NAMES[op], args, strict=False)) | named
    shapes = {role: arguments[name].shape for role, name in TENSORS[op] if arguments.get(name) is not None}
    back = -1 if op in WEIGHTS else 1
    result, of_a, of_b = _product(shapes["a"], tuple(shapes["b"])[::back])
    factors = {"a": of_a, "b": of_b[::back], "up": of_b[::back]}
    tensors = {
        # what is added broadcasts to the result
        role: factors[role]
        if role in factors
        else tuple(
            name if size != 1 else None
            for name, size in zip(result[len(result) - len(shape) :], shape, strict=True)
        )
        for role, shape in shapes.items()
    }
    linear = "up" not in shapes and arguments.get("activation") is None
    return _rules(result, tensors, [role for role in shapes if role in factors], linear)


def permute(x: Any, dims: Sequence[int]) -> Rules:
    return _rules(tuple(dim % x.ndim for dim in dims), {"x": tuple(range(x.ndim))}, ["x"], True)


def replicated(*args: Any, **named: Any) -> Rules:
    return [([WHOLE], [WHOLE] * sum(hasattr(each, "ndim") for each in args))]


_PRODUCTS: Final = ("matmul", "linear", "addmm", "baddbmm", "gated_linear")
RULES: Final[dict[str, Callable[..., Rules]]] = {
    **{op: functools.partial(product, op) for op in _PRODUCTS},
    "permute": permute,
    **dict.fromkeys(("grouped_matmul", "scaled_matmul", "linear_quantized"), replicated),
}


@functools.cache
def register() -> None:
    """Register the rules with torch, once `ops.operators` has defined the operators."""
    for name, rule in RULES.items():
        for operator in {operator_of(name, invariant).default for invariant in (False, True)}:
            register_sharding(operator)(rule)
            # torch caches what it found by tensors and integers only, unless other arguments are named.
            names = [argument.name for argument in schema_of(operator).arguments if argument.kwarg_only]
            know_words(operator, names)
