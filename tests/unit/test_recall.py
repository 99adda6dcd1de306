"""Calls met again: the launch gets the tensors that it took the first time, in its own order."""

from types import SimpleNamespace

import pytest
import torch

import tritile
from tritile.errors import OverlapError
from tritile.ops import grouped, memo
from tritile.ops.described import Extras, described
from tritile.ops.groups import Operands
from tritile.ops.groups import described as described_groups


def f32(*shape):
    return torch.zeros(shape)


@pytest.fixture(autouse=True)
def _forgotten():
    tritile.forget()
    yield
    tritile.forget()


def remembered(op, tensors, call, out):
    """A call kept under a key, whose launch records what it is given."""
    given = []
    memo.remember(("key",), op, SimpleNamespace(at=given.append), call, tensors, out)
    return memo.CALLS[("key",)], given


def again(op, ready, tensors, out):
    """Launch a call that is alike."""
    return memo.launch_again(op, ready, tensors, out, memo.addresses_of(*tensors, out))


LINEAR = {"input": f32(3, 5), "weight": f32(7, 5), "bias": f32(7), "residual": f32(3, 7)}


@pytest.mark.parametrize("left_out", [(), ("bias",), ("residual",), ("bias", "residual")], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_linear(left_out, turned):
    tensors = tuple(None if name in left_out else tensor for name, tensor in LINEAR.items())
    x, weight, bias, residual = tensors
    out = f32(7, 3).mT if turned else f32(3, 7)
    call = described(x, weight.mT, out, "ieee", Extras(bias=bias, residual=residual))
    assert call.swapped == turned
    ready, given = remembered("linear", tensors, call, out)
    assert again("linear", ready, tensors, out) is out
    wanted = [x, weight, out] if not turned else [weight, x, out]
    wanted += [t for t in (bias, residual) if t is not None]
    assert list(given[0]) == memo.addresses_of(*wanted) == memo.addresses_of(*call.tensors)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_addmm_does_not_pass_what_it_does_not_read(turned, beta):
    added, a, b = f32(3, 7), f32(3, 5), f32(5, 7)
    out = f32(7, 3).mT if turned else f32(3, 7)
    call = described(a, b, out, "ieee", Extras(bias=added, beta=beta))
    ready, given = remembered("addmm", (added, a, b), call, out)
    again("addmm", ready, (added, a, b), out)
    assert list(given[0]) == memo.addresses_of(*call.tensors)
    assert (ready.reaches[0] == 0) == (beta == 0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_scales_turn_with_their_operands(turned, blocks):
    a, b = f32(3, 256), f32(256, 7)
    scales = (f32(3, 2), f32(2, 1)) if blocks else (f32(3, 1), f32(1, 7))
    out = f32(7, 3).mT if turned else f32(3, 7)
    extras = Extras(blocks=scales, shared="1x128") if blocks else Extras(*scales)
    extras = extras._replace(bias=f32(7))
    tensors = (a, b, *scales, extras.bias, None)
    call = described(a, b, out, "ieee", extras)
    ready, given = remembered("scaled_matmul", tensors, call, out)
    again("scaled_matmul", ready, tensors, out)
    assert list(given[0]) == memo.addresses_of(*call.tensors)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biases", [(None, None), (7, None), (None, 7), (7, 7)], ids=str)
def test_gated_linear(turned, biases):
    x, gate, up = f32(3, 5), f32(7, 5), f32(7, 5)
    bias_gate, bias_up = (size and f32(size) for size in biases)
    out = f32(7, 3).mT if turned else f32(3, 7)
    tensors = (x, gate, up, bias_gate, bias_up)
    call = described(x, gate.mT, out, "ieee", Extras(bias=bias_gate, bias_up=bias_up, up=up.mT))
    assert not call.swapped
    ready, given = remembered("gated_linear", tensors, call, out)
    again("gated_linear", ready, tensors, out)
    assert list(given[0]) == memo.addresses_of(*call.tensors)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("which", ["zero_a", "zero_b", "both"])
def test_zero_points_turn_with_their_operands(turned, which):
    a, b = torch.zeros(3, 5, dtype=torch.int8), torch.zeros(5, 7, dtype=torch.int8)
    zero_a = None if which == "zero_b" else torch.zeros(3, 1, dtype=torch.int8)
    zero_b = None if which == "zero_a" else torch.zeros(1, 7, dtype=torch.int8)
    scales, out = (f32(3, 1), f32(1, 7)), f32(7, 3).mT if turned else f32(3, 7)
    tensors = (a, b, *scales, None, None, zero_a, zero_b)
    call = described(a, b, out, "ieee", Extras(*scales, zero_a=zero_a, zero_b=zero_b))
    assert call.swapped == turned
    ready, given = remembered("scaled_matmul", tensors, call, out)
    again("scaled_matmul", ready, tensors, out)
    assert list(given[0]) == memo.addresses_of(*call.tensors)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_groups(columns, scaled):
    kind = torch.float8_e4m3fn if scaled else torch.float16
    a, b = (torch.zeros(size, dtype=kind) for size in [(2, 8, 32), (32, 16)][:: 1 if columns else -1])
    a, b = (a, b) if columns else (a.mT, b.mT)
    scales = (f32(*a.shape[:-1]), f32(*b.shape[:-2], b.shape[-1])) if scaled else (None, None)
    of = Operands(a, b, torch.tensor([4, 8], dtype=torch.int32), *scales)
    out = torch.zeros(a.shape[-2], b.shape[-1], dtype=torch.float16)
    call = described_groups(of, out, "ieee")
    assert call.swapped == columns
    ready, given = remembered("grouped_matmul", of, call, out)
    again("grouped_matmul", ready, of, out)
    assert list(given[0]) == memo.addresses_of(*call.tensors)
    with pytest.raises(OverlapError, match="grouped_matmul: out overlaps b"):
        again("grouped_matmul", ready, of._replace(b=out), out)


def test_an_output_elsewhere_is_checked_anew():
    tensors = tuple(LINEAR.values())
    x, weight, bias, residual = tensors
    out = f32(3, 7)
    call = described(x, weight.mT, out, "ieee", Extras(bias=bias, residual=residual))
    ready, given = remembered("linear", tensors, call, out)
    again("linear", ready, tensors, residual)  # in place
    memory = f32(40)
    inside = memory[:15].view(3, 5), memory[10:31].view(3, 7)
    with pytest.raises(OverlapError, match="linear: out overlaps input"):
        again("linear", ready, (inside[0], *tensors[1:]), inside[1])
    over = memory[:21].view(3, 7), memory[7:28].view(3, 7)
    with pytest.raises(OverlapError, match="linear: out overlaps residual"):
        again("linear", ready, (*tensors[:3], over[0]), over[1])
    assert len(given) == 1


def test_what_cannot_be_remembered_is_not():
    """Other types, words that no key holds, lazy negation."""
    x = f32(3, 5)
    assert memo.look_up("linear", x, (x, 3), None, ())[:2] == (None, None)
    assert memo.look_up("linear", None, (None, None), None, ([],))[:2] == (None, None)
    negated = torch.complex(x, x).conj().imag
    call = described(x, f32(5, 7), f32(3, 7), "ieee")
    memo.remember(("key",), "linear", None, call, (negated, f32(7, 5), None, None), f32(3, 7))
    assert memo.CALLS == {}


PLACES = {
    "shape": f32(5, 3),
    "strides": f32(5, 3).mT,
    "dtype": f32(3, 5).half(),
    "address": f32(16)[1:].view(3, 5),
    "conj": torch.zeros(3, 5, dtype=torch.complex64).conj(),
    "neg": torch.zeros(3, 5, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("which", PLACES)
def test_tensors_that_are_launched_in_other_ways_are_told_apart(which):
    plain = {"conj": PLACES["conj"].conj(), "neg": torch.view_as_real(PLACES["conj"].conj())[..., 1]}
    other, same = PLACES[which], plain.get(which, f32(3, 5))
    one, again = (memo.look_up("linear", x, (x,), None, ())[0] for x in (same, same.detach()))
    assert one == again != memo.look_up("linear", other, (other,), None, ())[0]


@pytest.mark.parametrize("words", [(torch.float16, None), (None, "tf32")], ids=str)
def test_what_is_asked_of_groups_tells_calls_apart(monkeypatch, words):
    offs, keys = torch.tensor([4, 8], dtype=torch.int32), []
    of = Operands(f32(8, 32), f32(2, 32, 16), offs, None, None)
    monkeypatch.setattr(grouped, "run_unprepared", lambda *args: keys.append(args[-1]))
    for asked in ((None, None), words, words):
        grouped.eager(*of, None, *asked)
    assert keys[0] != keys[1] == keys[2]


def test_what_torch_is_set_to_tells_calls_of_fp32_apart(monkeypatch):
    found = []
    for setting in ("ieee", "tf32"):
        monkeypatch.setattr(memo, "default_precision", lambda setting=setting: setting)
        found.append([memo.look_up("linear", x, (x,), None, ())[0] for x in (f32(3, 5), f32(3, 5).half())])
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_a_stopgap_is_not_kept(monkeypatch):
    """As mode "tune" takes one while a graph is captured."""
    monkeypatch.setattr(memo, "may_be_kept", lambda: False)
    x = f32(3, 5)
    call = described(x, f32(5, 7), f32(3, 7), "ieee")
    memo.remember(("key",), "linear", None, call, (x, f32(7, 5), None, None), f32(3, 7))
    assert memo.CALLS == {}
