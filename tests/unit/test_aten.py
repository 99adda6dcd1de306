"""torch's own kernel as a candidate: when it is planned, which calls it may make, and that it makes these.

Calls are made on host tensors that pass for a GPU's, so that torch really computes them.
"""

import contextlib
import contextvars
import math
import sqlite3
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tritile
from tests.configs import tile
from tests.operators import SAMPLES
from tritile.choose import aten, gpu_tables, pick
from tritile.choose.predictor import Class, Loss
from tritile.choose.table import Entry, Table, from_store
from tritile.core import settings
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.core.torch_private import constant_in_graphs
from tritile.errors import TuningError, UnsupportedError
from tritile.families.registry import digests
from tritile.families.space import legal_configs
from tritile.ops import memo
from tritile.ops import request as ops_request
from tritile.ops.aten import torch_call_of
from tritile.ops.linear_quantized import QuantizedLinear
from tritile.ops.request import request_of
from tritile.tune import now
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import store_of

H200 = target_device("nvidia-h200")
HALF = MatmulProblem(1, 1000, 2000, 3000, "bfloat16", "bfloat16", b_layout="column")
CONFIG = tile(128, 128, 64, 8, 3)
PACKED = QuantizedProblem(1000, 2000, 3000, "bfloat16", 4, 128)  # which torch makes as HALF


def times(us, error=0.1, versions=None, classes=("bf16_nt",)):
    """What predicts `us` of torch's for HALF, and as long for each operation of others."""
    known = Class((), 1e30, Loss(100, 0.01, 0.05, 0.02, error), (H200.name,))
    return SimpleNamespace(
        classes=dict.fromkeys(classes, known),
        versions=versions or aten.versions(),
        ranked=lambda *given: [],
        configs=lambda name: [],
        is_least=lambda name, problem: False,
        torch_us=lambda name, problem, device: us * problem.flops / HALF.flops,
    )


@pytest.fixture
def served(monkeypatch):
    """Has these times of torch's serve, and a table without entries; ours are predicted to be 100 us."""

    def serve(*found, by_aten=()):
        table = Table(H200.to_dict(), {}, (), by_aten=by_aten)
        monkeypatch.setattr(gpu_tables, "serving", lambda device: [(table, "here")])
        serving = {name: (each, "here") for each in found for name in each.classes}
        monkeypatch.setattr(gpu_tables, "predictor", lambda name, device: serving.get(name))
        monkeypatch.setattr(gpu_tables, "shipped", lambda device: ())
        ours = pick.Plan(HALF, CONFIG, "predicted", H200, 100.0, "by a test")
        monkeypatch.setattr(pick, "by_predictor", lambda problem, device: replace(ours, problem=problem))
        monkeypatch.setattr(pick, "_or_other_family", lambda plan: plan)
        pick.forget()

    return serve


def family(problem=HALF, mode="cached", by_torch=True):
    return pick.plan_for(problem, H200, mode, by_torch).config.family


def test_faster_prediction_runs(served):
    """The plan says how far the other one is behind."""
    served(times(80.0))
    plan = pick.plan_for(HALF, H200, None, True)
    assert (plan.config, plan.source, plan.workspace) == (aten.CONFIG, "predicted", 0)
    assert plan.us == pytest.approx(80)
    assert plan.other_us == 100.0
    lines = repr(plan).splitlines()
    assert lines[0].endswith(f"{H200.name}: torch's kernel, predicted to be 1.25 times as fast as tritile's")
    assert (
        "  source     predicted, 80.0 us: torch's kernel, predicted, typically within 10% on held-out sizes"
        in lines
    )
    assert f"  tritile    100.0 us, 1.25 times as long: {CONFIG}, by a test" in lines
    assert "  predicted  80.0 us torch's kernel" in lines
    served(times(125.0))
    plan = pick.plan_for(HALF, H200, None, True)
    assert plan.config.family == "tile"
    assert (plan.other_us, plan.other_error) == (pytest.approx(125), pytest.approx(0.1))
    assert f"{H200.name}: tritile's kernel, predicted to be 1.25 times as fast as torch's\n" in repr(plan)
    assert (
        "  torch      125.0 us, 1.25 times as long: predicted, typically within 10% on held-out sizes"
        in repr(plan)
    )
    assert pick.plan_for(HALF, H200).other_us is None


OTHER_VERSIONS = {"torch": "1.0", "cublas": ""}


