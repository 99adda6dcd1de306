"""Sharding rules, each by what it claims: operands split over two ranks, and results put together."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from tritile.ops import sharding

RANKS = 2


def whole(*shape, seed=0):
    """Whole numbers, of which float64 makes exact sums."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).double()


def activated(x, activation):
    return x if activation is None else getattr(F, activation)(x)


def linear(x, weight, bias=None, activation=None, residual=None):
    product = x @ weight.t() if bias is None else x @ weight.t() + bias
    return activated(product, activation) + (0 if residual is None else residual)


def addmm(added, a, b, *, beta=1, alpha=1, activation=None):
    return activated(beta * added + alpha * (a @ b), activation)


def gated(x, gate, up, activation="relu", bias_gate=None, bias_up=None):
    return linear(x, gate, bias_gate, activation) * linear(x, up, bias_up)


def permute(x, dims):
    return x.permute(dims)


CASES = {
    "matmul": [
        (torch.matmul, [whole(*a), whole(*b)], {})
        for a, b in [
            ((4, 5), (5, 3)), ((5,), (5, 3)), ((4, 5), (5,)), ((5,), (5,)), ((2, 4, 5), (5, 3)),
            ((4, 5), (3, 5, 2)), ((2, 1, 4, 5), (3, 5, 2)), ((2, 3, 4, 5), (2, 1, 5, 2)), ((2, 5), (3, 5, 2)),
        ]
    ],
    "linear": [
        (linear, [whole(*x), whole(*w), *more], words)
        for x, w in [((4, 5), (3, 5)), ((2, 4, 5), (3, 5)), ((5,), (3, 5)), ((4, 5), (5,))]
        for more in ([], [whole(w[0] if len(w) == 2 else 1)], [whole(1), None, torch.zeros(())])
        for words in ({}, {"activation": "relu"})
        if len(more) < 3 or not words
    ] + [
        (linear, [whole(2, 4, 5), whole(3, 5), bias, activation, residual], {})
        for bias in (None, whole(3))
        for residual in (whole(2, 4, 3), whole(4, 1), whole(2, 1, 3))
        for activation in (None, "relu")
    ],
    "addmm": [
        (addmm, [whole(*added), whole(4, 5), whole(5, 3)], {"beta": 3, "alpha": -2, "activation": activation})
        for added in ((4, 3), (3,), (4, 1), ())
        for activation in (None, "relu")
    ],
    "baddbmm": [
        (addmm, [whole(*added), whole(2, 4, 5), whole(2, 5, 3)], {"beta": 3})
        for added in ((2, 4, 3), (4, 3), (2, 1, 1))
    ],
    "gated_linear": [
        (gated, [whole(2, 4, 5), whole(3, 5), whole(3, 5, seed=1), activation, *biases], {})
        for biases in ([], [whole(3)], [None, whole(3)], [whole(4, 3), whole(1)])
        for activation in ("relu", None)
    ],
    "permute": [(permute, [whole(2, 3, 4), dims], {}) for dims in ((2, 0, 1), (-1, -2, 0), (0, 1, 2))],
}  # fmt: skip


def held(tensor, placement, rank):
    """What a rank has of a tensor; None where it would have nothing, which torch does not let happen."""
    if placement == Partial():
        noise = whole(*tensor.shape, seed=9)
        return noise if rank else tensor - noise
    if placement == Replicate():
        return tensor
    chunks = tensor.chunk(RANKS, placement.dim)
    return chunks[rank] if len(chunks) == RANKS else None


def on_ranks(op, args, words, placements):
    """What each rank computes, or None."""
    results = []
    for rank in range(RANKS):
        left = iter(placements)
        own = [held(a, next(left), rank) if isinstance(a, torch.Tensor) else a for a in args]
        if any(now is None and given is not None for now, given in zip(own, args, strict=True)):
            return None
        results.append(op(*own, **words))
        assert next(left, None) is None
    return results


@pytest.mark.parametrize("name", CASES)
def test_every_rule_holds(name):
    followed = set()
    for op, args, words in CASES[name]:
        wanted = op(*args, **words)
        rules = sharding.RULES[name](*args, **words)
        assert ([Replicate()], [Replicate()] * sum(isinstance(a, torch.Tensor) for a in args)) in rules
        for (out,), placements in rules:
            results = on_ranks(op, args, words, placements)
            if results is None:
                continue
            followed.add(type(out))
            if isinstance(out, Shard):
                assert torch.equal(torch.cat(results, out.dim), wanted), (out, placements)
            elif out == Partial():
                assert torch.equal(sum(results), wanted), (out, placements)
            else:
                assert all(torch.equal(result, wanted) for result in results)
    assert followed == {Replicate, Shard} | (set() if name == "gated_linear" else {Partial})


def placed(rules):
    return {(str(out), *map(str, given)) for (out,), given in rules}


R, P = str(Replicate()), str(Partial())


def S(dim):
    return str(Shard(dim))


def test_what_parallel_layers_need_is_there():
    x, weight, bias = whole(2, 4, 6), whole(8, 6), whole(8)
    rules = placed(sharding.product("linear", x, weight, bias))
    assert {(S(2), R, S(0), S(0)), (P, S(2), S(1), P), (S(0), S(0), R, R), (S(1), S(1), R, R)} <= rules
    assert (S(1), S(1), R, R) in placed(
        sharding.product("linear", x, weight, None, None, whole(2, 1, 8))
    )  # which broadcasts
    rules = placed(sharding.product("linear", x, weight, bias, activation="gelu"))
    assert (S(2), R, S(0), S(0)) in rules
    assert not any(out == P for out, *_ in rules)
    assert not any(P in each for each in placed(sharding.product("gated_linear", x, weight, weight)))
    assert (S(2), R, S(0), S(0)) in placed(sharding.product("gated_linear", x, weight, weight))
    heads = placed(sharding.product("matmul", whole(2, 4, 6, 3), whole(2, 4, 3, 6)))
    assert (S(1), S(1), S(1)) in heads


@pytest.mark.parametrize("name", ["scaled_matmul", "grouped_matmul", "linear_quantized"])
def test_unruled_operators_whole_tensors(name):
    a = whole(4, 6)
    rules = sharding.RULES[name](a, a, a, None, a, bias=None)
    assert rules == [([Replicate()], [Replicate()] * 4)]


def test_keywords_tell_sharded_calls_apart():
    """Torch keeps what it found for a call: types of results, that words ask for, are a part of it."""
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    sharding.register()
    for name in sharding.RULES:
        operator = getattr(torch.ops.tritile, name).default
        words = [argument.name for argument in operator._schema.arguments if argument.kwarg_only]
        assert (known[operator].static_kwargkey or []) == words
    assert "out_dtype" in known[torch.ops.tritile.matmul.default].static_kwargkey
