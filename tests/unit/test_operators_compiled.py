"""Operators in torch's compiler, export, checkpoints, autocast, modes, subclasses and tangents; schemas."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tritile
from tests.operators import OFFS, A, B, W, X, drawn
from tritile.errors import (
    DtypeError,
    GradientError,
    InvalidValueError,
    ShapeError,
    TritileError,
    UnsupportedError,
)

OPS = torch.ops.tritile
ONE = torch.ones(())
FP8 = torch.float8_e4m3fn
INT8_A, INT8_B = ((9 * tensor).to(torch.int8) for tensor in (A, B))
CALLS = [
    (OPS.matmul.default, (X.half(), B[:, 0].half()), {"out_dtype": torch.float32}),
    (OPS.matmul.out, (A, B), {"out": drawn(3, 5)}),
    (OPS.linear.default, (X, W, drawn(5)), {"activation": "relu", "residual": drawn(5)}),
    (OPS.addmm.default, (drawn(5).cdouble(), 1j * A, B.cdouble()), {"alpha": 1 + 2j, "beta": 0.5j}),
    (OPS.baddbmm.default, (drawn(5), X, drawn(2, 4, 5)), {}),
    (OPS.gated_linear.default, (X, W, W), {"bias_up": drawn(5)}),
    (OPS.permute.default, (X, [2, 0, 1]), {}),
    (OPS.grouped_matmul.default, (drawn(6, 4).float(), drawn(3, 4, 2).float(), OFFS), {}),
    (OPS.scaled_matmul.default, (INT8_A, INT8_B, drawn(3, 1).float(), ONE), {}),
]


def quantized_call():
    """Its weight is packed, which takes torch some time."""
    weight = tritile.quantize(torch.randn(16, 32), bits=4, group_size=32)
    parts = (weight.packed, weight.scales, weight.zeros)
    words = {"bits": 4, "group_size": 32, "n": 16, "k": 32}
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    return weight, (OPS.linear_quantized.default, (x, *parts, torch.randn(16)), words)


@pytest.mark.parametrize("which", range(len(CALLS) + 1))
def test_what_torch_asks_of_an_operator(which):
    op, args, kwargs = CALLS[which] if which < len(CALLS) else quantized_call()[1]
    args = tuple(
        t.clone().requires_grad_() if isinstance(t, torch.Tensor) and differentiable(op, t) else t
        for t in args
    )
    torch.library.opcheck(op, args, kwargs)


def differentiable(op, tensor):
    """Whether a gradient by this argument is there."""
    fits = (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != FP8
    return (
        fits and "out" not in str(op) and op not in (OPS.scaled_matmul.default, OPS.linear_quantized.default)
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_as_one_graph(dynamic):
    def block(x, weight, bias):
        y = tritile.linear(x, weight, bias, activation="gelu")
        y = tritile.gated_linear(tritile.contiguous(y.mT).mT, weight.mT, weight.mT)
        return tritile.transpose(tritile.matmul(y, weight.mT)), tritile.permute(y, (2, 0, 1))

    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5) if dynamic else (3,):
        given = [t.clone().requires_grad_() for t in (drawn(2, rows, 4), W, drawn(5))]
        for got, wanted in zip(compiled(*given), block(*given), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


MASK = torch.tensor([True, False, True, True, False, True])


def rows_by_index(x, weight, b):
    rows = x[MASK.nonzero().flatten()]
    return tritile.linear(rows, weight), tritile.grouped_matmul(rows, b, OFFS - 1)


def rows_by_mask(x, weight, bias, *, wide=False):
    rows = x[MASK]
    product = tritile.matmul(rows, weight.mT[None] if wide else weight.mT)
    return product, tritile.linear(rows.flatten(0, -2), weight, bias)


@pytest.mark.parametrize(
    ("chosen", "given"),
    [
        (rows_by_index, (drawn(6, 4).float(), W.float(), drawn(3, 4, 2).float())),
        (rows_by_mask, (drawn(6, 3, 4), W, drawn(5))),
        (functools.partial(rows_by_mask, wide=True), (drawn(6, 3, 4), W, drawn(5))),
    ],
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_with_data_sizes(chosen, given):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: chosen(*given), backend="aot_eager", fullgraph=True)
    for got, wanted in zip(compiled(*given), chosen(*given), strict=True):
        torch.testing.assert_close(got, wanted)


def test_compiled_into_memory_that_is_given():
    torch._dynamo.reset()
    out = torch.zeros(3, 5, dtype=torch.float64)
    compiled = torch.compile(
        lambda a, b, out: tritile.matmul(a, b, out=out), backend="aot_eager", fullgraph=True
    )
    assert compiled(A, B, out) is out
    torch.testing.assert_close(out, A @ B)


def test_a_quantized_weight_compiled_and_differentiated():
    torch._dynamo.reset()
    weight, (_, (x, *_), _) = quantized_call()
    x = x.requires_grad_()
    y = torch.compile(tritile.linear, backend="aot_eager", fullgraph=True)(x, weight)
    (grad,) = torch.autograd.grad(y.sum(), x)
    wanted = torch.ones(3, 16) @ weight.dequantize(torch.float32)
    torch.testing.assert_close(grad.float(), wanted, rtol=2**-8, atol=2**-8 * float(wanted.abs().max()))


def test_exported():
    class Block(torch.nn.Module):
        def forward(self, x):
            return tritile.matmul(x, B)

    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Block(), (A,), dynamic_shapes={"x": {0: rows}})
    assert [n.target for n in exported.graph.nodes if n.op == "call_function"] == [OPS.matmul.default]
    torch.testing.assert_close(exported.module()(drawn(7, 4)), drawn(7, 4) @ B)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant):
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    checkpoint(tritile.matmul, a, b, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(a.grad, B.sum(1).expand(3, 4))


def test_autocast_casts_what_torch_casts():
    x, weight = X.float(), W.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert tritile.matmul(A.float(), B.float(), precision="tf32").dtype == torch.bfloat16
        assert tritile.linear(x, weight, drawn(5)[0].float()).dtype == torch.bfloat16
        assert tritile.linear(x.half(), weight).dtype == torch.bfloat16
        assert tritile.matmul(A, B).dtype == torch.float64
        assert tritile.matmul(A.to(FP8), B.to(FP8), out_dtype=torch.float32).dtype == torch.float32
        weight.requires_grad_()
        tritile.linear(x, weight).sum().backward()
    assert weight.grad.dtype == torch.float32


class Tagged(torch.Tensor):
    """A subclass that keeps its class."""


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, which hears of every operator."""

    heard = ()

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.heard = (*cls.heard, func)
        args = torch.utils._pytree.tree_map_only(Wrapper, lambda t: t.inner, args)
        return Wrapper(func(*args, **(kwargs or {})))


