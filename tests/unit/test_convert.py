"""`tritile.nn.convert` and `restore`: which layers are exchanged, what stays of them, who multiplies a call.

Predictions are those of the H200's shipped table. Calls that decide are made on tensors without memory that
say that they are on a GPU.
"""

import copy
import importlib
import pickle
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import tritile
from tests.layers import TOKENS, Net, layer_of
from tests.mock_gpu import mock_gpu
from tests.reference import values
from tritile.choose import aten, pick
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError, NotTunedError
from tritile.families.registry import FAMILIES
from tritile.families.space import legal_configs
from tritile.nn import QuantizedLinear, convert, exchanged, restore
from tritile.nn.exchanged import AlwaysLinear, Comparison, ConvertedLinear, LayerCall
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import store_of

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.HostWarning")
CONVERT = importlib.import_module("tritile.nn.convert")  # the package has the function of this name
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
H200, HERE = "nvidia-h200", target_device("nvidia-h200")
WINS = Comparison(1.5, True, "predicted", 6000.0)
LOSES = Comparison(0.9, False, "predicted", 6000.0, "torch is faster")


@pytest.fixture(autouse=True)
def _fresh():
    tritile.forget()
    yield
    tritile.forget()


@pytest.fixture
def wins(monkeypatch):
    """Every layer wins, and tritile makes each call of an exchanged one."""
    monkeypatch.setattr(CONVERT, "compare", lambda *call: WINS)
    monkeypatch.setattr(exchanged, "by_tritile", lambda *call: True)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def large(k, n, dtype=BF16, bias=False):
    return nn.Linear(k, n, bias, "meta", dtype)


def assert_same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# Which layers are exchanged.


@pytest.mark.parametrize(
    ("layer", "rows", "by"),
    [
        (large(768, 50257), 8000, "tritile"),  # GPT-2's head
        (large(2304, 256001), 2042, "tritile"),  # Gemma's, with a token added
        (large(768, 30522, bias=True), 6160, "tritile"),  # BERT's
        (large(768, 50257, FP16), 8000, "tritile"),
        (large(4096, 4096, FP32), 8000, "torch"),
        (large(512, 512, FP32), 64, "torch"),
        (large(768, 3072, bias=True), 8000, "torch"),
        (large(4096, 4096), 4096, "torch"),
        (large(512, 512, FP64), 4096, "torch"),
    ],
    ids=str,
)
def test_winning_layers_are_exchanged(layer, rows, by):
    found = convert(layer.eval(), rows=rows, device=H200)
    (row,) = found.rows
    assert (row.by, row.rows, row.training, row.count) == (by, rows, False, 1)
    assert row.features == (layer.in_features, layer.out_features)
    assert row.exchanged == (by == "tritile") == (type(layer) is ConvertedLinear) == bool(found.exchanged)
    assert (row.why == "") == (by == "tritile")
    assert found.device == HERE.name


def test_rows_of_forward_or_step():
    layer = large(768, 50257)
    training, forward = (convert(layer.train(on), rows=8000, device=H200).rows[0] for on in (True, False))
    assert (training.training, forward.training) == (True, False)
    assert 1 < training.ratio < forward.ratio  # the gradient of the weight counts as 1
    layer.weight.requires_grad_(False)
    assert not convert(layer.train(), rows=8000, device=H200).rows[0].training


def test_some_rows_win():
    """A layer is exchanged, and the table says at which rows."""
    found = convert(large(4096, 14337).eval(), rows=(1, 8000, 8000), device=H200)
    rows = [(row.rows, row.by, row.exchanged) for row in found.rows]
    assert rows == [(1, "torch", True), (8000, "tritile", True)]
    (row,) = convert(large(768, 50257), rows=8000, device="sm_80").rows
    assert (row.by, row.ratio, row.source) == ("torch", None, "")
    assert "torch's time at this size is unknown on NVIDIA A100" in row.why


