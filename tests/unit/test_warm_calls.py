"""Calls met before, on tensors that are taken for a GPU's: what is looked at every time.

Nothing is compiled or launched: a stand-in records what the launch of the first call is given.
"""

import functools

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tritile
from tritile.errors import GradientError, OverlapError, ShapeError
from tritile.ops import asked, memo
from tritile.ops.described import described
from tritile.ops.grouped import Operands
from tritile.ops.permute import options_of

recalled = functools.partial(memo.recall, otherwise=lambda *_: None)


class Launch:
    """Stands for a prepared launch: `given` are the addresses of the last call's tensors."""

    def __call__(self, *tensors):
        self.at([tensor.data_ptr() for tensor in tensors])
        self.first = tensors

    def at(self, pointers):
        self.given = list(pointers)


class Calls(list):
    """What was prepared, all for the same launch."""


@pytest.fixture
def first_calls(monkeypatch):
    """The calls that were prepared: those that were not met before."""
    calls = Calls()
    calls.launch = launch = Launch()
    monkeypatch.setattr(asked, "on_host", lambda tensor: False)
    monkeypatch.setattr(asked, "prepared", lambda call, by_default: calls.append(call) or launch)
    monkeypatch.setattr(memo, "new_output", lambda shape, *rest: torch.empty(shape))
    tritile.forget()
    yield calls
    tritile.forget()


def parts(*places):
    """6 x 6 matrices that begin at these elements of one memory, far apart from each other unless told."""
    memory = torch.zeros(1024)
    return [memory[place : place + 36].view(6, 6) for place in places]


def eager(op):
    """A call that is looked up, where one of the public function is recalled."""
    words = {"matmul": (None, None), "addmm": (1, 1, None, None, None), "transpose": (1, 0)}
    words["permute"] = options_of((1, 0))
    return lambda *tensors, out: asked.eager(op, tensors, out, words[op])


PUBLIC = {"matmul": tritile.matmul, "addmm": tritile.addmm}
PUBLIC["transpose"] = functools.partial(tritile.transpose, dim0=1, dim1=0)
PUBLIC["permute"] = functools.partial(tritile.permute, dims=(1, 0))
both_ways = pytest.mark.parametrize("way", [eager, PUBLIC.get], ids=["looked up", "recalled"])


@both_ways
@pytest.mark.parametrize("swapped", [False, True])
def test_an_output_that_overlaps_an_input_is_refused_in_a_warm_call_too(first_calls, swapped, way):
    apart, over_a, over_b = parts(0, 256, 512), parts(0, 256, 4), parts(0, 256, 252)
    for a, b, out in (apart, apart):
        version = out._version
        way("matmul")(a, b, out=out.mT if swapped else out)
        assert out._version > version
    for (a, b, out), name in ((over_a, "input"), (over_b, "other")):
        with pytest.raises(OverlapError, match=f"out overlaps {name}"):
            way("matmul")(a, b, out=out.mT if swapped else out)
    assert len(first_calls) == 1  # the others were known
    with torch.inference_mode():
        of_inference = torch.zeros(36).view(6, 6)
    with pytest.raises(GradientError, match="inference_mode"):
        way("matmul")(a, b, out=of_inference)


@both_ways
def test_an_output_may_be_what_is_added_but_not_overlap_it(first_calls, way):
    """Calls in place are prepared apart: the others' added tensor, which begins elsewhere, is looked at."""
    a, b, added, other = parts(0, 256, 512, 768)
    for out in (other, added, other, added):
        assert way("addmm")(added, a, b, out=out) is out
        places = memo.addresses_of(a, b, out, added)
        assert sorted(first_calls.launch.given[:2]) == sorted(places[:2])
        assert first_calls.launch.given[2:] == places[2:]
    memory = torch.zeros(1024)
    added, over = memory[512:548].view(6, 6), memory[516:552].view(6, 6)
    for wrong, into, name in ((a, over, "input"), (memory[540:576].view(6, 6), added, "mat1")):
        with pytest.raises(OverlapError, match=f"out overlaps {name}"):
            way("addmm")(added, wrong, b, out=into)
    assert len(first_calls) == 2


