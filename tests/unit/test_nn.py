"""`tritile.nn`: layers as torch's own, and models whose layers are converted where they are."""

import copy
import io

import pytest
import torch
from torch import nn

import tritile
from tests.layers import TOKENS, Net, assert_packed, converted, layer_of
from tests.reference import Sides, assert_fused, values
from tritile.errors import DtypeError, InvalidValueError, ShapeError
from tritile.nn import QuantizedLinear, convert

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKED = {
    "int4": lambda k, n, bias=True, **how: QuantizedLinear(k, n, bias, bits=4, group_size=32, **how),
    "int8": lambda k, n, bias=True, **how: QuantizedLinear(k, n, bias, bits=8, zero_points=True, **how),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_torchs_but_for_the_product(bias):
    torch.manual_seed(0)
    theirs = nn.Linear(9, 5, bias)
    torch.manual_seed(0)
    ours = tritile.nn.Linear(9, 5, bias)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert repr(ours) == repr(theirs)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = values((2, 3, 9), FP32)
    assert_fused(ours(x).view(6, 5), x.view(6, 9), ours.weight.t(), Sides(bias=ours.bias))


def test_linear_has_an_activation():
    layer, x = tritile.nn.Linear(9, 5, activation="gelu"), values((3, 9), FP32)
    assert_fused(layer(x), x, layer.weight.t(), Sides(bias=layer.bias, activation="gelu"))
    assert "activation='gelu'" in repr(layer)
    with pytest.raises(InvalidValueError, match="tanh"):
        tritile.nn.Linear(9, 5, activation="tanh")


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


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_quantized_layers_give_gradients_of_input_and_bias(kind):
    layer = converted(layer_of(), kind)
    x, grad = values((3, 40), BF16).requires_grad_(), values((3, 7), BF16, 4)
    with torch.enable_grad():
        layer(x).backward(grad)
    assert_fused(x.grad, grad, layer.weight.dequantize(), Sides())
    assert layer.bias.grad.shape == (7,)


@pytest.mark.parametrize("kind", ["linear", *PACKED])
def test_layers_are_traced_whole(kind):
    layer, x = converted(layer_of(), kind), values((3, 40), BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for track in (False, True):
        with torch.set_grad_enabled(track):
            wanted, got = layer(x.requires_grad_(track)), compiled(x)
        assert torch.equal(got, wanted)
        assert got.requires_grad == track
    (first,), (second,) = (torch.autograd.grad(out, x, torch.ones_like(out)) for out in (got, wanted))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["linear", *PACKED])
def test_autocast_decides_the_dtype(kind):
    layer = converted(layer_of(), kind)
    x = values((3, 40), BF16)
    with torch.autocast("cpu", dtype=BF16):
        got = layer(x.float())
    assert torch.equal(got, layer(x))


@pytest.mark.parametrize("kind", PACKED)
def test_state_dicts_and_pickles_hold_all_of_a_layer(kind):
    how = {"group_size": 32} if kind == "int4" else {"zero_points": True}
    layer = converted(layer_of(), kind, **how)
    x = values((3, 40), BF16)
    wanted = layer(x)
    fresh = PACKED[kind](40, 7)
    assert torch.count_nonzero(fresh(x)) == 0
    fresh.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(fresh(x), wanted)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert repr(other) == repr(layer)
        assert torch.equal(other(x), wanted)
        layer_state = dict(layer.state_dict())
        assert all(torch.equal(layer_state[key], value) for key, value in other.state_dict().items())


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
def test_layers_on_meta_are_filled_by_a_state_dict(kind):
    how = {"group_size": 32} if kind == "int4" else {"zero_points": True}
    wanted = converted(layer_of(), kind, **how)
    empty = converted(nn.Linear(40, 7, device="meta", dtype=BF16), kind, **how).to_empty(device="cpu")
    empty.load_state_dict(wanted.state_dict(), strict=True)
    assert_packed(empty, values((3, 40), BF16))
    on_meta = converted(nn.Linear(40, 7, device="meta", dtype=BF16), kind, **how)
    on_meta.load_state_dict(wanted.state_dict(), strict=True, assign=True)
    assert torch.equal(on_meta(values((3, 40), BF16)), wanted(values((3, 40), BF16)))


def test_layers_that_cannot_be():
    with pytest.raises(InvalidValueError, match="bits is 3"):
        QuantizedLinear(40, 7, bits=3)
    with pytest.raises(DtypeError, match="float32"):
        QuantizedLinear(40, 7, dtype=FP32)
    with pytest.raises(ShapeError, match="wanted 1 or more"):
        QuantizedLinear(0, 7)


def why_not(conversion):
    return {row.layers: row.why for row in conversion.rows if not row.exchanged}


def test_quantizing_leaves_shared_weights():
    net = Net(BF16).eval()
    net.up.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    found = convert(net, "int8")
    assert found.exchanged == ("up", "down")
    assert why_not(found) == {"head": "it shares a parameter with embed"}
    assert (type(net.up), type(net.down), type(net.head)) == (QuantizedLinear, QuantizedLinear, nn.Linear)
    assert net.again is net.up
    assert not net.up.training
    assert [key for key, _ in net.named_parameters()] == ["embed.weight", "up.bias"]
    assert torch.equal(net.up(values((2, 8), BF16)), net.up.bias.expand(2, 16))
    assert net(TOKENS).shape == (2, 3, 11)


def test_what_cannot_be_quantized_is_left_with_a_reason():
    odd = nn.ModuleDict({
        "wide": nn.Linear(4, 4),
        "inf": layer_of(),
        "fused": tritile.nn.Linear(4, 4, activation="relu", dtype=BF16),
        "encoder": nn.TransformerEncoderLayer(4, 2, 8, dtype=BF16),
    })  # fmt: skip
    odd["inf"].weight[2, 3] = float("inf")
    types = [type(module) for module in odd.modules()]
    found = why_not(convert(odd, "int4"))
    assert [type(module) for module in odd.modules()] == types
    for name, part in {
        "wide": "its weight is float32: wanted bfloat16, float16",
        "inf": "weight[2, 3] is inf",
        "fused": "its activation 'relu' is not fused",
        "encoder.linear1": "torch.nn.TransformerEncoderLayer reads its weight",
        "encoder.self_attn.out_proj": "it is a subclass",
    }.items():
        assert part in found[name], name


def test_quantizing_a_root():
    root = layer_of()
    convert(root, "int8", group_size=64, zero_points=True)
    assert (type(root), root.bits, root.group_size, root.zeros is None) == (QuantizedLinear, 8, 64, False)
    assert tritile.nn.restore(root) == 0
    assert type(root) is QuantizedLinear


def test_a_layer_of_complex_numbers():
    layer = tritile.nn.Linear(5, 7, dtype=torch.complex64)
    x = torch.randn(3, 5, dtype=torch.complex64)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