def test_another_version_of_torch_is_named(served, monkeypatch):
    """Its time counts as that of the version that was timed. A build without CUDA says nothing of cuBLAS."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    served(times(97.0, versions=OTHER_VERSIONS))
    plan = pick.plan_for(HALF, H200, "cached", True)
    assert plan.config.family == "aten"
    assert f"torch 1.0, cuBLAS unknown was timed, and torch {torch.__version__}" in plan.why
    monkeypatch.setattr(torch.version, "cuda", None)
    served(times(97.0, versions=OTHER_VERSIONS))
    assert "timed" not in pick.plan_for(HALF, H200, "cached", True).why
    monkeypatch.undo()
    served(times(97.0))
    assert "timed" not in pick.plan_for(HALF, H200, "cached", True).why


@pytest.mark.parametrize("changes", [{"batch": 2}, {"a_layout": "column"}, {"n": 24}, {"m": 1, "k": 4000}])
def test_unlike_sizes_are_not_predicted(served, changes):
    """Where a product is unlike those that were swept."""
    served(times(1e-6, classes=("bf16_nt", "bf16_nn", "unaligned_16bit")))
    assert aten.illegal(replace(HALF, **changes)) is None
    assert (family(), family(replace(HALF, **changes))) == ("aten", "tile")


def test_what_keeps_torch_out(served):
    served(times(10.0, classes=("bf16_nt", "bf16_nn", "unaligned_16bit")))
    assert family() == "aten"
    assert family(by_torch=False) == "tile"
    assert family(replace(HALF, invariant=True)) == "tile"
    assert family(mode="off") != "aten"
    tensors = [
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1000, 3000), (2000, 3000))
    ]
    for what in ((HALF,), ("linear", *tensors)):
        for backends, wanted in (("triton", "tile"), ("triton, aten", "aten")):
            with tritile.mode(backends=backends):
                assert tritile.plan(*what, device=H200).config.family == wanted
    with tritile.mode(backends="triton,aten"):
        assert tritile.plan("linear", *tensors, activation="relu", device=H200).config.family == "tile"


FP32 = {"dtype": "float32", "out_dtype": "float32"}
FP8 = MatmulProblem(1, 256, 512, 1024, "float8_e4m3fn", "bfloat16", b_layout="column")
INT8, BLOCKS = replace(FP8, dtype="int8", out_dtype="int32"), replace(FP8, block_scales="1x128")
GROUPS = GroupedProblem(8, 256, 512, 1024, "bfloat16", "bfloat16", b_layout="column")
FP8_GROUPS = replace(GROUPS, dtype="float8_e4m3fn", scaled=True)
ONE = "scale_a=one scale_b=one"
ILLEGAL = [
    ("torch's sums depend on", HALF, {"invariant": True}),
    ("torch's sums depend on", PACKED, {"invariant": True}),
    ("single call", HALF, FP32 | {"precision": "fp16x3"}),
    ("single call", HALF, {"epilogue": "gated silu"}),
    ("copy an operand", HALF, {"a_layout": "strided"}),
    ("copy an operand", HALF, {"out_layout": "strided"}),
    ("copy an operand", PACKED, {"x_layout": "strided"}),
    ("another launch", HALF, {"epilogue": "relu"}),
    ("another launch", HALF, {"epilogue": "bias=full"}),
    ("another launch", HALF, {"epilogue": "bias=row", "batch": 3}),
    ("another launch", HALF, FP32 | {"epilogue": "relu", "k": 511}),
    ("another launch", HALF, FP32 | {"epilogue": "relu", "m": 1}),
    ("another dtype", HALF, {"out_dtype": "float32"}),
    ("products only", PermuteProblem.of((64, 64), (1, 64), (64, 1), 2), {}),
    ("multiples of 16, not 520 and 1024", FP8, {"n": 520}),
    ("multiples of 16, not 512 and 1000", BLOCKS, {"k": 1000}),
    ("multiples of 8, not 512 and 1028", INT8, {"k": 1028}),
    ("contiguous rows of a", FP8, {"b_layout": "row"}),
    ("start on 16 bytes", BLOCKS, {"a_align": 8}),
    ("one matrix at a time", FP8, {"batch": 2}),
    ("float8_e5m2 by float8_e5m2", FP8, {"dtype": "float8_e5m2"}),
    ("for each row and column", FP8, {"epilogue": "scale_a=column scale_b=one"}),
    ("another launch for the epilogue", FP8, {"epilogue": f"{ONE} relu"}),
    ("another launch", FP8, {"epilogue": f"{ONE} bias=row", "out_dtype": "float32"}),
    ("copy the result", FP8, {"out_layout": "column"}),
    ("another launch for scales", INT8, {"epilogue": ONE, "out_dtype": "bfloat16"}),
    ("of 17 rows or more", INT8, {"m": 16}),
    ("depend on the number of rows", BLOCKS, {"invariant": True}),
    ("at most 1023 groups", GROUPS, {"groups": 1024}),
    ("on the host", GROUPS, {"dtype": "float16", "out_dtype": "float16"}),
    ("and a bfloat16 result", FP8_GROUPS, {"out_dtype": "float32"}),
    ("requires float8_e4m3fn", FP8_GROUPS, {"dtype": "float8_e5m2"}),
    ("rows of the result", GROUPS, {"n": 516}),
    ("rows of a, rows or columns", GROUPS, {"a_layout": "column"}),
    ("N and K", FP8_GROUPS, {"n": 520}),
]


@pytest.mark.parametrize(
    ("why", "problem", "change"), ILLEGAL, ids=lambda value: getattr(value, "label", str(value))
)
def test_torch_may_not_make(why, problem, change):
    changed = replace(problem, **change)
    assert why in aten.illegal(changed)
    if changed.needs_torch:
        with pytest.raises(UnsupportedError, match=f"only torch computes .*{why}"):
            pick.plan_for(changed, H200, None, True)


LEGAL = [
    HALF, *(replace(HALF, **kind) for kind in (
        {"b_layout": "row"}, {"a_layout": "column"}, {"b_align": 2}, {"batch": 3},
        FP32 | {"precision": "tf32"},
        FP32 | {"epilogue": "bias=row residual=full gelu"},
        FP32 | {"epilogue": "bias=full weighted", "batch": 3},
    )),
    FP8,
    replace(FP8, precision="fast", epilogue=f"{ONE} bias=row", out_dtype="float16"),
    replace(FP8, dtype="float8_e5m2", b_dtype="float8_e4m3fn", epilogue="scale_a=column scale_b=row"),
    replace(FP8, m=1, epilogue="scale_a=one scale_b=row"),
    INT8, replace(INT8, m=17, n=520), replace(BLOCKS, epilogue="bias=full residual=full silu"),
    GROUPS, replace(GROUPS, b_layout="row"), FP8_GROUPS, replace(FP8_GROUPS, scaled=False, precision="fast"),
]  # fmt: skip


@pytest.mark.parametrize("problem", LEGAL, ids=lambda problem: problem.label)
def test_torch_may_make(problem):
    assert aten.illegal(problem) is None
    if problem.itemsize == 1 or isinstance(problem, GroupedProblem):  # by rule, or to be predicted
        chosen = pick.plan_for(problem, H200, "cached", True)
        by_rule = gpu_tables.is_by_aten(aten.kind_of(problem), H200)
        assert chosen.source == "predicted" or (chosen.config == aten.CONFIG) == (
            problem.needs_torch or by_rule
        )


@pytest.mark.parametrize("problem", [HALF, PACKED], ids=lambda problem: problem.op)
def test_measured_times_decide(served, problem):
    """Mode tune measures torch too."""
    served(times(10.0))
    store, own = store_of(H200), pick.FAMILIES[problem.op]["tile"]
    store.add(own.digest, Trial(problem, legal_configs(problem, H200, "tile")[0], 50.0, error=0.0))
    store.add("torch 1.0", Trial(problem, aten.CONFIG, 30.0))  # which does not count
    pick.forget()
    assert family(problem) == "aten", "predicted to be faster than what was measured"
    assert pick.plan_for(problem, H200, "tune", True) is None, "torch's time is not known yet"
    assert pick.plan_for(problem, H200, "tune", False).source == "exact"
    for us, wanted in ((60.0, False), (40.0, True)):
        store.add(TORCH, Trial(problem, aten.CONFIG, us))
        pick.forget()
        plan = pick.plan_for(problem, H200, "tune", True)
        assert (plan.config == aten.CONFIG, plan.source) == (wanted, "exact")
        (entry,) = from_store(store, H200, digests()).entries
        assert (entry.us, entry.torch_us) == (50.0, us)
    parts = replace(HALF, dtype="float32", out_dtype="float32", precision="fp16x3")
    store.add(TORCH, Trial(parts, aten.CONFIG, 40.0))  # fp16 parts never give way to torch's plain fp32
    plan = pick.plan_for(parts, H200, None, True)
    assert (plan.config.family, plan.other_us, plan.other) == ("tile", 40.0, f"measured on {H200.name}")


def test_shipped_is_planned_as_measured():
    pick.forget()
    known = [entry for entry in gpu_tables.shipped(H200)[0].entries if entry.torch_us]
    known = [entry for entry in known if aten.is_compared(entry.problem)]
    assert len(known) > 100
    for entry in known:
        plan = pick.plan_for(entry.problem, H200, None, True)
        may = aten.illegal(entry.problem) is None
        wanted = min if may else lambda ours, torchs: ours
        assert plan.us == wanted(entry.us, entry.torch_us), entry
        assert {plan.us, plan.other_us} == {entry.us, entry.torch_us}, entry
        assert (plan.config == aten.CONFIG) == (plan.us == entry.torch_us != entry.us), entry


@pytest.mark.parametrize("how", [{}, {"bias": True}, {"bits": 8, "zero_points": True, "group_size": 32}])
def test_unpacking_a_weight_counts_for_torch(served, how):
    """Torch's product is predicted as that by a weight of 16 bits."""
    problem = replace(PACKED, **how)
    us = aten.unpack_us(problem, H200)
    assert us > 2 * 2000 * 3000 / (H200.memory_gbps * 1e3), "it is written, at least"
    for more, wanted in ((-0.5, "aten"), (0.5, "aten"), (1.5, "tile")):  # within 1% is a tie
        served(times(100 - us + more))
        assert family(problem) == wanted
    served(times(1.0))
    assert family(problem, by_torch=False) == family(replace(problem, invariant=True)) == "tile"
    assert family(replace(problem, n=24)) == family(replace(problem, m=1, n=40, k=40)) == "tile"
    assert pick.plan_for(problem, H200, None, True).workspace == 2 * 2000 * 3008


