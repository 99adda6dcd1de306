"""`tritile.nn` on a GPU: layers of each kind, compiled and captured, and models that are converted there."""

import copy

import pytest
import torch
from torch import nn

import tritile
from tests.launched import captured
from tests.layers import assert_packed, layer_of, meant
from tests.reference import Sides, assert_fused, assert_within, finished64, name, sums64, values
from tritile.nn import Float8Linear, convert

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [("int4", BF16), ("int8", FP16), ("fp8", BF16), ("fp8", FP32)]
SIZES = [(1024, 512), (200, 129)]
ROWS = (1, 37, 300)


def skip_without(kind):
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that has fp8")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=name)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear(dtype, activation):
    for k, n in SIZES:
        layer = tritile.nn.Linear(k, n, device="cuda", dtype=dtype, activation=activation)
        for rows in ROWS:
            x = values((rows, k), dtype, device="cuda")
            with torch.no_grad():
                got = layer(x)
                assert_fused(got, x, layer.weight.t(), Sides(bias=layer.bias, activation=activation or ""))


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_layers_of_few_bits(kind, dtype):
    skip_without(kind)
    for k, n in SIZES:
        layer = convert(layer_of(k, n, dtype, device="cuda"), kind)
        with torch.no_grad():
            for rows in ROWS:
                assert_packed(layer, values((rows, k), dtype, device="cuda"))
            assert_packed(layer, values((2, 3, k), dtype, device="cuda"))


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_made_on_the_host_and_moved_it_is_the_same_layer(kind, dtype):
    skip_without(kind)
    layer = layer_of(200, 129, dtype)
    moved = convert(copy.deepcopy(layer), kind).cuda()
    there = convert(layer.cuda(), kind)
    states = moved.state_dict(), there.state_dict()
    assert all(value.is_cuda for value in states[0].values())
    if kind != "fp8":  # whose scales are quotients by a number, which a GPU takes by its reciprocal
        assert all(torch.equal(states[0][key], value) for key, value in states[1].items())
    with torch.no_grad():
        assert_packed(moved, values((5, 200), dtype, device="cuda"))


def test_fp8_gradients():
    skip_without("fp8")
    layer = Float8Linear.from_linear(layer_of(512, 256, device="cuda"))
    x, grad = values((64, 512), BF16, device="cuda").requires_grad_(), values((64, 256), BF16, 4, "cuda")
    layer(x).backward(grad)
    assert_fused(x.grad, grad, meant(layer).to(BF16), Sides())
    wanted, terms = grad.double().sum(0), grad.double().abs().sum(0)
    step = torch.finfo(BF16).eps / 2 * wanted.abs() + 64 * torch.finfo(FP32).eps * terms
    assert bool(((layer.bias.grad.double() - wanted).abs() <= step).all())


class Block(nn.Module):
    """Two layers and what lies between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))


ALL = ["linear", "fp8", "int8", "int4"]


@pytest.mark.parametrize("kind", ALL)
def test_a_converted_model_is_captured(kind):
    skip_without(kind)
    model = convert(Block().to("cuda", BF16), kind).eval()
    x = values((16, 256), BF16, device="cuda")
    with torch.no_grad():
        wanted = model(x)
        graph, got = captured(lambda: model(x))
        got.zero_()
        graph.replay()
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ALL)
def test_a_layer_is_compiled_whole(kind):
    skip_without(kind)
    layer = convert(layer_of(512, 256, device="cuda"), kind)
    x = values((16, 512), BF16, device="cuda")
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True)(x)
        if kind != "fp8":
            weight = layer.weight if kind == "linear" else layer.weight.dequantize()
            return assert_fused(got, x, weight.t(), Sides(bias=layer.bias))
        # The compiler may divide by a scale in other ways: any rounding of x to fp8 that is near will do.
        weight, scale = meant(layer), x.double().abs().amax(-1, keepdim=True) / 448
        off = torch.maximum(x.double().abs() * 2**-4, scale * 2**-10) * (1 + 2**-20)
        sums, error, eps = sums64(x, weight.t(), "ieee", True)
        error = (
            error * 1.1 + off @ weight.abs().t() + 256 / 32 * 2.0**-13 * (x.double().abs() @ weight.abs().t())
        )
        return assert_within(got, *finished64(sums, error, Sides(bias=layer.bias), eps))
