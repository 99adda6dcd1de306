"""`tritile.nn` on a GPU: layers of each kind, compiled and captured, and models that are converted there."""

import pytest
import torch
from torch import nn

import tritile
from tests.launched import replayed
from tests.layers import converted, layer_of
from tests.reference import Sides, assert_fused, values
from tritile.choose import gpu_tables
from tritile.core import device as devices
from tritile.nn import convert, exchanged, restore
from tritile.tuner.store.trial import TORCH
from tritile.tuner.store.trials import store_of

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


class Block(nn.Module):
    """Two layers and what lies between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(x)))


ALL = ["linear", "int8", "int4"]


@pytest.mark.parametrize("kind", ALL)
def test_a_converted_model_is_captured(kind):
    model = converted(Block().to("cuda", BF16), kind).eval()
    x = values((16, 256), BF16, device="cuda")
    with torch.no_grad():
        assert torch.equal(model(x), replayed(lambda: model(x)))


@pytest.mark.parametrize("kind", ALL)
def test_a_layer_is_compiled_whole(kind):
    layer = converted(layer_of(512, 256, device="cuda"), kind)
    x = values((16, 512), BF16, device="cuda")
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True)(x)
    weight = layer.weight if kind == "linear" else layer.weight.dequantize()
    assert_fused(got, x, weight.t(), Sides(bias=layer.bias))


@pytest.fixture
def by_torch(monkeypatch):
    """How often an exchanged layer called torch."""
    calls, original = [], exchanged.torch_linear
    monkeypatch.setattr(exchanged, "torch_linear", lambda *given: calls.append(1) or original(*given))
    tritile.forget()
    return calls


def timed_with_torch():
    return gpu_tables.predictor("unaligned_16bit", devices.gpu(0)) is not None


def test_odd_vocabulary_head_is_exchanged(by_torch):
    """GPT-2's, tied to its embedding."""
    if not timed_with_torch():
        pytest.skip("torch was not timed on a GPU like this one")
    embed = nn.Embedding(50257, 768, device="cuda", dtype=BF16)
    head = nn.Linear(768, 50257, False, "cuda", BF16)
    head.weight = embed.weight
    model = nn.Sequential(embed, nn.Linear(768, 768, True, "cuda", BF16), head).eval()
    tokens = torch.randint(50257, (4, 1000), device="cuda")
    with torch.no_grad():
        found = convert(model, forward=lambda: model(tokens))
        assert found.exchanged == ("2",), found
        assert head.weight is embed.weight
        x = model[:2](tokens)
        assert_fused(head(x).view(4000, -1), x.view(4000, -1), head.weight.t(), Sides())
        assert not by_torch
        at_one, many = convert(head, rows=(1, 4000)).rows
        assert (many.by, many.exchanged) == ("tritile", True)
        head(x[:1, :1])
        assert len(by_torch) == (at_one.by == "torch")
        assert torch.equal(replayed(lambda: model(tokens)), model(tokens))
    assert restore(model) == 1
    with torch.no_grad():
        assert_fused(head(x).view(4000, -1), x.view(4000, -1), head.weight.t(), Sides())


def test_training_step_has_all_gradients(by_torch):
    if not timed_with_torch():
        pytest.skip("torch was not timed on a GPU like this one")
    head, x = (
        nn.Linear(768, 50257, True, "cuda", BF16),
        values((2000, 768), BF16, device="cuda").requires_grad_(),
    )
    grad = values((2000, 50257), BF16, 4, "cuda")
    found = convert(head, forward=lambda: head(x).backward(grad))
    assert found.rows[0].training
    assert found.exchanged == ("",), found
    x.grad = head.weight.grad = head.bias.grad = None
    head(x).backward(grad)
    assert not by_torch
    assert_fused(x.grad, grad, head.weight.detach(), Sides())
    assert_fused(head.weight.grad, grad.mT, x.detach(), Sides())
    assert head.bias.grad.shape == (50257,)


def test_mode_tune_measures_tritile_and_torch():
    tritile.forget()
    layer = nn.Linear(1024, 999, True, "cuda", BF16).eval()
    with tritile.mode("tune"):
        found = convert(layer, rows=(300,))
    (row,) = found.rows
    assert row.source == "measured"
    assert (row.by == "tritile") == (row.ratio >= 1.02)
    times = store_of(devices.gpu(0))
    problem = tritile.plan(
        "linear", *(torch.empty(*s, dtype=BF16, device="cuda") for s in ((300, 1024), (999, 1024), (999,)))
    ).problem
    assert times.best(TORCH, problem) is not None


def test_layer_in_transforms_and_autocast(by_torch):
    layer = nn.Linear(256, 128, True, "cuda")
    convert(layer, always=True)
    layer.__class__ = exchanged.ConvertedLinear
    x = torch.randn(8, 256, device="cuda")
    torch.vmap(layer)(x)
    with torch.autocast("cuda", BF16):
        assert layer(x).dtype == BF16
    assert len(by_torch) == 2


def ran(kind, grad):
    """A layer that was called three times: prepared, recalled, and differentiated where `grad`."""
    layer = layer_of(512, 256, device="cuda")
    layer = layer if kind == "torch" else converted(layer, kind)
    x = values((16, 512), BF16, device="cuda").requires_grad_(grad)
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            y = layer(x)
        if grad:
            y.sum().backward()
    return layer


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ["torch", *ALL])
def test_parameters_are_swapped_after_calls(kind, grad, uncollected):
    """torch refuses to swap a parameter that anything else refers to."""
    layer = ran(kind, grad)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.to("cpu").to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(p.device.type == "cpu" and p.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ALL)
def test_a_deleted_layer_leaves_no_memory(kind, grad, uncollected):
    ran(kind, grad)  # counters, and torch's own workspaces, are made once
    before = torch.cuda.memory_allocated()
    layer = ran(kind, grad)
    assert torch.cuda.memory_allocated() > before
    del layer
    assert torch.cuda.memory_allocated() == before