class Heard(TorchDispatchMode):
    """A mode that hears of every operator."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


def test_subclasses_and_modes():
    wanted = A @ B
    got = tritile.matmul(A.as_subclass(Tagged), B)
    assert type(got) is Tagged
    torch.testing.assert_close(got.as_subclass(torch.Tensor), wanted)
    wrapped = tritile.matmul(Wrapper(A), B)
    assert type(wrapped) is Wrapper
    assert Wrapper.heard == (OPS.matmul.default,)
    torch.testing.assert_close(wrapped.inner, wanted)
    with Heard() as mode:
        tritile.matmul(A, B)
    assert OPS.matmul.default in mode.heard


def test_fakes_refuse_alike():
    with FakeTensorMode() as mode:
        a, b = mode.from_tensor(A), mode.from_tensor(B)
        for call, kind in (
            (lambda: tritile.matmul(a, a), ShapeError),
            (lambda: tritile.matmul(a, b, precision="exact"), InvalidValueError),
            (lambda: tritile.matmul(a, b, out=(a @ b).half()), DtypeError),
            (lambda: tritile.permute(a, (0, 0)), ShapeError),
        ):
            with pytest.raises(kind):
                call()


def test_wrong_types_refused_with_gradient():
    a = A.clone().requires_grad_()
    for words in ({"precision": ["ieee"]}, {"out_dtype": "float16"}):
        with pytest.raises(TritileError):
            tritile.matmul(a, B, **words)
    with pytest.raises(InvalidValueError):
        tritile.addmm(B[0], a, B, alpha="1")
    with pytest.raises(DtypeError, match="sparse"):
        tritile.matmul(a, B.to_sparse())
    with pytest.raises(DtypeError, match="str"):
        tritile.matmul(a, "b")


def test_inference_mode():
    with torch.inference_mode():
        got = tritile.matmul(A.clone().requires_grad_(), B)
        torch.testing.assert_close(got, A @ B)
        torch.testing.assert_close(OPS.matmul.default(A, B), A @ B)


def test_scaled_bias_gradient():
    bias = torch.randn(5, requires_grad=True)
    one = torch.ones(())
    y = tritile.scaled_matmul(A.to(FP8), B.to(FP8), one, one, bias=bias, activation="relu")
    y.sum().backward()
    assert torch.equal(bias.grad, (y > 0).sum(0).float())


# What torch keeps track of around a call.


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ((3, 5), lambda out: tritile.matmul(A, B, out=out)),
        ((4, 3), lambda out: tritile.transpose(A, out=out)),
    ],
)
def test_overwritten_not_used_for_gradient(shape, call):
    weight, out = torch.randn(shape, requires_grad=True), torch.ones(shape, dtype=torch.float64)
    loss = (weight * out).sum()
    call(out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tangent_is_not_dropped():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, torch.ones_like(A))
        with pytest.raises(GradientError, match="tangent"):
            tritile.matmul(dual, B, out=torch.empty(3, 5, dtype=torch.float64))
        with pytest.raises(GradientError, match="tangent"):
            tritile.quantize(dual.float(), bits=4)
        assert torch.allclose(tritile.matmul(A, B), A @ B)


def test_tensors_without_memory_refused():
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.vmap(lambda a: tritile.quantize(a, bits=4))(torch.randn(2, 5, 4))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(UnsupportedError, match="memory"):
        tritile.plan(tritile.transpose, mode.from_tensor(A))


def test_integers_negated_not_flipped():
    x = torch.arange(-3, 9).view(3, 4)
    assert torch.equal(tritile.transpose(torch._neg_view(x)), -x.mT)
