"""Calls met again: the launch gets the tensors that it took the first time, in its own order."""

from types import SimpleNamespace

import pytest
import torch

import tritile
from tritile.errors import OverlapError
from tritile.ops import asked, memo
from tritile.ops.described import Extras, described
from tritile.ops.grouped import Operands


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
    assert memo.look_up("linear", (x, 3), None, ())[:2] == (None, None)
    assert memo.look_up("permute", (None,), None, ([],))[:2] == (None, None)
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
    one, again = (memo.look_up("linear", (x,), None, ())[0] for x in (same, same.detach()))
    assert one == again != memo.look_up("linear", (other,), None, ())[0]


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
        found.append([memo.look_up("linear", (x,), None, ())[0] for x in (f32(3, 5), f32(3, 5).half())])
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]


def test_a_stopgap_is_not_kept(monkeypatch):
    """As mode "tune" takes one while a graph is captured."""
    monkeypatch.setattr(memo, "may_be_kept", lambda: False)
    x = f32(3, 5)
    call = described(x, f32(5, 7), f32(3, 7), "ieee")
    memo.remember(("key",), "linear", None, call, (x, f32(7, 5), None, None), f32(3, 7))
    assert memo.CALLS == {}
