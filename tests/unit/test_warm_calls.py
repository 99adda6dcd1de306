"""Calls met before, on tensors that are taken for a GPU's: what is looked at every time; how many are kept.

Nothing is compiled or launched: a stand-in records what the launch of the first call is given.
"""

import functools
import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tritile
from tritile.choose import pick
from tritile.core.device import target_device
from tritile.core.forgetting import Memo
from tritile.core.problem import MatmulProblem
from tritile.errors import GradientError, OverlapError, ShapeError
from tritile.ops import memo
from tritile.ops import request as ops_request

recalled = functools.partial(memo.launch_cached, on_miss=lambda *_: None)


class Launch:
    """Stands for a prepared launch: `given` are the addresses of the last call's tensors."""

    def __call__(self, *tensors):
        self.at([tensor.data_ptr() for tensor in tensors])
        self.first = tensors

    def at(self, pointers):
        self.given = list(pointers)


class Calls(list):
    """What was prepared, all for the same launch."""

    launch = Launch()


@pytest.fixture
def first_calls(monkeypatch):
    """The calls that were prepared: those that were not met before."""
    calls = Calls()
    monkeypatch.setattr(ops_request, "on_host", lambda tensor: False)
    monkeypatch.setattr(ops_request, "prepared", lambda call, *how: calls.append(call) or calls.launch)
    monkeypatch.setattr(memo, "new_output", lambda shape, *rest: torch.empty(shape))
    tritile.forget()
    yield calls
    tritile.forget()


def addresses_of(*tensors):
    return [tensor.data_ptr() for tensor in tensors]


def parts(*places):
    """6 x 6 matrices that begin at these elements of one memory, far apart from each other unless told."""
    memory = torch.zeros(1024)
    return [memory[place : place + 36].view(6, 6) for place in places]


PUBLIC = {"matmul": tritile.matmul, "addmm": tritile.addmm}
PUBLIC["transpose"] = functools.partial(tritile.transpose, dim0=1, dim1=0)
PUBLIC["permute"] = functools.partial(tritile.permute, dims=(1, 0))


@pytest.mark.parametrize("swapped", [False, True])
def test_warm_overlap_is_refused(first_calls, swapped):
    apart, over_a, over_b = parts(0, 256, 512), parts(0, 256, 4), parts(0, 256, 252)
    for a, b, out in (apart, apart):
        version = out._version
        PUBLIC["matmul"](a, b, out=out.mT if swapped else out)
        assert out._version > version
    for (a, b, out), name in ((over_a, "input"), (over_b, "other")):
        with pytest.raises(OverlapError, match=f"out overlaps {name}"):
            PUBLIC["matmul"](a, b, out=out.mT if swapped else out)
    assert len(first_calls) == 1  # the others were known
    with torch.inference_mode():
        of_inference = torch.zeros(36).view(6, 6)
    with pytest.raises(GradientError, match="inference_mode"):
        PUBLIC["matmul"](a, b, out=of_inference)


def test_output_may_be_added(first_calls):
    """Calls in place are prepared apart: the others' added tensor, which begins elsewhere, is looked at."""
    a, b, added, other = parts(0, 256, 512, 768)
    for out in (other, added, other, added):
        assert PUBLIC["addmm"](added, a, b, out=out) is out
        places = addresses_of(a, b, out, added)
        assert sorted(first_calls.launch.given[:2]) == sorted(places[:2])
        assert first_calls.launch.given[2:] == places[2:]
    memory = torch.zeros(1024)
    added, over = memory[512:548].view(6, 6), memory[516:552].view(6, 6)
    for wrong, into, name in ((a, over, "input"), (memory[540:576].view(6, 6), added, "mat1")):
        with pytest.raises(OverlapError, match=f"out overlaps {name}"):
            PUBLIC["addmm"](added, wrong, b, out=into)
    assert len(first_calls) == 2


@pytest.mark.parametrize("op", ["permute", "transpose"])
def test_permutations(first_calls, op):
    x, apart, over = parts(0, 256, 4)
    for out in (None, apart, apart, None):
        got = PUBLIC[op](x, out=out)
        assert (got is out) == (out is not None)
        assert first_calls.launch.given == [x.data_ptr(), got.data_ptr()]
    with pytest.raises(OverlapError, match=f"{op}: out overlaps input"):
        PUBLIC[op](x, out=over)
    for _ in range(2):
        assert PUBLIC[op](x, out=x) is x
    assert len(first_calls) == 3  # into fresh memory, into other memory, and in place
    with pytest.raises(ShapeError, match="True"):  # which equals 1
        getattr(tritile, op)(x, *((True, 0) if op == "transpose" else ((True, 0),)))