def test_table_groups_alike_layers():
    blocks = nn.ModuleList(nn.ModuleDict({"up": large(768, 3072)}) for _ in range(3))
    found = convert(nn.ModuleDict({"h": blocks, "head": large(768, 50257)}).eval(), rows=8000, device=H200)
    assert [(row.layers, row.count) for row in found.rows] == [("h.*.up", 3), ("head", 1)]
    text, html = repr(found), found._repr_html_()
    assert text.startswith("tritile.nn.convert: 1 of 4 linear layers exchanged for NVIDIA H200\n")
    for part in ("768 -> 50257", "predicted", found.rows[0].why):
        assert part in text
    assert html.startswith("<table><caption>")
    assert html.count("<tr>") == 4
    assert text.endswith(f"\n{found.note}")
    assert f">{found.note}</td></tr></tfoot></table>" in html
    assert "0 of 0" in repr(convert(nn.Identity(), rows=8, device=H200))


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer, self.lora_A = layer_of(), nn.ModuleDict({"default": layer_of()})


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def not_plain():
    """Layers that stay as they are, and why."""
    replaced = layer_of()
    replaced.forward = lambda x: x
    return {
        "subclass": (Subclass(8, 8), "it is a subclass, Subclass"),
        "parametrized": (parametrizations.orthogonal(nn.Linear(8, 8)), "it is a subclass, Parametrized"),
        "spectral norm": (spectral_norm(nn.Linear(8, 8)), "its weight is computed"),
        "pruned": (prune.identity(layer_of(), "weight"), "its weight is computed"),
        "lazy": (nn.LazyLinear(8), "it is a subclass, LazyLinear"),
        "attention": (nn.MultiheadAttention(8, 2).out_proj, "it is a subclass"),
        "replaced": (replaced, "its forward was replaced"),
        "adapter": (Lora(), "it is inside an adapter"),
        "fp8": (nn.Linear(8, 8).to(torch.float8_e4m3fn), "its weight is float8_e4m3fn"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", [{"rows": 8, "device": H200}, {"always": True}, {"kind": "int8"}], ids=str)
def test_other_layers_left_alone(wins, how):
    left = not_plain()
    model = nn.ModuleDict({name: layer for name, (layer, _) in left.items()})
    before = [type(module) for module in model.modules()]
    found = convert(model, **how)
    assert [type(module) for module in model.modules()] == before
    assert found.exchanged == ()
    assert {row.layers.partition(".")[0] for row in found.rows} == set(left)
    for row in found.rows:
        assert left[row.layers.partition(".")[0]][1] in row.why, row.layers


def test_filter_leaves_layers_out(wins):
    model = nn.Sequential(layer_of(), layer_of(), tritile.nn.Linear(8, 8))
    found = convert(model, rows=8, device=H200, filter=lambda name, layer: name != "0")
    assert found.exchanged == ("1",)
    assert [row.why for row in found.rows if row.why] == ["it is a tritile.nn.Linear"]


def test_converting_again_decides_anew(wins, monkeypatch):
    model = nn.Sequential(layer_of())
    by_rows = {"rows": 8, "device": H200}
    for how in (by_rows, by_rows, {"always": True}):
        assert convert(model, **how).exchanged == ("0",)
        assert type(model[0]) is (AlwaysLinear if "always" in how else ConvertedLinear)
    monkeypatch.setattr(CONVERT, "compare", lambda *call: LOSES)
    assert convert(model, **by_rows).exchanged == ()
    assert type(model[0]) is nn.Linear
    convert(model, always=True)
    convert(model, "int8")
    assert type(model[0]) is QuantizedLinear


# What stays.

LAYERS = ("up", "down", "head")


@pytest.mark.parametrize(
    ("kind", "how"), [(ConvertedLinear, {"rows": 6, "device": H200}), (AlwaysLinear, {"always": True})]
)
def test_hooks_flags_stay_restore_undoes(net, wins, kind, how):
    modules, kept, state, calls = [*net.modules()], [*net.named_parameters()], net.state_dict(), []
    wanted = net(TOKENS)
    wanted.square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in kept}
    net.up.bias.requires_grad_(False)
    net.up.register_forward_pre_hook(lambda module, args: calls.append("before"))
    net.up.register_forward_hook(lambda module, args, out: calls.append("after"))
    net.up.register_full_backward_hook(lambda module, inner, outer: calls.append("backward"))
    net.up.register_state_dict_post_hook(lambda module, state, prefix, rest: calls.append("state"))
    net.down.eval()
    changes = {kind: lambda: convert(net, **how), nn.Linear: lambda: restore(net)}
    for cls, change in changes.items():
        change()
        assert [type(getattr(net, name)) for name in LAYERS] == [cls] * 3
        assert net.again is net.up
        assert all(a is b for a, b in zip(net.modules(), modules, strict=True))
        assert all(a is b for (_, a), (_, b) in zip(net.named_parameters(), kept, strict=True))
        assert net.head.weight is net.embed.weight
        assert (net.up.bias.requires_grad, net.up.training, net.down.training) == (False, True, False)
        calls.clear()
        out = net(TOKENS)
        assert_same(out, wanted)
        net.zero_grad()
        out.square().sum().backward()
        for name, parameter in kept:
            if name != "up.bias":  # frozen
                assert_same(parameter.grad, grads[name])
        assert net.state_dict().keys() == state.keys()
        assert calls == ["before", "after", "backward", "state", "state"]  # under two names
    assert restore(net) == 0


def test_copies_are_exchanged_too(net, wins):
    convert(net, rows=6, device=H200)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert [type(getattr(other, name)) for name in LAYERS] == [ConvertedLinear] * 3
        assert other.head.weight is other.embed.weight is not net.embed.weight
        assert other.again is other.up
        assert_same(other(TOKENS), net(TOKENS))
        restore(other)
        assert (type(other.up), type(net.up)) == (nn.Linear, ConvertedLinear)


def test_model_inside_compiled_model(net, wins):
    wanted = net(TOKENS)
    model = torch.compile(nn.Sequential(net), backend="aot_eager", fullgraph=True)
    for change in (lambda: None, lambda: convert(model, rows=6, device=H200), lambda: restore(model)):
        change()
        assert_same(model(TOKENS), wanted)


def test_parametrized_after_conversion(net, wins):
    convert(net, rows=6, device=H200)
    wanted = net(TOKENS)
    parametrize.register_parametrization(net.up, "weight", nn.Identity())
    assert_same(net(TOKENS), wanted)
    assert restore(net) == 2
    assert isinstance(net.up, ConvertedLinear)
    parametrize.remove_parametrizations(net.up, "weight")
    assert restore(net) == 1


# transformers' Conv1D.


class Conv1D(nn.Module):
    """As transformers has it: a linear layer whose weight is (K, N)."""

    def __init__(self, n, k):
        super().__init__()
        self.nf, self.nx = n, k
        self.weight, self.bias = nn.Parameter(torch.empty(k, n)), nn.Parameter(torch.zeros(n))
        nn.init.normal_(self.weight)

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


@pytest.fixture
def conv1d(monkeypatch):
    """The class Conv1D of a transformers that is not installed."""
    module = types.ModuleType("transformers.pytorch_utils")
    made = type("Conv1D", (Conv1D,), {"__module__": module.__name__, "__qualname__": "Conv1D"})
    module.Conv1D = made
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", module)
    yield made
    for name in ("ConvertedConv1D", "AlwaysConv1D"):
        vars(exchanged).pop(name, None)


@pytest.mark.parametrize("how", [{"rows": 6, "device": H200}, {"always": True}], ids=["rows", "always"])
def test_conv1d_is_exchanged_too(conv1d, wins, how):
    layer, x = conv1d(12, 8), values((2, 3, 8), FP32).requires_grad_()

    def called():
        layer.zero_grad()
        x.grad = None
        out = layer(x)
        out.sum().backward()
        return [out, *(each.grad for each in (x, layer.weight, layer.bias))]

    wanted = called()
    found = convert(layer, **how)
    assert (found.layers, found.rows[0].features, found.rows[0].by) == (1, (8, 12), "tritile")
    assert isinstance(layer, conv1d)
    assert type(layer) is not conv1d
    torch.testing.assert_close(called(), wanted)
    assert layer.weight.grad.stride() == wanted[2].stride()
    assert type(pickle.loads(pickle.dumps(copy.deepcopy(layer)))) is type(layer)
    assert restore(layer) == 1
    assert type(layer) is conv1d
    torch.testing.assert_close(called(), wanted)
    (row,) = convert(layer, "int8").rows
    assert row.why == "it is a Conv1D"


def test_conv1d_own_layout(conv1d):
    with torch.device("meta"):
        layer = conv1d(50257, 768).to(BF16).eval()
    assert convert(layer, rows=8000, device=H200).exchanged == ("",)


# What one forward pass shows.


def test_a_recorded_forward_decides(net, monkeypatch):
    asked = []
    monkeypatch.setattr(CONVERT, "compare", lambda *call: asked.append(call) or WINS)
    frozen = nn.Linear(8, 4, dtype=FP64).requires_grad_(False)

    def forward():
        net(TOKENS).sum().backward()
        with torch.no_grad():
            net(TOKENS[:1])
            frozen(torch.ones(4, 8, dtype=FP64, requires_grad=True))
        frozen(input=torch.ones(3, 8, dtype=FP64))
        frozen(torch.ones(2, 3, 8, dtype=FP64, requires_grad=True))
        with torch.autocast("cpu", BF16):
            frozen(torch.ones(5, 8, dtype=FP64))

    model = nn.ModuleDict({"net": net, "frozen": frozen, "idle": layer_of()})
    found = convert(model, forward=forward, device=H200)
    net(TOKENS[:, :1])  # no longer recorded
    assert found.exchanged == ("net.up", "net.down", "net.head", "frozen")
    up = LayerCall(6, FP64, True, True), LayerCall(3, FP64, False, False)
    assert [call[0] for call in asked if call[1] is net.up.weight] == [*up]
    of_frozen = [LayerCall(rows, FP64, rows == 6, False) for rows in (4, 3, 6)]
    assert [call[0] for call in asked if call[1] is frozen.weight] == of_frozen
    assert asked[0][1:] == (net.up.weight, net.up.bias, HERE, None)
    rows = [(row.layers, row.rows, row.dtype, row.training, row.by, row.why) for row in found.rows]
    autocast = "under autocast torch caches the weights that it casts"
    assert ("net.up", 6, "float64", True, "tritile", "") in rows
    assert ("frozen", 5, "", False, "torch", autocast) in rows
    assert ("idle", None, "", False, "torch", "forward did not call it") in rows


def test_failing_forward_changes_nothing(net, wins):
    with pytest.raises(ZeroDivisionError):
        convert(net, forward=lambda: 1 / 0, device=H200)
    assert type(net.up) is nn.Linear
    assert not net.up._forward_hooks


# Who multiplies in a call.


@pytest.fixture
def decided():
    """The calls that were decided."""
    return []


@pytest.fixture
def runs(monkeypatch, decided):
    """Who multiplied, call by call, on a GPU that is not there; `decided`: tritile wins from 100 rows on."""
    made = []

    def compare(call, weight, bias, device, index):
        decided.append(call)
        return WINS if call.rows >= 100 else LOSES

    monkeypatch.setattr(exchanged, "compare", compare)
    monkeypatch.setattr(exchanged, "linear", lambda *given, precision: made.append("tritile"))
    monkeypatch.setattr(exchanged, "torch_linear", lambda *given: made.append("torch"))
    with mock_gpu("nvidia-h200"):
        yield made


def as_exchanged(layer):
    convert(layer, always=True)
    layer.__class__ = ConvertedLinear
    return layer


def on_meta(*shape, dtype=BF16, **how):
    return torch.empty(*shape, dtype=dtype, device="meta", **how)


def test_row_counts_decided_once(runs, decided, monkeypatch):
    layer = as_exchanged(large(8, 16))
    with torch.no_grad():
        for _ in range(3):
            layer(on_meta(200, 8))
            layer(on_meta(3, 8))
            layer(on_meta(2, 100, 8))
    assert runs == ["tritile", "torch", "tritile"] * 3
    assert [call.rows for call in decided] == [200, 3, 200]
    tritile.forget()
    layer(on_meta(200, 8))
    assert len(decided) == 4
    monkeypatch.setattr(exchanged, "may_be_kept", lambda: False)  # mode tune, during a capture
    for _ in range(2):
        layer(on_meta(300, 8))
    assert len(decided) == 6


def test_gradients_modes_settings_apart(runs, decided, cuda_matmul):
    layer, x = as_exchanged(large(8, 16)), on_meta(200, 8)
    layer(x)
    layer(on_meta(200, 8, requires_grad=True))
    with torch.no_grad():
        layer(x)
    grads = [(call.grad_input, call.grad_weight) for call in decided]
    assert grads == [(False, True), (True, True), (False, False)]
    with torch.no_grad(), tritile.mode("off"):
        layer(x)
    assert len(decided) == 4
    layer.float()
    with torch.no_grad():
        for setting in ("ieee", "tf32", "ieee"):
            cuda_matmul.fp32_precision = setting
            layer(x.float())
    assert len(decided) == 6


def test_torch_multiplies_unplain_calls(runs, decided):
    layer, x = as_exchanged(large(8, 16)), on_meta(200, 8)

    class Mine(torch.Tensor):
        pass

    layer(x.as_subclass(Mine))
    with torch.autocast("cpu", BF16):
        layer(x)
    layer(on_meta(0, 8))
    layer(on_meta(8, 200).mT)
    layer(on_meta(200, 9))
    assert runs == ["torch"] * 5
    assert decided == []


def test_invariant_calls_are_tritiles(runs, monkeypatch):
    layer = as_exchanged(large(8, 16))
    with tritile.batch_invariant():
        layer(on_meta(3, 8))
    monkeypatch.setattr(exchanged, "compare", MagicMock(side_effect=NotTunedError("no")))
    layer(on_meta(200, 8))
    assert runs == ["tritile", "torch"]


def test_host_calls_are_torchs(monkeypatch):
    monkeypatch.setattr(exchanged, "linear", lambda *given: pytest.fail("tritile's"))
    layer, x = as_exchanged(layer_of()), values((3, 40), BF16)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.vmap(layer)(x).shape == (3, 7)


# How a call is compared.

CALL, FP32_CALL = LayerCall(8000, BF16), LayerCall(8000, FP32, precision="fp16x3")
WEIGHTS = {BF16: (50257, 768), FP32: (4096, 4096), FP64: (4096, 4096)}
TILE = tritile.Config.of(family="tile")


def compare(call=CALL, index=None, bias=None):
    return exchanged.compare(call, on_meta(*WEIGHTS[call.dtype], dtype=call.dtype), bias, HERE, index)


def planned_as(monkeypatch, *found):
    """Has products planned so, by turns; return the problems that were asked for."""
    asked, given = [], iter(found)

    def planned(problem, device, index):
        asked.append(problem)
        return pick.Plan(problem, **{"config": TILE, "source": "predicted", "device": HERE} | next(given))

    monkeypatch.setattr(exchanged, "_planned", planned)
    return asked


def test_products_of_call_and_gradients(monkeypatch):
    found = planned_as(monkeypatch, *[{}] * 3)
    compare(CALL._replace(grad_input=True, grad_weight=True), bias=on_meta(50257))
    assert [(each.m, each.n, each.k, each.b_layout) for each in found] == [
        (8000, 50257, 768, "column"),
        (8000, 768, 50257, "row"),
        (50257, 768, 8000, "row"),
    ]
    assert found[0].epilogue


NEAR, SLOWER = "tritile is ahead, but not by enough to be sure", "torch is faster"
ALIKE = "both are about as fast"
ATEN = {"config": aten.CONFIG, "us": 50.0, "other_us": 100.0}


def plan(source, torch_us, error=0.0):
    return {"source": source, "us": 100.0, "other_us": torch_us, "other_error": error}


@pytest.mark.parametrize(
    ("call", "plan", "ratio", "source", "why"),
    [
        # A prediction has to win by more than it errs.
        (CALL, plan("exact", 103.0), 1.03, "measured", ""),
        (CALL, plan("exact", 101.0), 1.01, "measured", ALIKE),  # within noise
        (CALL, plan("exact", 99.0), 0.99, "measured", SLOWER),
        (CALL, plan("table", 103.0), 1.03, "measured", ""),
        (CALL, plan("table", 139.0, 0.4), 1.39, "predicted", NEAR),  # torch's time is
        (CALL, plan("predicted", 103.0), 1.03, "predicted", ""),  # ours is
        (CALL, plan("predicted", 139.0, 0.4), 1.39, "predicted", NEAR),
        (CALL, plan("predicted", 141.0, 0.4), 1.41, "predicted", ""),
        (CALL, plan("model", 149.0, 0.2), 1.49, "predicted", NEAR),  # which errs, too
        (CALL, plan("model", 151.0, 0.2), 1.51, "predicted", ""),
        # Where torch's kernel is planned, or its time unknown, a layer stays torch's.
        (CALL, ATEN, 0.5, "predicted", SLOWER),
        (CALL, ATEN | {"source": "exact"}, 0.5, "measured", SLOWER),
        (CALL, ATEN | {"us": 104.0}, 1.04, "predicted", NEAR),
        (CALL, ATEN | {"other_us": None}, None, "", "torch is as fast or faster"),
        (CALL, {"config": aten.CONFIG, "why": "by a rule", "source": "table"}, None, "", "by a rule"),
        (CALL, {"us": 100.0}, None, "", "torch's time at this size is unknown on NVIDIA H200"),
        # Where fp16 parts are asked for, they are faster by this rule or as measured.
        (FP32_CALL, plan("model", None), exchanged.PARTS_AHEAD, "predicted", ""),
        (FP32_CALL, plan("exact", 300.0), 3.0, "measured", ""),
    ],
)
def test_how_a_plan_is_compared(monkeypatch, call, plan, ratio, source, why):
    planned_as(monkeypatch, plan)
    found = compare(call)
    assert (found.ratio, found.source, found.wins, found.why) == (ratio, source, why == "", why)


def test_measured_parts_and_torch_compared():
    problem = MatmulProblem(1, 8000, 4096, 4096, "float32", "float32", b_layout="column", precision="fp16x3")
    best = next(each for each in legal_configs(problem, HERE) if each.family == "descriptor")
    store_of(HERE).add(FAMILIES["matmul"]["descriptor"].digest, Trial(problem, best, 400.0, error=0.0))
    store_of(HERE).add(TORCH, Trial(problem, aten.CONFIG, 2000.0))
    with tritile.mode(fp32="fp16x3"):
        (row,) = convert(large(4096, 4096, FP32).eval(), rows=8000, device=H200).rows
    assert (row.ratio, row.source, row.by) == (5.0, "measured", "tritile")


TORCHS = Comparison(0.5, False, "predicted", 1000.0, by_torch=True)


@pytest.mark.parametrize(
    ("products", "ratio", "win"),
    [
        ([WINS], 1.5, True),
        ([LOSES], 0.9, False),
        ([TORCHS], 0.5, False),
        ([Comparison()], None, False),
        ([WINS, Comparison(), Comparison()], 3.5 / 3, True),
        ([WINS, TORCHS, TORCHS], 3.5 / 3, True),  # in which torch's kernel runs as before
        ([WINS, LOSES, LOSES], 1.1, True),
        ([Comparison(1.03, True, "measured", 500.0), LOSES, LOSES], 2.83 / 3, False),
        ([Comparison(1.2, False, "predicted", 500.0)] * 2, 1.2, False),  # near, and not sure
        # What is gained has to exceed what the host takes longer.
        ([Comparison(1.5, True, "predicted", 20.0)] * 2, 1.5, False),
        ([Comparison(1.06, True, "measured", 1000.0)] * 3, 1.06, False),
        ([Comparison(1.06, True, "measured", 4000.0)] * 3, 1.06, True),
        ([Comparison(1.5, True, "predicted", 20.0)], 1.5, True),  # without gradients it is not
    ],
)
def test_ratio_is_mean_over_products(monkeypatch, products, ratio, win):
    given = iter(products)
    monkeypatch.setattr(exchanged, "_compared", lambda *problem: next(given))
    found = compare(CALL._replace(grad_input=len(products) > 1, grad_weight=len(products) > 2))
    assert found.ratio == pytest.approx(ratio)
    assert found.wins == win
    is_ahead = len(products) > 1 and all(each.wins for each in products)
    gains_too_little = is_ahead and not win
    assert ("a training step would gain less than 0.5 ms" in found.why) == gains_too_little
    assert (NEAR in found.why) == (ratio in (1.2,) and not win)


def test_tune_measures_only_classes(monkeypatch):
    """On a GPU that is here."""
    done = []

    def planned(problem, index, by_torch):
        done.append((problem.dtype, index, by_torch))
        return pick.Plan(problem, TILE, "exact", HERE, 100.0, other_us=150.0)

    monkeypatch.setattr(exchanged, "planned", planned)
    with tritile.mode("tune"):
        assert compare().source == "predicted"  # a GPU that is not here
        assert compare(index=0).source == "measured"
        assert "products of float64 ieee" in compare(LayerCall(8000, FP64), 0).why
    assert done == [("bfloat16", 0, True)]


@pytest.mark.parametrize(("mode", "known"), [("off", False), ("strict", True)])
def test_mode_off_and_strict(mode, known):
    with tritile.mode(mode):
        found = compare()
    assert (found.ratio is not None) == found.wins == known


def test_fp32_follows_torchs_setting(monkeypatch, cuda_matmul):
    found = planned_as(monkeypatch, *[{}] * 3)
    for setting in ("none", "ieee", "tf32"):
        cuda_matmul.fp32_precision = setting
        compare(LayerCall(8000, FP32))
    assert [each.precision for each in found] == ["ieee", "ieee", "tf32"]


def test_layers_use_given_precision(monkeypatch):
    called = []
    monkeypatch.setattr(exchanged, "linear", lambda *args, precision: called.append(precision))
    layer = large(4096, 4096, FP32).eval()
    assert not convert(layer, rows=8000, device=H200).exchanged
    assert convert(layer, rows=8000, device=H200, precision="fp16x3").exchanged
    assert not convert(layer, rows=8, device=H200, precision="fp16x3").exchanged  # torch's fp32 may be faster
    assert "fp32" not in vars(layer)
    for options in ({"rows": 8000, "device": H200}, {"always": True}):
        convert(layer, precision="fp16x3", **options)
        monkeypatch.setattr(exchanged, "by_tritile", lambda *call: True)
        again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
        again(torch.empty(8, 4096, device="meta"))
        again.to(BF16)(torch.empty(8, 4096, device="meta", dtype=BF16))
    assert called == ["fp16x3", None] * 2
    assert restore(layer) == 1
    assert "fp32" not in vars(layer)


@pytest.mark.parametrize("given", [{"precision": "tf32"}, {"precision": "fp16x3", "kind": "int8"}])
def test_a_wrong_precision_of_layers(given):
    options = {} if "kind" in given else {"always": True}
    with pytest.raises(InvalidValueError, match=r"precision is .*expected None or 'fp16x3', for kind"):
        convert(nn.Linear(8, 8), **given, **options)


# Layers of few bits.


def test_quantizing_leaves_shared_weights():
    net = Net(BF16).eval()
    net.up.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    found = convert(net, "int8")
    assert found.exchanged == ("up", "down")
    why = {row.layers: row.why for row in found.rows if row.why}
    assert why == {"head": "it shares a parameter with embed"}
    assert (type(net.up), type(net.down), type(net.head)) == (QuantizedLinear, QuantizedLinear, nn.Linear)
    assert net.again is net.up
    assert not net.up.training
    assert [key for key, _ in net.named_parameters()] == ["embed.weight", "up.bias"]
    assert torch.equal(net.up(values((2, 8), BF16)), net.up.bias.expand(2, 16))
    assert net(TOKENS).shape == (2, 3, 11)


def test_unquantizable_has_a_reason():
    odd = nn.ModuleDict({
        "wide": nn.Linear(4, 4),
        "inf": layer_of(),
        "fused": tritile.nn.Linear(4, 4, activation="relu", dtype=BF16),
        "encoder": nn.TransformerEncoderLayer(4, 2, 8, dtype=BF16),
    })  # fmt: skip
    with torch.no_grad():
        odd["inf"].weight[2, 3] = float("inf")
    types = [type(module) for module in odd.modules()]
    found = {row.layers: row.why for row in convert(odd, "int4").rows}
    assert [type(module) for module in odd.modules()] == types
    for name, part in {
        "wide": "its weight is float32, not one of bfloat16, float16",
        "inf": "weight[2, 3] is inf",
        "fused": "its activation 'relu' is not fused",
        "encoder.linear1": "torch.nn.TransformerEncoderLayer reads its weight",
        "encoder.self_attn.out_proj": "it is a subclass",
    }.items():
        assert part in found[name], name


def test_quantizing_a_root_is_not_restored():
    root = layer_of()
    convert(root, "int8", group_size=64, zero_points=True)
    assert (type(root), root.bits, root.group_size, root.zeros is None) == (QuantizedLinear, 8, 64, False)
    assert restore(root) == 0
    assert type(root) is QuantizedLinear


# What is refused.


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": "net"}, "model is a str: expected a torch.nn.Module"),
        ({"kind": "fp8"}, "kind is 'fp8': expected one of linear, int8, int4"),
        ({}, "expected exactly one of rows=, "),
        ({"rows": 8, "always": True}, "expected exactly one of rows=, "),
        ({"rows": 8, "forward": lambda: None}, "expected exactly one of rows=, "),
        ({"rows": 0}, "rows is 0: expected one or more whole numbers above 0"),
        ({"rows": True}, "rows is True"),
        ({"rows": (8, 2.5)}, "rows is "),
        ({"rows": ()}, "rows is "),
        ({"rows": 2.5}, "rows is 2.5"),
        ({"forward": 8}, "forward is a int: expected a function"),
        ({"rows": 8}, "there is no GPU here: pass device="),
        ({"rows": 8, "device": "tpu"}, "device is 'tpu'"),
        ({"kind": "int8", "rows": 8}, "kind is 'int8': rows, forward and always are for 'linear' only"),
        ({"kind": "int4", "group_size": 16}, "group_size is 16"),
    ],
)
def test_bad_arguments_change_nothing(given, why, monkeypatch):
    monkeypatch.setattr(CONVERT.devices, "current_index", lambda: None)
    net = Net()
    with pytest.raises(InvalidValueError, match="convert: ") as told:
        convert(**({"model": net} | given))
    assert why in str(told.value)
    assert type(net.up) is nn.Linear
    with pytest.raises(InvalidValueError, match="restore: model is a dict"):
        restore({})