def test_kind_by_rule_is_not_ranked(served, monkeypatch):
    plain = replace(HALF, dtype="float64", out_dtype="float64")
    served(by_aten=("float64 ieee",))
    with monkeypatch.context() as patch:  # a first call would take a second of ranking
        for way in ("by_predictor", "by_model"):
            patch.setattr(pick, way, lambda *given: pytest.fail("it was ranked"))
        plan = pick.plan_for(plain, H200, None, True)
    assert (plan.config, plan.source, plan.other_us) == (aten.CONFIG, "table", None)
    assert (family(), family(plain, mode="strict")) == ("tile", "aten")
    assert "aten" not in (family(plain, mode="off"), family(plain, by_torch=False))


@pytest.mark.parametrize(
    ("us", "torch_us", "on", "runs"),
    [
        (5.0, 8.0, H200, "tile"),
        (8.0, 5.0, H200, "aten"),
        (5.0, None, H200, "aten"),
        (5.0, 8.0, target_device("h100"), "aten"),
    ],
)
def test_own_table_before_rule(us, torch_us, on, runs, served, monkeypatch):
    """If it has both times."""
    plain = replace(HALF, dtype="float64", out_dtype="float64")
    served(by_aten=("float64 ieee",))
    table = Table(on.to_dict(), {}, (Entry(plain, tile(64, 64, 32, 4, 3), us, torch_us),))
    monkeypatch.setattr(gpu_tables, "shipped", lambda device: (table,))
    assert family(plain) == runs