@both_ways
@pytest.mark.parametrize("op", ["permute", "transpose"])
def test_permutations(first_calls, op, way):
    x, apart, over = parts(0, 256, 4)
    for out in (None, apart, apart, None):
        got = way(op)(x, out=out)
        assert (got is out) == (out is not None)
        assert first_calls.launch.given == [x.data_ptr(), got.data_ptr()]
    with pytest.raises(OverlapError, match=f"{op}: out overlaps input"):
        way(op)(x, out=over)
    for _ in range(2):
        assert way(op)(x, out=x) is x
    assert len(first_calls) == 3  # into fresh memory, into other memory, and in place
    with pytest.raises(ShapeError, match="True"):  # which equals 1
        getattr(tritile, op)(x, *((True, 0) if op == "transpose" else ((True, 0),)))


@pytest.mark.parametrize(
    "rules", [lambda: tritile.mode("off"), tritile.batch_invariant], ids=["mode", "rows"]
)
def test_calls_by_other_rules_are_planned_anew(first_calls, rules):
    a, b = parts(0, 256)
    weight = tritile.quantize(torch.randn(16, 32).half(), bits=8, group_size=32)
    for call in (lambda: tritile.matmul(a, b), lambda: tritile.linear(torch.zeros(4, 32).half(), weight)):
        first_calls.clear()
        for _ in range(2):
            call()
            with rules():
                call()
        assert len(first_calls) == 2


def test_a_bias_that_is_lazily_negated_is_made_plain_at_each_call(first_calls):
    weight = tritile.quantize(torch.randn(16, 32).half(), bits=8, group_size=32)
    bias = torch.complex(torch.zeros(16), torch.ones(16)).conj().imag
    assert bias.is_neg()
    for _ in range(2):
        tritile.linear(torch.zeros(4, 32).half(), weight, bias)
        assert torch.equal(first_calls.launch.first[-2], -torch.ones(16))
    assert len(first_calls) == 2


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_weights(first_calls, zero_points, biased):
    weight = tritile.quantize(torch.randn(16, 32).half(), bits=8, group_size=32, zero_points=zero_points)
    bias = torch.zeros(16) if biased else None
    for _ in range(2):
        x = torch.zeros(4, 32, dtype=torch.float16)
        got = tritile.linear(x, weight, bias)
        parts = (x, weight.packed, weight.scales, weight.zeros, bias, got)
        wanted = [t.data_ptr() for t in parts if t is not None]
        assert first_calls.launch.given == wanted
    assert len(first_calls) == 1


