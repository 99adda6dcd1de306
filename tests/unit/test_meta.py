"""Tensors on the meta device: every operation and layer gives the shape, strides and dtype of its result."""

import pytest
import torch

import tritile
from tests.layers import converted
from tests.operators import OFFS, SAMPLES, A, B, W, X
from tritile.core import device as devices
from tritile.errors import DeviceError, InvalidValueError, ShapeError
from tritile.ops import reference

H200 = tritile.target_device("nvidia-h200")


@pytest.fixture
def nothing_runs(monkeypatch):
    for name in ("product", "grouped", "linear_quantized", "permute"):
        monkeypatch.setattr(reference, name, lambda *args, **fused: pytest.fail("it ran"))


def meta(tensor):
    """A tensor on the meta device with the shape, strides and lazy conjugation of this one."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.conj() if tensor.is_conj() else made


def assert_alike(got, wanted):
    assert got.is_meta
    assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def grouped(a, b):
    return tritile.grouped_matmul(a, b, OFFS.to(a.device))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_every_operation(sample, recorded):
    call = grouped if sample.op == "grouped_matmul" else sample.call
    wanted = call(*sample.tensors)
    given = [meta(tensor).requires_grad_(recorded) for tensor in sample.tensors]
    got = call(*given)
    assert_alike(got, wanted)
    assert got.requires_grad == recorded
    if recorded:
        for grad, tensor in zip(torch.autograd.grad(got, given, torch.empty_like(got)), given, strict=True):
            assert grad.is_meta
            assert (grad.shape, grad.dtype) == (tensor.shape, tensor.dtype)


def test_numbers_of_few_bits(nothing_runs):
    fp8 = torch.empty(16, 256, dtype=torch.float8_e4m3fn, device="meta")
    int8, by_block = fp8.view(torch.int8), torch.empty(16, 2, device="meta")
    wanted = torch.empty(16, 16, dtype=torch.bfloat16)
    assert_alike(tritile.scaled_matmul(fp8, fp8.mT, by_block, by_block.mT), wanted)
    assert_alike(tritile.scaled_matmul(int8, int8.mT, by_block[0, 0], by_block[0, 0]), wanted)
    assert_alike(tritile.matmul(fp8, fp8.mT), wanted)
    assert_alike(tritile.matmul(int8, int8.mT), wanted.int())


@pytest.mark.parametrize("zero_points", [False, True])
def test_packed_weights(zero_points, nothing_runs):
    words = {"bits": 4, "group_size": 32, "zero_points": zero_points}
    weight = torch.randn(24, 70)
    real, packed = tritile.quantize(weight, **words), tritile.quantize(meta(weight), **words)
    assert (packed.shape, packed.dtype, packed.bits) == (real.shape, real.dtype, real.bits)
    for part in ("packed", "scales", "zeros"):
        got, wanted = getattr(packed, part), getattr(real, part)
        assert (got is None) == (wanted is None)
        if got is not None:
            assert_alike(got, wanted)
    assert_alike(packed.dequantize(), real.dequantize())
    x, bias = torch.empty(2, 3, 70, dtype=packed.dtype, device="meta"), torch.empty(24, device="meta")
    assert_alike(tritile.linear(x, packed, bias), x.new_empty(2, 3, 24))
    assert_alike(tritile.linear(x.requires_grad_(), packed, bias), x.new_empty(2, 3, 24))
    with pytest.raises(DeviceError, match="meta"):
        tritile.linear(torch.empty(3, 70, dtype=packed.dtype), packed)


@pytest.mark.parametrize("kind", ["linear", "int8", "int4"])
@pytest.mark.parametrize("how", ["on meta", "moved"])
def test_layers(kind, how, nothing_runs):
    device = "meta" if how == "on meta" else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, dtype=torch.bfloat16, device=device))
    model = converted(model, kind, group_size=32).to("meta")
    x = torch.empty(2, 5, 64, dtype=torch.bfloat16, device="meta")
    wanted = x.new_empty(2, 5, 48)
    assert_alike(model(x), wanted)
    got = model(x.requires_grad_())
    assert_alike(got, wanted)
    assert_alike(torch.autograd.grad(got.sum(), x)[0], x)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda out: tritile.matmul(meta(A), meta(B), out=out), (3, 5)),
        (lambda out: tritile.addmm(out, meta(A), meta(B), out=out), (3, 5)),
        (lambda out: tritile.gated_linear(meta(X), meta(W), meta(W), out=out), (2, 3, 5)),
        (lambda out: tritile.permute(meta(X), (2, 0, 1), out=out), (4, 2, 3)),
    ],
)
def test_into_memory_that_is_given(call, shape, nothing_runs):
    out = torch.empty(*shape[:-1], 2 * shape[-1], dtype=torch.float64, device="meta")[..., ::2]
    version = out._version
    assert call(out) is out
    assert out._version > version
    with pytest.raises(ShapeError):
        call(torch.empty(*shape[:-1], 9, dtype=torch.float64, device="meta"))


P, Q = torch.empty(1000, 520, dtype=torch.bfloat16), torch.empty(520, 760, dtype=torch.bfloat16)


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_meta_plans_equal_real(offset):
    a, b = (
        torch.empty(1001 * 520, dtype=P.dtype, device=device)[offset:][: P.numel()].view(P.shape)
        for device in ("cpu", "meta")
    )
    assert a.data_ptr() % 16 == 2 * offset  # so are those on the meta device taken to lie
    for call, ours, theirs in ((tritile.matmul, (a, Q), (b, meta(Q))), (tritile.transpose, (a,), (b,))):
        assert tritile.plan(call, *theirs, device=H200) == tritile.plan(call, *ours, device=H200)


def test_plans_for_torchs_gpu(monkeypatch):
    here = {0: H200, 1: tritile.target_device("sm_80")}
    monkeypatch.setattr(devices, "gpu", here.__getitem__)
    monkeypatch.setattr(devices, "current_index", lambda: 1)
    for device, index in (("cuda:1", 1), (torch.device("cuda", 0), 0), ("cuda", 1)):
        assert tritile.plan(tritile.matmul, P, Q, device=device).device == here[index]
    for device in ("h300", "cpu", "meta", 1.5, torch.device("cpu")):
        with pytest.raises(InvalidValueError, match=r"expected a tritile\.Device, one of h200"):
            tritile.plan(tritile.matmul, P, Q, device=device)
    monkeypatch.setattr(devices, "current_gpu", lambda: H200)
    assert tritile.plan(tritile.matmul, meta(P), meta(Q)).device == H200
    monkeypatch.setattr(devices, "current_gpu", lambda: None)
    with pytest.raises(InvalidValueError, match="pass device="):
        tritile.plan(tritile.matmul, meta(P), meta(Q))


def test_other_meta_tensor_not_in_place():
    x = torch.empty(64, 64, device="meta")
    assert tritile.plan(tritile.transpose, x, out=x, device=H200).why.startswith("in place")
    apart = tritile.plan(tritile.transpose, x, out=torch.empty_like(x), device=H200)
    assert not apart.why.startswith("in place")
