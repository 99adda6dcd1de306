"""What torch keeps track of around a call: versions of tensors, tangents, transforms, threads."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import tritile
from tritile.errors import GradientError, InvalidValueError, UnsupportedError

A, B = torch.randn(5, 4), torch.randn(4, 3)


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ((5, 3), lambda out: tritile.matmul(A, B, out=out)),
        ((4, 5), lambda out: tritile.transpose(A, out=out)),
    ],
)
def test_an_overwritten_tensor_is_not_used_for_a_gradient(shape, call):
    weight, out = torch.randn(shape, requires_grad=True), torch.ones(shape)
    loss = (weight * out).sum()
    call(out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tangent_is_not_dropped():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, torch.ones_like(A))
        with pytest.raises(GradientError, match="tangent"):
            tritile.matmul(dual, B, out=torch.empty(5, 3))
        with pytest.raises(GradientError, match="tangent"):
            tritile.quantize(dual, bits=4)
        assert torch.allclose(tritile.matmul(A, B), A @ B, atol=1e-5)


def test_tensors_without_memory_are_refused_where_it_is_needed():
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.vmap(lambda a: tritile.quantize(a, bits=4))(torch.randn(2, 5, 4))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(UnsupportedError, match="memory"):
        tritile.plan(tritile.transpose, mode.from_tensor(A))


def test_a_wrong_mode_is_told_of_on_host_tensors(monkeypatch):
    monkeypatch.setenv("TRITILE_MODE", "bogus")
    for call in (lambda: tritile.matmul(A, B), lambda: tritile.transpose(A)):
        with pytest.raises(InvalidValueError, match="bogus"):
            call()


def test_whole_numbers_are_negated_and_not_sign_flipped():
    x = torch.arange(-3, 9).view(3, 4)
    assert torch.equal(tritile.transpose(torch._neg_view(x)), -x.mT)