def zeros(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def scaled(*tensors, **words):
    return tritile.scaled_matmul(*tensors, out_dtype=torch.float32, **words)


FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Tensors of a call, and the call, for a result of (3, 7).
ORDERS = {
    "matmul": (lambda: zeros((3, 5), (5, 7)), tritile.matmul),
    "transpose": (lambda: zeros((7, 3)), tritile.transpose),
    "permute": (lambda: zeros((7, 3)), lambda x, out: tritile.permute(x, (1, 0), out=out)),
    "linear": (lambda: zeros((3, 5), (7, 5), (7,), (3, 7)), lambda x, w, b, r, out: tritile.linear(
        x, w, b, residual=r, out=out)),
    "linear, bias": (lambda: zeros((3, 5), (7, 5), (7,)), tritile.linear),
    "linear, residual": (lambda: zeros((3, 5), (7, 5), (3, 7)), lambda x, w, r, out: tritile.linear(
        x, w, residual=r, out=out)),
    "addmm": (lambda: zeros((3, 7), (3, 5), (5, 7)), tritile.addmm),
    "addmm, beta 0": (lambda: zeros((3, 7), (3, 5), (5, 7)), functools.partial(tritile.addmm, beta=0)),
    "gated": (lambda: zeros((3, 5), (7, 5), (7, 5), (7,), (3, 7)), lambda x, w, v, b, c, out:
        tritile.gated_linear(x, w, v, bias_gate=b, bias_up=c, out=out)),
    "scales": (lambda: zeros((3, 256), (256, 7), dtype=FP8) + zeros((3, 1), (1, 7)), scaled),
    "block scales": (lambda: zeros((3, 256), (256, 7), dtype=FP8) + zeros((3, 2), (2, 1)), scaled),
    "scales of int8": (lambda: zeros((3, 5), (5, 7), dtype=INT8) + zeros((3, 1), (1, 7)), scaled),
    "groups of rows": (lambda: zeros((3, 8), (2, 8, 7)) + zeros((2,), dtype=torch.int32),
        tritile.grouped_matmul),
    "groups of columns": (lambda: zeros((2, 3, 8), (8, 7)) + zeros((2,), dtype=torch.int32),
        tritile.grouped_matmul),
}  # fmt: skip


@pytest.mark.parametrize("into", ["new", "rows", "columns"])
@pytest.mark.parametrize("name", ORDERS)
def test_a_launch_gets_its_tensors_in_its_own_order_each_time(first_calls, monkeypatch, name, into):
    """As the first call is prepared, the second recalled, without a look-up, and the third looked up."""
    (make, call), kept, found = ORDERS[name], [], []
    for turn in range(3):
        out = {"new": None, "rows": torch.zeros(3, 7), "columns": torch.zeros(7, 3).mT}[into]
        kept.append(make())
        with monkeypatch.context() as patched:
            if turn == 1:
                for module in (memo, asked):
                    patched.setattr(module, "look_up", None)
            got = call(*kept[-1], out=out)
        assert out is None or got is out
        kept[-1].append(got)
        places = {tensor.data_ptr(): place for place, tensor in enumerate(kept[-1])}
        found.append([places[at] for at in first_calls.launch.given])
        if turn:
            memo._LEARNT.clear()
    assert found[0] == found[1] == found[2]
    assert len(first_calls) == 1
    if name not in ("transpose", "permute"):
        always, never = name == "groups of columns", name in ("gated", "groups of rows")
        assert first_calls[0].swapped == (always or (into == "columns" and not never))


class Seen(TorchDispatchMode):
    """Lets torch see every call."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "state",
    [
        Seen,
        forward_ad.dual_level,
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu"),
        lambda: tritile.mode("off"),
        tritile.batch_invariant,
    ],
    ids=["mode", "tangents", "inference", "no_grad", "autocast", "off", "rows"],
)
def test_nothing_is_recalled_in_another_state(first_calls, state):
    a, b = parts(0, 256)
    tritile.matmul(a, b)
    with state():
        assert recalled("matmul", (a, b), None, (None, None)) is None
    assert recalled("matmul", (a, b), None, (None, None)) is not None
    tritile.forget()
    assert recalled("matmul", (a, b), None, (None, None)) is None


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_nothing_is_recalled_in_a_transform(first_calls, transform):
    (a, b), found = parts(0, 256), []
    tritile.matmul(a, b)
    recall = functools.partial(recalled, "matmul", (a, b), None, (None, None))
    transform(lambda x: found.append(recall()) or x.sum())(torch.ones(3, 3))
    assert found == [None]


def key_of(x):
    return memo.look_up("linear", (x,), None, ())[0]


class Own(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize(
    "other",
    [
        lambda a: a.mT,
        lambda a: a[:5],
        lambda a: a.double(),
        lambda a: torch.zeros(64)[1:37].view(6, 6),
        lambda a: a.as_subclass(Own),
        lambda a: torch.nn.Parameter(a),
        lambda a: a.clone().requires_grad_(),
        lambda a: a.to_sparse(),
        lambda a: a.tolist(),
        lambda a: None,
    ],
)
def test_other_tensors_are_not_recalled_nor_looked_up_alike(first_calls, other):
    a, b = parts(0, 256)
    tritile.matmul(a, b)
    assert recalled("matmul", (other(a), b), None, (None, None)) is None
    assert recalled("matmul", (a, other(a)), None, (None, None)) is None
    only_to_autograd = isinstance(other(a), Own) or getattr(other(a), "requires_grad", False)
    assert key_of(a) == key_of(b)
    assert (key_of(a) == key_of(other(a))) == only_to_autograd  # which a look-up is not asked about


def test_lazy_tensors_are_not_recalled(first_calls):
    complexes = torch.zeros(6, 6, dtype=torch.complex64)
    for plain, lazy in ((complexes, complexes.conj()), (complexes.imag, complexes.conj().imag)):
        assert (plain.stride(), plain.data_ptr()) == (lazy.stride(), lazy.data_ptr())
        assert key_of(plain) == key_of(plain.detach()) != key_of(lazy)
        tritile.transpose(plain)
        options = (-2, -1, int, int)
        assert recalled("transpose", (plain,), None, options) is not None
        assert recalled("transpose", (lazy,), None, options) is None


def test_a_gradient_is_not_lost_where_none_was_wanted_before(first_calls):
    a, b = parts(0, 256)
    a.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not tritile.matmul(a, b).requires_grad
        assert tritile.matmul(a, b).requires_grad


def test_recalled_calls_heed_torchs_setting_of_fp32(first_calls, cuda_matmul):
    a, b = parts(0, 256)
    for _ in range(2):
        for cuda_matmul.fp32_precision in ("ieee", "tf32"):
            for _ in range(2):
                tritile.matmul(a, b)
    assert [call.precision for call in first_calls] == ["ieee", "tf32"]


def test_one_tensor_in_two_places_is_another_call(first_calls):
    """The launch gets its address twice; a call of two tensors gets theirs."""
    a, b = parts(0, 256)
    for pair in ((a, a), (a, b), (b, b), (b, a)):
        for _ in range(2):
            tritile.matmul(*pair)
            assert first_calls.launch.given[:2] == memo.addresses_of(*pair)
        assert recalled("matmul", pair, None, (None, None)) is not None
    assert len(first_calls) == 1


def f32(*shape):
    return torch.zeros(shape)


def test_what_cannot_be_remembered_is_not(first_calls):
    """Other types, words that no key holds, lazy negation."""
    x = f32(3, 5)
    assert memo.look_up("linear", (x, 3), None, ())[:2] == (None, None)
    assert memo.look_up("permute", (None,), None, ([],))[:2] == (None, None)
    negated = torch.complex(x, x).conj().imag
    call = described(x, f32(5, 7), f32(3, 7), "ieee")
    memo.remember(("key",), "linear", None, call, (negated, f32(7, 5), None, None), f32(3, 7))
    assert memo.CALLS == {}


@pytest.mark.parametrize("words", [(torch.float16, None), (None, "tf32")], ids=str)
def test_what_is_asked_of_groups_tells_calls_apart(monkeypatch, words):
    offs, keys = torch.tensor([4, 8], dtype=torch.int32), []
    of = Operands(f32(8, 32), f32(2, 32, 16), offs, None, None)
    monkeypatch.setattr(asked, "run_unprepared", lambda *args: keys.append(args[-1]))
    for options in ((None, None), words, words):
        asked.eager("grouped_matmul", of, None, options)
    assert keys[0] != keys[1] == keys[2]


def test_what_torch_is_set_to_tells_calls_of_fp32_apart(monkeypatch):
    found = []
    for setting in ("ieee", "tf32"):
        monkeypatch.setattr(memo, "default_precision", lambda setting=setting: setting)
        found.append([key_of(x) for x in (f32(3, 5), f32(3, 5).half())])
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_a_stopgap_is_not_kept(first_calls, monkeypatch):
    """As mode "tune" takes one while a graph is captured."""
    monkeypatch.setattr(memo, "may_be_kept", lambda: False)
    x = f32(3, 5)
    call = described(x, f32(5, 7), f32(3, 7), "ieee")
    memo.remember(("key",), "linear", None, call, (x, f32(7, 5), None, None), f32(3, 7))
    assert memo.CALLS == {}
