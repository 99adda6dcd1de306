"""Layers of `tritile.nn`, compared with torch's own; test_convert.py converts models."""

import copy
import io

import pytest
import torch
from torch import nn

import tritile
from tests.layers import assert_packed, converted, layer_of
from tests.reference import Sides, assert_fused, values
from tritile.errors import DtypeError, InvalidValueError, ShapeError
from tritile.nn import QuantizedLinear

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKED = {
    "int4": lambda k, n, bias=True: QuantizedLinear(k, n, bias, bits=4, group_size=32),
    "int8": lambda k, n, bias=True: QuantizedLinear(k, n, bias, bits=8, zero_points=True),
}
HOW = {"int4": {"group_size": 32}, "int8": {"zero_points": True}}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear_is_torchs(bias, activation):
    torch.manual_seed(0)
    theirs = nn.Linear(9, 5, bias)
    torch.manual_seed(0)
    ours = tritile.nn.Linear(9, 5, bias, activation=activation)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert repr(ours).replace(", activation='gelu'", "") == f"tritile.nn.{theirs}"
    assert ("activation='gelu'" in repr(ours)) == bool(activation)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = values((2, 3, 9), FP32)
    sides = Sides(bias=ours.bias, activation=activation)
    assert_fused(ours(x).view(6, 5), x.view(6, 9), ours.weight.t(), sides)


@pytest.mark.parametrize(("kind", "dtype"), [("int4", BF16), ("int8", FP16)])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_few_bits(kind, dtype, bias):
    layer = layer_of(dtype=dtype, bias=bias)
    packed = converted(copy.deepcopy(layer), kind, group_size=32)
    for shape in ((3, 40), (40,), (2, 0, 40), (2, 2, 40)):
        assert_packed(packed, values(shape, dtype, 5))
    # Half a step of the largest element, and what quotient and scale are rounded by before.
    worst = {"int4": 1 / 14, "int8": 1 / 254}[kind] * (1 + torch.finfo(BF16).eps)
    error = (packed.weight.dequantize(torch.float64) - layer.weight.double()).abs().amax()
    assert float(error) <= worst * float(layer.weight.abs().amax())
    assert (packed.bias is None) == (not bias)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_linear_gives_gradients(activation):
    """Of whole numbers, whose sums are exact."""
    ours, x = tritile.nn.Linear(6, 5, activation=activation), values((2, 3, 6), FP32).round()
    for parameter in ours.parameters():
        parameter.copy_((parameter * 5).round())
    theirs = nn.Linear(6, 5)
    theirs.load_state_dict(ours.state_dict())
    grads = []
    for layer, after in ((ours, nn.Identity()), (theirs, nn.ReLU() if activation else nn.Identity())):
        with torch.enable_grad():
            given = x.clone().requires_grad_()
            after(layer(given)).backward(values((2, 3, 5), FP32, 4).round())
        grads.append((given.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", PACKED)
def test_quantized_layer_gradients(kind):
    layer = converted(layer_of(), kind)
    x, grad = values((3, 40), BF16).requires_grad_(), values((3, 7), BF16, 4)
    with torch.enable_grad():
        layer(x).backward(grad)
    assert_fused(x.grad, grad, layer.weight.dequantize(), Sides())
    assert layer.bias.grad.shape == (7,)


@pytest.mark.parametrize("kind", ["linear", *PACKED])
def test_layers_traced_whole_under_autocast(kind):
    layer, x = converted(layer_of(), kind), values((3, 40), BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for track in (False, True):
        with torch.set_grad_enabled(track):
            wanted, got = layer(x.requires_grad_(track)), compiled(x)
        assert torch.equal(got, wanted)
        assert got.requires_grad == track
    (first,), (second,) = (torch.autograd.grad(out, x, torch.ones_like(out)) for out in (got, wanted))
    assert torch.equal(first, second)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(layer(x.float()), wanted)


@pytest.mark.parametrize("kind", PACKED)
def test_state_dicts_and_pickles(kind):
    layer, x = converted(layer_of(), kind, **HOW[kind]), values((3, 40), BF16)
    fresh = PACKED[kind](40, 7)
    assert torch.count_nonzero(fresh(x)) == 0
    fresh.load_state_dict(layer.state_dict(), strict=True)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (fresh, copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert repr(other) == repr(layer)
        assert torch.equal(other(x), layer(x))
        state = other.state_dict()
        assert all(torch.equal(state[key], value) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("kind", PACKED)
def test_moving_and_casting(kind):
    layer = converted(layer_of(), kind, group_size=32 if kind == "int4" else 128)
    types = {key: value.dtype for key, value in layer.state_dict().items()}
    layer.float()
    now = {key: value.dtype for key, value in layer.state_dict().items()}
    assert now == types | {"bias": FP32}
    assert_packed(layer, values((3, 40), BF16))
    layer.half()
    assert_packed(layer, values((3, 40), FP16))
    assert {value.device.type for value in layer.to("meta").state_dict().values()} == {"meta"}
    assert layer.weight.packed is layer.packed


@pytest.mark.parametrize("kind", PACKED)
def test_meta_layers_filled(kind):
    wanted, x = converted(layer_of(), kind, **HOW[kind]), values((3, 40), BF16)
    for assign in (False, True):
        layer = converted(nn.Linear(40, 7, device="meta", dtype=BF16), kind, **HOW[kind])
        layer = layer if assign else layer.to_empty(device="cpu")
        layer.load_state_dict(wanted.state_dict(), strict=True, assign=assign)
        assert torch.equal(layer(x), wanted(x))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: QuantizedLinear(40, 7, bits=3), InvalidValueError, "bits is 3"),
        (lambda: QuantizedLinear(40, 7, dtype=FP32), DtypeError, "float32"),
        (lambda: QuantizedLinear(0, 7), ShapeError, "expected both 1 or more"),
        (lambda: tritile.nn.Linear(9, 5, activation="tanh"), InvalidValueError, "tanh"),
    ],
    ids=["bits", "dtype", "no columns", "activation"],
)
def test_layers_that_cannot_be(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_a_layer_of_complex_numbers():
    layer = tritile.nn.Linear(5, 7, dtype=torch.complex64)
    x = torch.randn(3, 5, dtype=torch.complex64)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
