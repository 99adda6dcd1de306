"""Calls that a class or a tracer takes over: `__torch_function__`, torch.fx, torch.jit, counters of torch."""

import pytest
import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

import tritile
from tests.reference import values
from tritile.errors import UnsupportedError
from tritile.nn import exchanged

pytestmark = pytest.mark.filterwarnings("ignore::tritile.errors.HostWarning", "ignore::DeprecationWarning")
A, B, C, BIAS = (values(shape, torch.float32, i) for i, shape in enumerate(((4, 8), (8, 6), (6, 8), (4, 6))))
ENDS = torch.tensor([1, 4], dtype=torch.int32)
EIGHT_A, EIGHT_B = (torch.randint(-9, 9, shape, dtype=torch.int8) for shape in ((4, 8), (8, 6)))
PACKED = tritile.quantize(torch.ones(6, 8).bfloat16(), bits=4, group_size=32)
# A call of its first argument, an argument, and the name that a class sees.
CALLS = {
    "matmul": (lambda x: tritile.matmul(x, B), A),
    "mm": (lambda x: tritile.mm(x, B), A),
    "bmm": (lambda x: tritile.bmm(x, B[None]), A[None]),
    "linear": (lambda x: tritile.linear(x, C, activation="relu"), A),
    "addmm": (lambda x: tritile.addmm(x, A, B, alpha=0.5), BIAS),
    "baddbmm": (lambda x: tritile.baddbmm(x, A[None], B[None]), BIAS),
    "gated_linear": (lambda x: tritile.gated_linear(x, C, C + 1), A),
    "scaled_matmul": (lambda x: tritile.scaled_matmul(x, EIGHT_B, torch.ones(()), torch.ones(())), EIGHT_A),
    "grouped_matmul": (lambda x: tritile.grouped_matmul(x, torch.stack([B, B + 1]), ENDS), A),
    "permute": (lambda x: tritile.permute(x, [1, 0]), A),
    "transpose": (lambda x: tritile.transpose(x, 0, 1), A),
    "contiguous": (lambda x: tritile.contiguous(x), A.t()),
    "linear_quantized": (lambda x: tritile.linear(x, PACKED), A.bfloat16()),
    "quantize": (lambda x: tritile.linear(A.bfloat16(), tritile.quantize(x, bits=8)), C.bfloat16()),
}


def layers():
    converted, always = nn.Linear(8, 6), nn.Linear(8, 6)
    exchanged.assign(converted, True)
    exchanged.assign(always, True, always=True)
    return {
        "converted": (converted, A),
        "always": (always, A),
        "linear": (tritile.nn.Linear(8, 6, activation="gelu"), A),
        "quantized": (tritile.nn.QuantizedLinear.from_linear(nn.Linear(8, 6).bfloat16()), A.bfloat16()),
    }


LAYERS = layers()


class Duck:
    """Says how a function was called on it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func.__name__, args, kwargs or {}


def targets(traced):
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", CALLS)
def test_fx_records_operation(name):
    call, x = CALLS[name]
    traced = fx.symbolic_trace(call)
    assert all(target.__module__.startswith(("tritile", "torch._ops")) for target in targets(traced))
    assert torch.equal(traced(x), call(x))


@pytest.mark.parametrize("name", LAYERS)
def test_fx_records_layer(name):
    layer, x = LAYERS[name]
    traced = fx.symbolic_trace(nn.Sequential(layer))
    (target,) = targets(traced)
    assert "torch.nn" not in target.__module__
    assert torch.equal(traced(x), layer(x))
    assert {id(tensor) for tensor in traced.state_dict(keep_vars=True).values()} <= {
        id(tensor) for tensor in layer.state_dict(keep_vars=True).values()
    }


@pytest.mark.parametrize("name", [name for name in CALLS if name != "quantize"])
def test_torch_function_class_gets_call(name):
    seen, args, kwargs = CALLS[name][0](duck := Duck())
    assert seen.partition(".")[0] == name
    assert args[0] is duck
    options = {
        "linear": {"activation": "relu"},
        "addmm": {"alpha": 0.5},
        "grouped_matmul": {"offs": ENDS},
        "transpose": {"dim0": 0, "dim1": 1},
    }
    if name != "linear_quantized":
        assert kwargs == options.get(name, {})
    if name == "addmm":
        assert args[1] is A
        assert args[2] is B


def test_torch_function_any_argument():
    assert tritile.mm(A, duck := Duck())[1] == (A, duck)
    assert tritile.matmul(A, B, out=duck)[2] == {"out": duck}
    assert tritile.quantize(duck, bits=4)[0] == "quantize"


def test_class_gets_converted_layer_call():
    layer = LAYERS["converted"][0]
    assert layer(duck := Duck())[:2] == ("linear", (duck, layer.weight, layer.bias))
    assert nn.functional.linear(duck, layer.weight, layer.bias)[:2] == layer(duck)[:2]


def test_tensor_subclass_gets_operator():
    seen = []

    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    assert type(tritile.matmul(A.as_subclass(Sub), B)) is Sub
    assert torch.ops.tritile.matmul.default in seen


@pytest.mark.parametrize(
    "call", [*(call for call in CALLS.values()), *LAYERS.values()], ids=[*CALLS, *LAYERS.keys()]
)
def test_jit_trace_records_the_operator(call):
    function, x = call
    if function in (CALLS["quantize"][0], CALLS["contiguous"][0]):
        return
    traced = torch.jit.trace(function, x)
    assert torch.equal(traced(x), function(x))
    again = x.flip(0).contiguous()
    assert torch.equal(traced(again), function(again))
    if function is not LAYERS["converted"][0]:
        assert "tritile::" in str(traced.inlined_graph)


@pytest.mark.parametrize("name", LAYERS)
def test_jit_script_says_instead(name):
    with pytest.raises(UnsupportedError, match=r"torch.jit.script cannot compile .*torch.compile"):
        torch.jit.script(nn.Sequential(LAYERS[name][0]))


@pytest.mark.parametrize(
    "name",
    ["matmul", "bmm", "linear", "addmm", "baddbmm", "gated_linear", "grouped_matmul", "linear_quantized"],
)
def test_torchs_counter_counts_a_product(name):
    call, x = CALLS[name]
    with FlopCounterMode(display=False) as counter:
        call(x)
    assert counter.get_total_flops() == 2 * 4 * 6 * 8 * (2 if name == "gated_linear" else 1)