# Calls.


@pytest.fixture
def planned(monkeypatch):
    """Has every call that torch may make planned so; returns the problems that were asked for."""
    problems = []
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    monkeypatch.setattr(ops_request, "on_host", lambda tensor: False)
    monkeypatch.setattr(ops_request, "is_by_aten", lambda problem, index: problems.append(problem) or True)
    monkeypatch.setattr(
        ops_request, "prepared", lambda call, *how: pytest.fail("tritile's kernel was to run")
    )
    tritile.forget()
    yield problems
    tritile.forget()


ours = pytest.raises(pytest.fail.Exception, match="tritile's kernel")


def operand(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


CALLS = {
    "matmul": (tritile.matmul, torch.matmul, lambda: (operand(5, 7), operand(7, 9))),
    "transposed": (tritile.matmul, torch.matmul, lambda: (operand(7, 5).t(), operand(9, 7).t())),
    "bmm": (tritile.bmm, torch.bmm, lambda: (operand(3, 5, 7), operand(3, 7, 9))),
    "folded": (tritile.matmul, torch.matmul, lambda: (operand(2, 3, 5, 7), operand(7, 9))),
    "linear": (tritile.linear, F.linear, lambda: (operand(4, 5, 7), operand(9, 7))),
    "batch, bias": (tritile.linear, F.linear, lambda: (operand(2, 5, 16), operand(8, 16), operand(8))),
    "bias": (tritile.linear, F.linear, lambda: (operand(5, 16), operand(8, 16), operand(8))),
    "addmm": (tritile.addmm, torch.addmm, lambda: (operand(8), operand(5, 16), operand(16, 8))),
}


@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_call_is_torch_bit_for_bit(planned, name, given_out):
    call, torchs, make = CALLS[name]
    if given_out and name == "batch, bias":
        pytest.skip("torch takes two launches")
    for _ in range(2):  # the second one is remembered
        tensors = make()
        wanted = torchs(*tensors)
        out = torch.full_like(wanted, math.nan) if given_out else None
        found = call(*tensors, out=out)
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
        assert out is None or found is out
    assert len(planned) == 1


def wide(*shape):
    return operand(*shape, dtype=torch.float32).mul_(2)


# Epilogues that torch launches for: of no vectors, which torch multiplies otherwise.
EPILOGUES = [
    sample
    for sample in SAMPLES
    if sample.op in ("linear", "addmm", "baddbmm")
    and sample.label not in ("vector", "no columns")
    and not sample.tensors[0].is_complex()
]


@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("sample", EPILOGUES, ids=lambda sample: sample.id)
def test_an_epilogue_that_torch_launches_for(planned, sample, given_out):
    for _ in range(2):
        tensors = [tensor.float() for tensor in sample.tensors]
        wanted = sample.peer(*sample.tensors)
        out = torch.full(wanted.shape, math.nan) if given_out else None
        before = [tensor.clone() for tensor in tensors]
        found = sample.call(*tensors, out=out)
        assert found.dtype == torch.float32
        assert out is None or found is out
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, tensors, before))
    assert len(planned) == 1


