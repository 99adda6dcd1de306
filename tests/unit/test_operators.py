"""Derivatives of every operator, of first and second order, and batches of vmap: beside torch's own."""

import threading

import pytest
import torch
from torch.autograd import forward_ad, gradgradcheck
from torch.func import grad, jvp, vmap

import tritile
from tests.operators import DOUBLES, SAMPLES, A, B, Sample, W, drawn
from tritile.core.settings import Rules, rules
from tritile.ops import reference
from tritile.ops.products import matmul_call

# One of each formula.
FEW = [
    s
    for s in DOUBLES
    if s.label in ("vector by batch", "conjugated", "silu", "weights", "complex weights", "dims")
]


def wanting(sample: Sample) -> tuple[torch.Tensor, ...]:
    """Its tensors, laid out as they are, of all of which gradients are wanted."""
    return tuple(tensor.detach().requires_grad_() for tensor in sample.tensors)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for rounding: sums of at most 12 terms of size 1, through at most four products in a row."""
    assert got.dtype == wanted.dtype
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, wanted, rtol=64 * eps, atol=256 * eps)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_gradients_are_those_of_torch(sample):
    ours, theirs = wanting(sample), wanting(sample)
    got, wanted = sample.call(*ours), sample.peer(*theirs)
    close(got, wanted.contiguous())
    seed = torch.randn_like(wanted)
    for mine, other in zip(
        torch.autograd.grad(got, ours, seed), torch.autograd.grad(wanted, theirs, seed), strict=True
    ):
        close(mine, other)


@pytest.mark.parametrize("sample", FEW, ids=lambda sample: sample.id)
def test_second_derivatives_of_torch(sample):
    seed, drawn = torch.randn_like(sample.peer(*sample.tensors).contiguous()), {}

    def like(which, tensors):  # the same for both
        drawn.setdefault(which, [torch.randn_like(tensor) for tensor in tensors])
        return drawn[which]

    def gradients(call, of):
        return torch.autograd.grad(call(*of[:-1]), of[:-1], of[-1], create_graph=True)

    def reverse(call):
        of = (*wanting(sample), seed.clone().requires_grad_())
        first = gradients(call, of)
        return torch.autograd.grad(first, of, like("weights", first), materialize_grads=True)

    def forward(call):
        with forward_ad.dual_level():
            of = (*wanting(sample), seed.clone().requires_grad_())
            duals = list(map(forward_ad.make_dual, of, like("tangents", of)))
            return [forward_ad.unpack_dual(first).tangent for first in gradients(call, duals)]

    for way in (reverse, forward):
        for mine, other in zip(way(sample.call), way(sample.peer), strict=True):
            close(mine, other)


@pytest.mark.slow
def test_second_derivatives_undefined_gradients():
    """Of the call through the most formulas."""
    (sample,) = (sample for sample in FEW if sample.label == "silu")
    assert gradgradcheck(sample.call, wanting(sample), fast_mode=True, check_undefined_grad=True)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_tangents_are_those_of_torch(sample):
    tangents = [torch.randn_like(tensor) for tensor in sample.tensors]

    def tangent(call):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, v) for t, v in zip(sample.tensors, tangents, strict=True)]
            return forward_ad.unpack_dual(call(*duals)).tangent

    close(tangent(sample.call), tangent(sample.peer).contiguous())


@pytest.mark.parametrize("sample", DOUBLES, ids=lambda sample: sample.id)
def test_vmap_over_any_argument_and_dimension(sample):
    for which in range(len(sample.tensors)):
        dims = [None] * len(sample.tensors)
        dims[which] = which % 2 - 1  # the last dimension, or the first
        check_vmap(sample, tuple(dims))
    check_vmap(sample, (1,) * len(sample.tensors))


def check_vmap(sample, dims):
    """Batches of 2, each with other numbers, against torch on each of them."""
    stacks = [
        tensor if dim is None else torch.stack([tensor, tensor.flip(0) + 1], min(dim, tensor.ndim))
        for tensor, dim in zip(sample.tensors, dims, strict=True)
    ]
    dims = tuple(dim if dim is None else min(dim, t.ndim - 1) for dim, t in zip(dims, stacks, strict=True))
    got = torch.vmap(sample.call, dims)(*stacks)
    each = [
        sample.peer(*(t if dim is None else t.select(dim, i) for t, dim in zip(stacks, dims, strict=True)))
        for i in range(2)
    ]
    close(got, torch.stack(each))


def loss(product, a):
    return product(a, B).sin().sum()


COMPOSED = {
    "grad of grad": lambda f: grad(lambda a: grad(f)(a).cos().sum())(A),
    "jvp": lambda f: jvp(f, (A,), (A,))[1],
    "jvp of jvp": lambda f: jvp(lambda a: jvp(f, (a,), (A,))[1], (A,), (A,))[1],
    "jvp of grad": lambda f: jvp(grad(f), (A,), (A,))[1],
    "grad of jvp": lambda f: grad(lambda a: jvp(f, (a,), (A,))[1])(A),
    "vmap of grad": lambda f: vmap(grad(f))(torch.stack([A, A + 1])),
    "grad of vmap": lambda f: grad(lambda a: vmap(f)(torch.stack([a, 2 * a])).cos().sum())(A),
    "vmap of vmap": lambda f: vmap(vmap(f, 1), 2)(torch.stack([A, A + 1]).expand(2, 2, 3, 4).movedim(0, 2)),
    "vmap of jvp": lambda f: vmap(lambda a: jvp(f, (a,), (A,))[1])(torch.stack([A, A + 1])),
}


@pytest.mark.parametrize("composed", COMPOSED.values(), ids=COMPOSED)
def test_transforms_of_transforms(composed):
    close(composed(lambda a: loss(tritile.matmul, a)), composed(lambda a: loss(torch.matmul, a)))


def recorded(monkeypatch):
    """The problems of products from now on, none of which is computed."""
    calls = []

    def record(a, b, out, **extras):
        calls.append(matmul_call(a, b, out, "ieee", **extras).problem)

    monkeypatch.setattr(reference, "product", record)
    return calls


def test_a_batch_is_one_call(monkeypatch):
    weight, x = W.clone().requires_grad_(), drawn(2, 3, 4)
    by_weight = tritile.linear(x, weight), tritile.matmul(x, weight.mT)
    calls = recorded(monkeypatch)
    torch.vmap(tritile.matmul, (None, 2))(A, drawn(4, 5, 6))
    torch.vmap(tritile.linear)(drawn(6, 3, 4), drawn(6, 5, 4))
    torch.vmap(tritile.matmul, (0, None))(drawn(6, 3, 4), B)
    assert [(problem.batch, problem.m) for problem in calls] == [(6, 3), (6, 3), (1, 18)]
    for y in by_weight:
        calls.clear()
        torch.autograd.grad(y.sum(), weight)
        assert [problem.batch for problem in calls] == [1]  # the gradient of the weight is one product


def test_backward_by_rules_of_call(monkeypatch):
    found, run = [], reference.product

    def seen(*call, **fused):
        found.append(rules())
        run(*call, **fused)

    monkeypatch.setattr(reference, "product", seen)
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with tritile.batch_invariant(), tritile.mode("off"):
        total = tritile.matmul(a, b).sum()
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    assert found == [Rules("off", True, False, "torch")] * 3
    assert rules() == Rules("cached", False, False, "torch")