@pytest.mark.parametrize(
    "rules", [lambda: tritile.mode("off"), tritile.batch_invariant], ids=["mode", "rows"]
)
def test_other_rules_planned_anew(first_calls, rules):
    a, b = parts(0, 256)
    weight = tritile.quantize(torch.randn(16, 32).half(), bits=8, group_size=32)
    for call in (lambda: tritile.matmul(a, b), lambda: tritile.linear(torch.zeros(4, 32).half(), weight)):
        first_calls.clear()
        for _ in range(2):
            call()
            with rules():
                call()
        assert len(first_calls) == 2


def test_lazy_bias_made_plain(first_calls):
    weight = tritile.quantize(torch.randn(16, 32).half(), bits=8, group_size=32)
    bias = torch.complex(torch.zeros(16), torch.ones(16)).conj().imag
    assert bias.is_neg()
    for _ in range(2):
        tritile.linear(torch.zeros(4, 32).half(), weight, bias)
        assert torch.equal(first_calls.launch.first[-2], -torch.ones(16))
    assert len(first_calls) == 2


@pytest.mark.parametrize(("zero_points", "biased"), [(False, True), (True, False)])
def test_packed_weights(first_calls, zero_points, biased):
    weight = tritile.quantize(torch.randn(16, 32).half(), bits=8, group_size=32, zero_points=zero_points)
    bias = torch.zeros(16) if biased else None
    for _ in range(2):
        x = torch.zeros(4, 32, dtype=torch.float16)
        got = tritile.linear(x, weight, bias)
        given = (x, weight.packed, weight.scales, weight.zeros, bias, got)
        assert first_calls.launch.given == addresses_of(*(t for t in given if t is not None))
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
    "scales of int8": (lambda: zeros((3, 5), (5, 7), dtype=INT8) + zeros((3, 1), (1, 7)), scaled),
    "groups of rows": (lambda: zeros((3, 8), (2, 8, 7)) + zeros((2,), dtype=torch.int32),
        tritile.grouped_matmul),
    "groups of columns": (lambda: zeros((2, 3, 8), (8, 7)) + zeros((2,), dtype=torch.int32),
        tritile.grouped_matmul),
}  # fmt: skip


@pytest.mark.parametrize("into", ["new", "rows", "columns"])
@pytest.mark.parametrize("name", ORDERS)
def test_tensors_in_launch_order(first_calls, name, into):
    """As the first call is prepared, and the second recalled."""
    (make, call), kept, found = ORDERS[name], [], []
    for _ in range(2):
        out = {"new": None, "rows": torch.zeros(3, 7), "columns": torch.zeros(7, 3).mT}[into]
        kept.append(make())
        got = call(*kept[-1], out=out)
        assert out is None or got is out
        kept[-1].append(got)
        places = {tensor.data_ptr(): place for place, tensor in enumerate(kept[-1])}
        found.append([places[at] for at in first_calls.launch.given])
    assert found[0] == found[1]
    assert len(first_calls) == 1
    if name not in ("transpose", "permute"):
        always, never = name == "groups of columns", name in ("gated", "groups of rows")
        assert (first_calls[0].a.buffer == "b") == (always or (into == "columns" and not never))


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
    call = functools.partial(recalled, "matmul", (a, b), None, (None, None))
    transform(lambda x: found.append(call()) or x.sum())(torch.ones(3, 3))
    assert found == [None]


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
def test_other_tensors_are_not_recalled(first_calls, other):
    a, b = parts(0, 256)
    tritile.matmul(a, b)
    assert recalled("matmul", (other(a), b), None, (None, None)) is None
    assert recalled("matmul", (a, other(a)), None, (None, None)) is None


def test_lazy_tensors_are_not_recalled(first_calls):
    complexes = torch.zeros(6, 6, dtype=torch.complex64)
    for plain, lazy in ((complexes, complexes.conj()), (complexes.imag, complexes.conj().imag)):
        assert (plain.stride(), plain.data_ptr()) == (lazy.stride(), lazy.data_ptr())
        tritile.transpose(plain)
        options = (-2, -1, int, int)
        assert recalled("transpose", (plain,), None, options) is not None
        assert recalled("transpose", (lazy,), None, options) is None


def test_later_gradient_is_not_lost(first_calls):
    a, b = parts(0, 256)
    a.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert not tritile.matmul(a, b).requires_grad
        assert tritile.matmul(a, b).requires_grad


def test_recalled_heed_fp32_setting(first_calls, cuda_matmul):
    a, b = parts(0, 256)
    for _ in range(2):
        for cuda_matmul.fp32_precision in ("ieee", "tf32"):
            for _ in range(2):
                tritile.matmul(a, b)
    assert [call.precision for call in first_calls] == ["ieee", "tf32"]


def test_one_tensor_two_places(first_calls):
    """The launch gets its address twice; a call of two tensors gets theirs."""
    a, b = parts(0, 256)
    for pair in ((a, a), (a, b), (b, b), (b, a)):
        for _ in range(2):
            tritile.matmul(*pair)
            assert first_calls.launch.given[:2] == addresses_of(*pair)
        assert recalled("matmul", pair, None, (None, None)) is not None
    assert len(first_calls) == 2