def test_added_may_be_out(planned):
    """It is not read if beta is 0."""
    added, a, b = wide(5, 9), wide(5, 7), wide(7, 9)
    wanted = added.double() + a.double() @ b.double()
    assert tritile.addmm(added, a, b, out=added) is added
    torch.testing.assert_close(added.double(), wanted, rtol=1e-5, atol=1e-5)
    nan = torch.full((5, 9), math.nan)
    torch.testing.assert_close(
        tritile.addmm(nan, a, b, beta=0).double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5
    )
    residual = wide(5, 9)
    wanted = (a @ b).relu() + residual
    tritile.linear(a, b.t(), residual=residual, activation="relu", out=residual)
    torch.testing.assert_close(residual, wanted, rtol=1e-5, atol=1e-5)


def test_torch_settings_asked_each_call(planned, cuda_matmul):
    a, b = operand(5, 7, dtype=torch.float32), operand(7, 9, dtype=torch.float32)
    cuda_matmul.fp32_precision = "ieee"
    tritile.matmul(a, b)
    cuda_matmul.fp32_precision = "tf32"
    tritile.matmul(a, b)
    tritile.matmul(a, b, precision="tf32")
    assert [problem.precision for problem in planned] == ["ieee", "tf32", "tf32"]
    with ours:
        tritile.matmul(a, b, precision="ieee")  # torch would round to TF32
    cuda_matmul.fp32_precision = "ieee"
    with ours:
        tritile.matmul(a, b, precision="ieee")  # tritile's sums are compensated
    with ours:
        tritile.matmul(a, b, precision="tf32")
    torch.use_deterministic_algorithms(True)
    try:
        with ours:
            tritile.matmul(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    with tritile.mode(backends="triton"), ours:
        tritile.matmul(a, b)
    assert len(planned) == 3


def test_result_is_no_view(planned):
    """Autograd sees what it writes."""
    x, weight, bias = operand(2, 5, 16).requires_grad_(), operand(8, 16), operand(8)
    y = tritile.linear(x, weight, bias)
    y += 1  # autograd refuses to change a view made by a function of ours
    y.backward(torch.ones_like(y))
    leaf, out, a, b = operand(5, 9).requires_grad_(), operand(5, 9), operand(5, 7), operand(7, 9)

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    for _ in range(2):
        found, before = (leaf * out).sum(), out._version
        with Seen():
            tritile.matmul(a, b, out=out)
        assert out._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.backward()


def test_a_pinned_table_leaves_torch_out(served, monkeypatch):
    served(times(10.0))
    config = legal_configs(HALF, H200)[0]
    pinned = Table(H200.to_dict(), {}, (Entry(HALF, config, 50.0, 40.0),))
    monkeypatch.setattr(gpu_tables, "pinned", lambda device: pinned)
    plan = pick.plan_for(HALF, H200, None, True)
    assert (plan.config, plan.source, plan.other_us, plan.other_error) == (config, "pinned", 40.0, 0.0)
    assert plan.other == f"measured on {H200.name}, in the pinned table"
    assert plan.why.endswith("; torch's kernel is faster, but a pinned table keeps it out")
    other = replace(HALF, m=999)
    assert (family(other), pick.plan_for(other, H200, "tune", True)) == ("tile", None)
    assert pick.plan_for(HALF, H200, "tune", True).config == config  # nothing of it is measured


@pytest.mark.filterwarnings("ignore::tritile.errors.StoreWarning")
@pytest.mark.parametrize("can_write", [True, False])
def test_tune_measures_failures_once(served, monkeypatch, can_write):
    """A first call plans twice: for torch's kernel, and to prepare its own."""
    served(times(10.0))
    config, measured = legal_configs(HALF, H200, "tile")[0], []

    def tuned_now(problem, device, gpu):
        measured.append("ours")
        store_of(device).add(pick.FAMILIES["matmul"]["tile"].digest, Trial(problem, config, 50.0))

    def refuse(*_):
        raise sqlite3.OperationalError("disk is full")

    class Shop:
        def race(self, subject, configs):
            raise TuningError("no memory")

        def end(self, subject):
            pass

    monkeypatch.setattr(now, "shared_runner", lambda gpu: contextlib.nullcontext(Shop()))
    monkeypatch.setattr(now, "tuned_now", tuned_now)
    timed = now.time_torch
    monkeypatch.setattr(now, "time_torch", lambda *given: measured.append("torch") or timed(*given))
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: H200)
    if not can_write:
        monkeypatch.setattr("tritile.tuner.store.trials._put", refuse)
    with tritile.mode("tune"):
        for by_torch in (True, False, True):
            plan = ops_request.planned(HALF, 0, by_torch)
            assert (plan.config, plan.source, plan.us) == (config, "exact", 50.0)
            tritile.forget()
    assert measured == ["ours", "torch"]
    assert "no memory" in store_of(H200).trials(TORCH, HALF)[0].failure


