"""`tritile.nn`: layers as torch's own, and models whose layers are converted where they are."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import tritile
from tests.layers import assert_packed, layer_of, meant
from tests.reference import Sides, assert_fused, name, values
from tritile.errors import ConversionWarning, DtypeError, InvalidValueError, ShapeError
from tritile.nn import Float8Linear, QuantizedLinear, convert
from tritile.nn.float8 import _by_row

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.InterpreterWarning")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKED = {
    "int4": lambda k, n, bias=True, **how: QuantizedLinear(k, n, bias, bits=4, group_size=32, **how),
    "int8": lambda k, n, bias=True, **how: QuantizedLinear(k, n, bias, bits=8, zero_points=True, **how),
    "fp8": lambda k, n, bias=True, **how: Float8Linear(k, n, bias, **how),
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


@pytest.mark.parametrize(("kind", "dtype"), [("int4", BF16), ("int8", FP16), ("fp8", BF16), ("fp8", FP32)])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_few_bits(kind, dtype, bias):
    layer = layer_of(dtype=dtype, bias=bias)
    converted = convert(copy.deepcopy(layer), kind, group_size=32)
    for shape in ((3, 40), (40,), (2, 0, 40), (2, 2, 40)):
        assert_packed(converted, values(shape, dtype, 5))
    # Half a step of the largest element, and what quotient and scale are rounded by before.
    worst = {"int4": 1 / 14, "int8": 1 / 254, "fp8": 2**-4}[kind] * (1 + torch.finfo(BF16).eps)
    error = (meant(converted) - layer.weight.double()).abs().amax()
    assert float(error) <= worst * float(layer.weight.abs().amax())
    assert (converted.bias is None) == (not bias)


def test_rows_are_rounded_to_fp8_by_their_own_largest():
    rows = torch.stack([torch.zeros(4), torch.tensor([1.0, -2, 0.5, 0]), values((4,), FP32) * 1e-42])
    rows = torch.cat([rows, torch.tensor([[3e38, 1.0, 0, -3e38]])])
    got, scales = _by_row(rows)
    back = got.float() * scales
    assert back.isfinite().all()
    assert torch.equal(back[0], rows[0])
    assert got[1].float().tolist() == [224, -448, 112, 0]
    step = torch.maximum(rows.abs() * 2**-4, scales * 2**-10)
    assert bool(((back - rows).abs() <= step * (1 + 2**-20)).all())


def test_fp8_has_an_activation_and_refuses_what_does_not_fit():
    layer = Float8Linear.from_linear(layer_of(), activation="silu")
    assert_packed(layer, values((3, 40), BF16))
    assert "activation='silu'" in repr(layer)
    with pytest.raises(ShapeError, match=r"\(3, 41\)"):
        layer(torch.zeros(3, 41))
    with pytest.raises(DtypeError, match="float64"):
        layer(torch.zeros(3, 40, dtype=torch.float64))
    with pytest.raises(InvalidValueError, match="relu6"):
        Float8Linear(4, 4, activation="relu6")
    with pytest.raises(DtypeError, match="float64"):
        Float8Linear.from_linear(layer_of(dtype=torch.float64))


@pytest.mark.parametrize("bias_dtype", [BF16, FP32])
def test_fp8_gives_gradients_of_input_and_bias(bias_dtype):
    layer = Float8Linear.from_linear(layer_of(), activation="relu")
    layer.bias = nn.Parameter(values((7,), bias_dtype, 3))
    x, grad = values((2, 3, 40), BF16).requires_grad_(), values((2, 3, 7), BF16, 4)
    with torch.enable_grad():
        out = layer(x)
        out.backward(grad)
    flat = (grad * (out > 0)).view(6, 7)
    weight = meant(layer).to(BF16)
    assert_fused(x.grad.view(6, 40), flat, weight, Sides())
    assert layer.bias.grad.dtype == bias_dtype
    wanted = flat.double().sum(0)
    assert torch.allclose(layer.bias.grad.double(), wanted, rtol=torch.finfo(bias_dtype).eps, atol=1e-6)


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
    layer = convert(layer_of(), kind)
    x, grad = values((3, 40), BF16).requires_grad_(), values((3, 7), BF16, 4)
    with torch.enable_grad():
        layer(x).backward(grad)
    assert_fused(x.grad, grad, layer.weight.dequantize(), Sides())
    assert layer.bias.grad.shape == (7,)


@pytest.mark.parametrize("kind", ["linear", *PACKED])
def test_layers_are_traced_whole(kind):
    layer, x = convert(layer_of(), kind), values((3, 40), BF16)
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
    layer = convert(layer_of(), kind)
    x = values((3, 40), BF16)
    with torch.autocast("cpu", dtype=BF16):
        got = layer(x.float())
    assert torch.equal(got, layer(x))


@pytest.mark.parametrize("kind", PACKED)
def test_state_dicts_and_pickles_hold_all_of_a_layer(kind):
    how = {"group_size": 32} if kind == "int4" else {"zero_points": True}
    layer = convert(layer_of(), kind, **how)
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
    layer = convert(layer_of(), kind, group_size=32 if kind == "int4" else 128)
    types = {key: value.dtype for key, value in layer.state_dict().items()}
    layer.float()
    now = {key: value.dtype for key, value in layer.state_dict().items()}
    assert now == types | {"bias": FP32}
    assert_packed(layer, values((3, 40), BF16))
    layer.half()
    assert_packed(layer, values((3, 40), FP16))
    assert {value.device.type for value in layer.to("meta").state_dict().values()} == {"meta"}
    if kind != "fp8":
        assert layer.weight.packed is layer.packed


@pytest.mark.parametrize("kind", PACKED)
def test_layers_on_meta_are_filled_by_a_state_dict(kind):
    how = {"group_size": 32} if kind == "int4" else {"zero_points": True}
    wanted = convert(layer_of(), kind, **how)
    empty = convert(nn.Linear(40, 7, device="meta", dtype=BF16), kind, **how).to_empty(device="cpu")
    empty.load_state_dict(wanted.state_dict(), strict=True)
    assert_packed(empty, values((3, 40), BF16))
    on_meta = convert(nn.Linear(40, 7, device="meta", dtype=BF16), kind, **how)
    on_meta.load_state_dict(wanted.state_dict(), strict=True, assign=True)
    assert torch.equal(on_meta(values((3, 40), BF16)), wanted(values((3, 40), BF16)))


def test_layers_that_cannot_be():
    with pytest.raises(InvalidValueError, match="bits is 3"):
        QuantizedLinear(40, 7, bits=3)
    with pytest.raises(DtypeError, match="float32"):
        QuantizedLinear(40, 7, dtype=FP32)
    for made in (QuantizedLinear, Float8Linear):
        with pytest.raises(ShapeError, match="wanted 1 or more"):
            made(0, 7)


class Net(nn.Module):
    """An embedding whose weight the head shares, a block of layers, and one layer under two names."""

    def __init__(self, dtype=BF16):
        super().__init__()
        self.embed = nn.Embedding(11, 8, dtype=dtype)
        self.up, self.down = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 8, bias=False, dtype=dtype)
        self.again = self.up
        self.head = nn.Linear(8, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))))


def layered_magnitude(net):
    """The largest result where all that is multiplied and added has one sign."""
    x = net.embed(TOKENS).double().abs()
    x = x @ net.up.weight.double().abs().t() + net.up.bias.double().abs()
    return (x @ net.down.weight.double().abs().t() @ net.head.weight.double().abs().t()).max()


TOKENS = torch.tensor([[1, 4, 10], [0, 0, 7]])


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=name)
def test_converting_to_linear_keeps_everything(dtype):
    net = Net(dtype).eval()
    wanted, kept = net(TOKENS), list(net.named_parameters())
    net.up.bias.requires_grad_(False)
    calls = []
    net.up.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    before = list(net.modules())
    assert convert(net, "linear") is net
    assert all(a is b for a, b in zip(net.modules(), before, strict=True))
    assert all(a is b for (_, a), (_, b) in zip(net.named_parameters(), kept, strict=True))
    assert net.head.weight is net.embed.weight
    assert not net.up.bias.requires_grad
    assert not net.up.training
    assert {type(net.up), type(net.again), type(net.down), type(net.head)} == {tritile.nn.Linear}
    # Each of three layers errs by sqrt(16) steps and less, on values that torch made with the same steps.
    assert torch.allclose(
        net(TOKENS), wanted, rtol=0, atol=64 * torch.finfo(dtype).eps * float(wanted.abs().max())
    )
    assert calls == [tritile.nn.Linear]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConversionWarning)
        convert(net, "linear")


@pytest.mark.parametrize(("kind", "made"), [("fp8", Float8Linear), ("int8", QuantizedLinear)])
def test_converting_to_few_bits_leaves_shared_weights(kind, made):
    net = Net().eval()
    net.up.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    with pytest.warns(ConversionWarning, match=r"1 of 3 .* head \(it shares a parameter with embed\)"):
        convert(net, kind)
    assert (type(net.up), type(net.down), type(net.head)) == (made, made, nn.Linear)
    assert net.again is net.up
    assert not net.up.training
    assert [key for key, _ in net.named_parameters()] == ["embed.weight", "up.bias"]
    assert torch.equal(net.up(values((2, 8), BF16)), net.up.bias.expand(2, 16))
    convert(net, kind, untie=True)
    assert type(net.head) is made
    assert net(TOKENS).shape == (2, 3, 11)


def test_a_filter_names_layers_and_is_not_told_of(recwarn):
    net = Net()
    convert(net, "int4", filter=lambda name, layer: name == "down" and layer.in_features == 16)
    assert [type(m) for m in (net.up, net.down, net.head)] == [nn.Linear, QuantizedLinear, nn.Linear]
    assert not [each for each in recwarn if issubclass(each.category, ConversionWarning)]


def test_what_does_not_fit_is_left_and_told_of():
    class Mine(nn.Linear):
        pass

    odd = nn.ModuleDict({
        "mine": Mine(4, 4, dtype=BF16),
        "wide": nn.Linear(4, 4),
        "inf": layer_of(),
        "pruned": prune.identity(layer_of(), "weight"),
        "given": layer_of(),
        "fused": tritile.nn.Linear(4, 4, activation="relu", dtype=BF16),
        "encoder": nn.TransformerEncoderLayer(4, 2, 8, dtype=BF16),
    })  # fmt: skip
    odd["inf"].weight[2, 3] = float("inf")
    odd["given"].forward = lambda x: x
    types = [type(module) for module in odd.modules()]
    with pytest.warns(ConversionWarning) as told:
        convert(odd, "int4")
    assert [type(module) for module in odd.modules()] == types
    (message,) = [str(each.message) for each in told if each.category is ConversionWarning]
    for part in (
        "mine (it is a subclass, Mine)", "weight[2, 3] is inf",
        "wide (its weight is float32: wanted bfloat16, float16)",
        "pruned (its weight is computed", "given (its forward was replaced)",
        "fused (its activation 'relu' is not fused", "encoder.linear1 (torch.nn.TransformerEncoderLayer",
        "encoder.self_attn.out_proj (it is a subclass", "9 of 9",
    ):  # fmt: skip
        assert part in message, (part, message)


def test_converting_a_root_and_layers_of_ours():
    layer = tritile.nn.Linear(40, 7, dtype=BF16, activation="relu")
    assert convert(layer, "fp8") is layer
    assert (type(layer), layer.activation) == (Float8Linear, "relu")
    assert_packed(layer, values((3, 40), BF16))
    root = layer_of()
    assert convert(root, "int8", group_size=64, zero_points=True) is root
    assert (type(root), root.bits, root.group_size, root.zeros is None) == (QuantizedLinear, 8, 64, False)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"kind": "int3"}, "int3"),
        ({"kind": "int4", "group_size": 16}, "16"),
        ({"kind": "linear", "model": "net"}, "str"),
    ],
)
def test_converting_refuses_before_anything_changes(given, why):
    net = Net()
    with pytest.raises(InvalidValueError, match=why):
        convert(**({"model": net} | given))
    assert type(net.up) is nn.Linear


def test_a_layer_of_complex_numbers():
    layer = torch.nn.Linear(5, 7, dtype=torch.complex64)
    x = torch.randn(3, 5, dtype=torch.complex64)
    wanted = layer(x)
    made = tritile.nn.convert(layer, "linear")
    assert type(made) is tritile.nn.Linear
    torch.testing.assert_close(made(x), wanted)