def test_alignments_met_again(first_calls):
    memory = torch.zeros(4096, dtype=torch.bfloat16)

    def at(place, offset):
        return memory[place + offset :][:64].view(8, 8)

    places = [(a, b, out) for a in range(8) for b in range(8) for out in (0, 1)]
    for turn in range(2):
        for a, b, out in places:
            tritile.matmul(at(0, a), at(1024, b), out=at(2048, out))
        assert len(first_calls) == len(places), turn


def test_unread_alignment_ignored(first_calls):
    a, b = parts(0, 256)
    for place in (512, 513, 514, 516):
        (added,) = parts(place)
        tritile.addmm(added, a, b, beta=0)
    assert len(first_calls) == 1
    for place in (512, 513):
        tritile.addmm(*parts(place), a, b)
    assert len(first_calls) == 3  # of 16 and of 4 bytes


@pytest.mark.parametrize("most", ["_MAX_CALLS", "_MAX_ALIGNMENTS"])
def test_overflowing_calls_met_again(first_calls, monkeypatch, most):
    monkeypatch.setattr(memo, most, 8)
    memory = torch.zeros(8192)
    if most == "_MAX_CALLS":  # by strides
        calls = [(memory.as_strided((6, 6), (64 + 4 * i, 1)), *parts(0)) for i in range(12)]
    else:
        calls = [(*parts(a), *parts(b)) for a in (0, 1, 2, 4) for b in (0, 1, 2, 4)][:12]
    for _ in range(20):
        for pair in calls:
            tritile.matmul(*pair)
    assert len(first_calls) < 200  # of 240 calls, each of which was prepared before the last 11


def test_a_stopgap_is_not_kept(first_calls, monkeypatch):
    """As mode "tune" takes one while a graph is captured."""
    monkeypatch.setattr(memo, "may_be_kept", lambda: False)
    for _ in range(2):
        tritile.matmul(*zeros((3, 5), (5, 7)))
    assert len(first_calls) == 2
    assert not memo.CALLS


@pytest.mark.parametrize("words", [{"out_dtype": torch.float16}, {"precision": "tf32"}], ids=str)
def test_groups_tell_calls_apart(first_calls, words):
    (a, b), offs = zeros((8, 32), (2, 32, 16)), torch.tensor([4, 8], dtype=torch.int32)
    for each in ({}, words, words):
        tritile.grouped_matmul(a, b, offs, **each)
    assert len(first_calls) == 2


def test_torch_seen_calls_by_operator(first_calls):
    a, b = parts(0, 256)
    a.requires_grad_()
    for _ in range(3):
        got = tritile.matmul(a, b)
        assert got.requires_grad
        assert first_calls.launch.given == addresses_of(a, b, got)
    torch.autograd.grad(got.sum(), a)
    assert len(first_calls) == 2  # and the product of the gradient


# Memos have a bound: a process that meets sizes without end keeps its memory, and answers right.

SIZES = range(1, 41)


def test_older_half_makes_room():
    kept, launches = Memo(4), [Launch() for _ in range(5)]
    for k, launch in enumerate(launches):
        kept[k] = launch
        kept[k] = launch  # replaced, which takes no room
    freed = [weakref.ref(launch) for launch in launches]
    del launch, launches
    gc.collect()
    assert list(kept) == [2, 3, 4]
    assert [each() is None for each in freed] == [True, True, False, False, False]


def test_calls_of_sizes_without_end(first_calls, monkeypatch):
    assert memo.CALLS.most <= 8192
    monkeypatch.setattr(memo.CALLS, "most", 16)
    for k in (*SIZES, SIZES[-1], SIZES[0]):  # the last is kept, and the first prepared again
        pair = zeros((2, k), (k, 2))
        assert tritile.matmul(*pair).shape == (2, 2)
        assert first_calls.launch.given[:2] == addresses_of(*pair)
    assert [call.problem.k for call in first_calls] == [*SIZES, SIZES[0]]
    assert 8 <= len(memo.CALLS) <= 16


def test_plans_of_sizes_without_end(monkeypatch):
    made, device = [], target_device("nvidia-h200")

    def choose(problem, device, mode, by_torch):
        made.append(problem.m)
        return pick.Plan(problem, None, "model", device)

    tritile.forget()
    monkeypatch.setattr(pick, "_chosen", choose)
    monkeypatch.setattr(pick._memo, "most", 16)
    for m in (*SIZES, SIZES[-1], SIZES[0]):
        problem = MatmulProblem(1, m, 16, 16, "bfloat16", "bfloat16")
        assert pick.plan_for(problem, device).problem == problem
    assert made == [*SIZES, SIZES[0]]
    tritile.forget()