def test_what_torch_refuses_runs_by_tritile(planned, monkeypatch):
    """Also a remembered call, and one whose out torch would refuse once it had multiplied."""
    a, b = operand(5, 7), operand(7, 9)
    with ours:
        tritile.matmul(operand(3, 5, 7), b, out=operand(3, 9, 5).mT)

    def refused(*tensors):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    def out_of_memory(*tensors):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ops_request, "torch_call_of", lambda *given: refused)
        with ours:
            tritile.matmul(operand(5, 8), operand(8, 9))
        patch.setattr(ops_request, "torch_call_of", lambda *given: out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            tritile.matmul(operand(5, 6), operand(6, 9))
    tritile.forget()
    tritile.matmul(a, b)
    (known,) = memo.CALLS.values()
    (cached,) = known.any_alignment
    known.any_alignment = (replace(cached, run=refused),)
    monkeypatch.setattr(ops_request, "is_by_aten", lambda *given: False)
    with ours:
        tritile.matmul(a, b)


def packed(n, k=64):
    return tritile.quantize(operand(n, k), bits=4, group_size=32)


A, B, W7 = operand(5, 7), operand(7, 9), operand(9, 7)
X16, W16 = operand(5, 16), operand(8, 16)
LONG, DEEP = torch.empty(1024, 512), torch.empty(1024, 512)
FOR_TORCH = {
    "rows apart": lambda: request_of("matmul", operand(5, 9)[:, :7], B),
    "batches": lambda: request_of("matmul", operand(2, 3, 5, 7), operand(2, 3, 7, 9)),
    "a bias of fp32 off 16 bytes": lambda: request_of("linear", A.float(), W7.float(), operand(9).float()),
    "a long product": lambda: request_of(
        "linear", LONG, DEEP, torch.empty(1024), "relu", torch.empty(1024, 1024).half()
    ),
    "a weight": lambda: QuantizedLinear(operand(5, 64), packed(16), operand(16)),
    "a weight, rows apart": lambda: QuantizedLinear(operand(2, 5, 80)[..., :64], packed(16)),
    "a weight, batches": lambda: QuantizedLinear(operand(2, 5, 64), packed(16), operand(16)),
}
NOT_FOR_TORCH = {
    "expanded by torch": lambda: request_of("matmul", operand(2, 3, 5, 7), operand(3, 7, 9)),
    "copied to fold its batch": lambda: request_of("matmul", operand(2, 3, 5, 7).transpose(0, 1), B),
    "result not contiguous": lambda: request_of("matmul", A, operand(3, 7, 9)),
    "one product, of torch three": lambda: request_of("matmul", operand(3, 5, 7), operand(1, 7, 9)),
    "expanded": lambda: request_of("matmul", operand(3, 5, 7), B.expand(3, 7, 9)),
    "rows that overlap": lambda: request_of("matmul", operand(7).expand(5, 7), B),
    "a vector": lambda: request_of("matmul", A, operand(7)),
    "rounded before a bias": lambda: request_of("linear", A, W7, operand(9)),
    "a bias of fp32": lambda: request_of("linear", X16, W16, operand(8, dtype=torch.float32)),
    "a weight, rounded before a bias": lambda: QuantizedLinear(operand(5, 64), packed(9), operand(9)),
    "a weight, rows apart, a bias": lambda: QuantizedLinear(
        operand(2, 5, 80)[..., :64], packed(16), operand(16)
    ),
    "a weight, a bias of fp32": lambda: QuantizedLinear(
        operand(5, 64), packed(16), operand(16, dtype=torch.float32)
    ),
    "a weight, a vector": lambda: QuantizedLinear(operand(64), packed(16)),
    "a weight, rows that overlap": lambda: QuantizedLinear(operand(64).expand(5, 64), packed(16)),
    "a weight, batches swapped": lambda: QuantizedLinear(operand(2, 5, 64).transpose(0, 1), packed(16)),
    "a weight, by columns": lambda: QuantizedLinear(operand(64, 5).t(), packed(16)),
}


@pytest.mark.parametrize("name", [*FOR_TORCH, *NOT_FOR_TORCH])
def test_arguments_torch_multiplies(name):
    of = (FOR_TORCH | NOT_FOR_TORCH)[name]()
    shape, dtype, how = of.checked(None)
    problem = of.call(torch.empty(shape, dtype=dtype), how).problem
    may = torch_call_of(of, problem, how, None) is not None and aten.illegal(problem) is None
    assert may == (name in FOR_TORCH)


def test_tritile_in_place_of_torch(planned, monkeypatch):
    a, b = operand(5, 7), operand(7, 9)
    wanted = torch.matmul(a, b)
    monkeypatch.setattr(torch, "matmul", tritile.matmul)
    monkeypatch.setattr(F, "linear", tritile.linear)
    assert torch.equal(torch.matmul(a, b), wanted)
    assert torch.equal(F.linear(a, b.t()), wanted)


# Under torch.compile.


@pytest.fixture
def lowers(planned, monkeypatch):
    """Has every call that torch may make planned so, and traced anew."""
    monkeypatch.setattr(ops_request, "is_by_aten", lambda problem, index: aten.illegal(problem) is None)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(lowers, monkeypatch):
    """Compiles functions all of whose calls may be torch's; returns what is called in each graph."""
    found = []

    def compiled(function, runs=True, **how):
        def traced(graph, inputs):
            found.append([str(node.target) for node in graph.graph.nodes])
            return graph if runs else lambda *given: (torch.zeros(5, 9),)

        return torch.compile(function, backend=traced, fullgraph=True, **how)

    monkeypatch.setattr(ops_request, "_is_lowered", constant_in_graphs(lambda *given: True))
    return found, compiled


@pytest.mark.parametrize(
    "choose",
    [
        tritile.batch_invariant,
        lambda: tritile.mode(backends="triton"),
        lambda: tritile.mode(fp32="fp16x3"),
    ],
)
def test_graph_is_made_anew(graphs, choose):
    """If the program changes its choice."""
    found, compiled = graphs
    call = compiled(lambda x, w, b: tritile.linear(tritile.matmul(x, w.t()), w, b), runs=False)
    given = operand(16, 32), operand(32, 32), operand(32)
    call(*given)
    assert not any("tritile" in name for name in found[0]), found
    assert any("built-in method matmul" in name for name in found[0])
    with choose():
        call(*given)
    assert sum("tritile" in name for name in found[1]) == 2
    call(*(operand(*each.shape) for each in given))
    assert len(found) == 2


def made_by_torch(found):
    return [not any("tritile" in name for name in each) for each in found]


def test_choice_counts_in_graphs(graphs):
    found, compiled = graphs
    call = compiled(lambda a, b: tritile.matmul(a, b), runs=False)
    given = operand(16, 32), operand(32, 8)
    call(*given)
    with pytest.warns(UserWarning, match="changed nothing"):
        tritile.mode("off")
    with tritile.mode("tune"), tritile.mode("cached"):
        call(*given)
    assert made_by_torch(found) == [True], "nothing was chosen that it misses"
    decorated = tritile.batch_invariant()(call)
    with tritile.mode("off"), contextlib.suppress(ZeroDivisionError), tritile.mode(backends="triton"):
        call(*given)
        raise ZeroDivisionError
    decorated(*given)
    with tritile.batch_invariant():
        call(*given)
        copied = contextvars.copy_context()
    copied.run(call, *given)
    assert made_by_torch(found) == [True, False, False], "one made inside is for inside"
    del copied
    call(*given)
    assert made_by_torch(found) == [True, False, False], "all graphs are kept"


def test_graph_while_another_thread_chose(graphs):
    """Whose choice is its own."""
    found, compiled = graphs
    call = compiled(lambda a, b: tritile.matmul(a, b), runs=False)
    given = operand(16, 32), operand(32, 8)
    call(*given)
    inside, done = threading.Event(), threading.Event()

    def choose():
        with tritile.batch_invariant():
            inside.set()
            done.wait(60)
            call(*given)

    other = threading.Thread(target=choose)
    other.start()
    inside.wait(60)
    call(*given)
    assert made_by_torch(found) == [True]
    done.set()
    other.join()
    call(*given)
    assert made_by_torch(found) == [True, False]


class Nested(torch.autograd.Function):
    """Its backward pass begins another, which torch runs in a thread of its own from a depth of 60 on."""

    @staticmethod
    def forward(ctx, x, depth, function):
        ctx.depth, ctx.function = depth, function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nested.apply(x, ctx.depth - 1, ctx.function).backward()
        else:
            ctx.function()
        return grad, None, None


def in_backward(function):
    """Run a function in a thread of torch's, as a backward pass on a GPU that begins here does."""
    threads = []

    def run():
        threads.append(threading.get_ident())
        function()

    Nested.apply(torch.ones(1, requires_grad=True), 64, run).backward()
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize(
    "choose",
    [
        lambda: tritile.batch_invariant(),
        lambda: tritile.mode("off", backends="triton"),
        lambda: tritile.mode(fp32="fp16x3"),
    ],
)
def test_a_backward_pass_follows_the_choice_where_it_began(graphs, choose):
    """As what a checkpoint computes anew: another graph would save other tensors, which torch refuses."""
    found, compiled = graphs
    call, given = compiled(lambda a, b: tritile.matmul(a, b), runs=False), (operand(16, 32), operand(32, 8))
    call(*given)
    with choose():
        call(*given)
        in_backward(lambda: call(*given))
    in_backward(lambda: call(*given))
    assert made_by_torch(found) == [True, False, False, True], "gradients are off in backward passes"


def test_settings_of_what_a_checkpoint_computes_anew():
    seen, outside = [], settings.rules()

    def step(a):
        seen.append(settings.rules())
        with tritile.mode("strict"):
            seen.append(settings.rules())
        with tritile.batch_invariant(False):
            tritile.matmul(torch.ones(2, 3), torch.ones(3, 2))
            seen.append(settings.rules())
            with tritile.mode(backends="triton"):
                seen.append(settings.rules())
                seen.append(settings.requested_mode())
            seen.append(settings.is_batch_invariant_torch())
        seen.append(settings.rules())
        return a.sin()

    a = torch.randn(3, requires_grad=True)
    with tritile.batch_invariant(torch=True), tritile.mode("off", fp32="fp16x3"):
        loss = checkpoint(step, a, use_reentrant=False).sum()
        in_backward(loss.backward)
    assert seen[7:] == seen[:7]
    assert seen[0] == outside._replace(mode="off", invariant=True, fp32="fp16x3") == seen[6]
    assert seen[1:3] == [seen[0]._replace(mode="strict"), seen[0]._replace(invariant=False)]
    in_backward(lambda: seen.append(settings.rules()))
    assert seen[-1] == settings.rules() == outside


def test_graphs_without_torchs_products_are_for_all_choices(graphs, monkeypatch):
    found, compiled = graphs
    monkeypatch.setattr(ops_request, "_is_lowered", constant_in_graphs(lambda *given: False))
    call = compiled(lambda a, b: tritile.matmul(a, b), runs=False)
    given = operand(16, 32), operand(32, 8)
    call(*given)
    with tritile.mode("off", backends="triton"):
        call(*given)
    assert made_by_torch(found) == [False]


def test_open_sizes_planned_each_call(graphs):
    found, compiled = graphs
    got = compiled(lambda a, b: tritile.matmul(a, b), dynamic=True)(operand(16, 32), operand(32, 8))
    assert torch.equal(got, operand(16, 32) @ operand(32, 8))
    assert any("tritile.matmul" in name for name in found[0])


@pytest.mark.parametrize("sample", EPILOGUES, ids=lambda sample: sample.id)
def test_graph_computes_the_call(graphs, sample):
    found, compiled = graphs
    tensors = [tensor.float().requires_grad_() for tensor in sample.tensors]
    got = compiled(lambda *given: sample.call(*given))(*tensors)
    assert not any("tritile" in each for each in found[0])
    doubles = [tensor.detach().requires_grad_() for tensor in sample.tensors]
    wanted = sample.peer(*doubles)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    mine, right = (torch.autograd.grad(y.sum(), of) for y, of in ((got, tensors), (wanted, doubles)))
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_open_numbers_go_to_operator(graphs):
    found, compiled = graphs
    call = compiled(lambda *given: tritile.addmm(*given[:3], alpha=given[3]), runs=False)
    for number in (2.0, 3.0, 4.0):
        call(wide(5, 9), wide(5, 7), wide(7, 9), number)
    assert any("tritile" in name for name in found[-1])


def test_recalled_call_begins_alike(planned):
    """torch makes neither call with a bias, nor one of int8, off 16 bytes."""
    x, w, bias = operand(5, 16), operand(8, 16), operand(8)
    tritile.linear(x, w, bias)
    shifted = torch.empty(81, dtype=torch.bfloat16)[1:].view(5, 16).copy_(x)
    with ours:
        tritile.linear(shifted, w, bias)
    tritile.matmul(x, w.t())
    assert torch.equal(tritile.matmul(shifted, w.t()), x @ w.t())
    assert len(planned) == 2, "of two matrices alone it does not count"
