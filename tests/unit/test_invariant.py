"""Batch-invariant calls: what decides bits, as values; which configs and plans are left; what is refused."""

from dataclasses import replace

import pytest
import torch

import tritile
from tests.configs import numerics, of_groups, tile, tma, warpgroups
from tests.wrong_calls import assert_refused, cases, recorded
from tritile.choose import gpu_tables, pick, waves
from tritile.choose.table import Entry, Table
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.problem import GroupedProblem, MatmulProblem, QuantizedProblem
from tritile.errors import NotTunedError, UnsupportedError
from tritile.families.numerics import Numerics
from tritile.families.registry import FAMILIES
from tritile.families.space import canonical, legal_configs
from tritile.ops.products import matmul_call
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import store_of

HOPPER = TARGETS["nvidia-h200"]
AMPERE = TARGETS["sm_80"]
ADA = replace(AMPERE, name="Made-up Ada", arch=89, shared_memory=101376)
CONSUMER = replace(AMPERE, name="Made-up Blackwell", arch=120, shared_memory=101376)
DEVICES = {name: TARGETS[name] for name in ("nvidia-h200", "sm_80", "sm_100", "gfx942")}
DEVICES |= {"sm_89": ADA, "sm_120": CONSUMER}
ROWS = (1, 2, 16, 17, 64, 127, 1000, 4096)
SIZES = ((1, 4096, 4096, 16), (1000, 37, 40, 1))  # m, n, k, bytes that rows start on
HALF = MatmulProblem(1, 256, 1024, 1024, "float16", "float16", b_layout="column", invariant=True)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No plan remembered from another test, and no table shipped."""
    monkeypatch.setattr(gpu_tables, "like", lambda device: ())
    tritile.forget()
    yield
    tritile.forget()


def specialised(m, n, k, consumers, family="warpgroups"):
    return warpgroups(m, n, k, consumers, 4, persistent=True, family=family)


def of_type(dtype, precision="ieee", out="", **changes):
    fields = {"dtype": dtype, "out_dtype": out or dtype, "precision": precision} | changes
    return replace(HALF, **fields)


TF32 = of_type("float32", "tf32")
FP8 = of_type("float8_e4m3fn", out="bfloat16")
GROUPS = GroupedProblem(8, 256, 1024, 1024, "float16", "float16", invariant=True)
PACKED = QuantizedProblem(64, 1024, 1024, "bfloat16", 4, 128, invariant=True)
BY_TMA = Numerics("warpgroup", rounding="tma")
SUMS = Numerics("warpgroup", step=128, scaled="sums")
WEIGHTS = Numerics("warp", parts=2, scaled="weights")
FUSED = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1}
FOUND = [
    (tile(64, 64, 32), HALF, HOPPER, Numerics("warpgroup")),
    (tile(64, 64, 32, warps=2), HALF, HOPPER, Numerics("warp")),
    (tile(32, 64, 32), HALF, HOPPER, Numerics("warp")),
    (tile(64, 64, 32), HALF, AMPERE, Numerics("warp")),
    (tile(16, 16, 16), HALF, CONSUMER, Numerics("warp")),
    (tile(16, 64, 32), HALF, DEVICES["gfx942"], Numerics("matrix 16")),
    (tile(64, 32, 32), HALF, DEVICES["gfx942"], Numerics("matrix 32")),
    (tma(64, 64, 64), HALF, HOPPER, Numerics("warpgroup")),
    (tma(128, 128, 64, 8, persistent=True), HALF, HOPPER, Numerics("warpgroup")),
    (tma(64, 64, 64, split=4), HALF, HOPPER, Numerics("warpgroup", parts=4)),
    (specialised(192, 96, 64, 3), HALF, HOPPER, Numerics("warpgroup")),
    (tile(64, 64, 32), TF32, HOPPER, Numerics("warpgroup", rounding="kernel")),
    (tma(64, 64, 64), TF32, HOPPER, Numerics("warpgroup", rounding="tma")),
    (tile(64, 32, 16), of_type("float32"), HOPPER, Numerics("fma", step=16)),
    (tile(64, 32, 16), of_type("float64"), HOPPER, Numerics("fp64")),
    (tma(64, 64, 128, split=4), of_type("int8", out="int32"), HOPPER, Numerics("exact")),
    (tma(64, 64, 64), FP8, HOPPER, Numerics("warpgroup", step=64)),
    (specialised(128, 128, 64, 2), FP8, HOPPER, Numerics("warpgroup", step=128)),
    (specialised(128, 128, 64, 2), replace(FP8, precision="fast"), HOPPER, Numerics("warpgroup")),
    (tile(64, 64, 64), replace(GROUPS, dtype="float32"), HOPPER, Numerics("fma")),
    (of_groups(64, 64, 64), replace(GROUPS, dtype="float32", precision="tf32"), HOPPER, BY_TMA),
    (Config.of(4, 3, "tile", **FUSED, SPLIT_K=1), PACKED, HOPPER, SUMS),
    (Config.of(2, 3, "tile", **FUSED | {"BLOCK_K": 256}, SPLIT_K=2), PACKED, HOPPER, WEIGHTS),
]  # fmt: skip


@pytest.mark.parametrize(("config", "problem", "device", "wanted"), FOUND)
def test_what_decides_bits(config, problem, device, wanted):
    assert numerics(config, problem, device) == wanted


KINDS = {
    "float16": HALF,
    "bfloat16 by rows": replace(of_type("bfloat16"), b_layout="row"),
    "float32": of_type("float32"),
    "tf32": TF32,
    "float64": of_type("float64"),
    "int8": of_type("int8", out="int32"),
    "fp8": FP8,
    "fp8 by rows": replace(FP8, b_layout="row"),
    "fp8 fast": replace(FP8, precision="fast"),
    "gated": of_type("bfloat16", epilogue="gated silu"),
    "gated fp32": of_type("float32", epilogue="gated silu"),
    "batch": replace(HALF, batch=3),
    "groups": GROUPS,
    "groups of tf32": replace(GROUPS, dtype="float32", out_dtype="float32", precision="tf32"),
    "int4": PACKED,
    "int8 weights": replace(PACKED, bits=8, zero_points=True, bias=True),
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_way_for_all_rows(kind, device):
    """Rows change sizes, and with them the layouts and alignments of what has one row or one column."""
    rows = (*range(1, 321), *range(321, 4097, 59), 4096) if device is HOPPER else ROWS
    found = {canonical(replace(KINDS[kind], m=m).core, device) for m in rows}
    for changes in (
        {"m": 1, "a_align": 2},
        {"m": 9, "a_layout": "column"},
        {"a_layout": "strided", "a_align": 1},
        {"m": 3, "out_layout": "column"},
        {"out_align": 2},
        {"x_layout": "strided", "x_align": 2},
    ):
        if all(hasattr(KINDS[kind], name) for name in changes):
            found.add(canonical(replace(KINDS[kind], **changes).core, device))
    assert len(found) == 1


def _varied(problem, m, n, k, align):
    """The problem at other sizes, as rows of these lie in memory."""
    if isinstance(problem, QuantizedProblem):
        return replace(problem, m=m, n=n, k=k, x_align=max(2, align))
    least = max(align, problem.itemsize)
    return replace(problem, m=m, n=n, k=k, a_align=min(16, least))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_configs_are_left(kind, device):
    """On a Hopper at every size; elsewhere at one, so that each kind has each and each device too."""
    turn = (list(KINDS).index(kind) + list(DEVICES.values()).index(device)) % len(SIZES)
    for size in SIZES if device is HOPPER else SIZES[turn:][:1]:
        problem = _varied(KINDS[kind], *size)
        try:
            left = legal_configs(problem, device)
        except UnsupportedError:
            with pytest.raises(UnsupportedError):
                legal_configs(replace(problem, invariant=False), device)
            continue
        wanted = canonical(problem.core, device)
        assert {numerics(config, problem.core, device) for config in left} == {wanted}


def test_stand_ins_sum_alike():
    tried = {*waves.screened(HALF, HOPPER, 8), pick.plan_for(HALF, HOPPER).config}
    assert {numerics(config, HALF, HOPPER) for config in tried} == {canonical(HALF, HOPPER)}


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (of_type("float32", "fp16x3"), "data decide"),
        (replace(TF32, out_layout="column"), "rounding 'kernel', not 'tma'"),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_impossible_ways_are_named(problem, words):
    assert legal_configs(replace(problem, invariant=False), HOPPER)
    with pytest.raises(UnsupportedError, match=words) as caught:
        legal_configs(problem, HOPPER)
    assert problem.label in str(caught.value)


GOOD, OTHER = tile(64, 64, 64), tile(16, 64, 64)  # the second sums on the instruction of a warp
FREE = replace(HALF, invariant=False)


def remember(problem, config, us):
    digest = FAMILIES[problem.op][config.family].digest
    when = "2026-01-01T00:00:00+00:00"
    store_of(HOPPER).add(digest, Trial(problem, config, us, measured_utc=when))
    tritile.forget()


def planned(problem, mode=None):
    found = pick.plan_for(problem, HOPPER, mode)
    return found and (found.source, found.config)


@pytest.fixture
def unpredicted(monkeypatch):
    """Nothing predicts."""
    monkeypatch.setattr(gpu_tables, "predictor", lambda name, device: None)


def test_plans_take_measured_sums(unpredicted):
    remember(FREE, OTHER, 1.0)
    assert planned(FREE) == ("exact", OTHER)
    assert planned(HALF)[0] == "model"
    remember(FREE, GOOD, 2.0)
    assert planned(FREE) == ("exact", OTHER)
    assert planned(HALF) == planned(HALF, "strict") == ("exact", GOOD)
    assert planned(HALF, "tune") is None  # its own search has yet to be made
    remember(HALF, tile(64, 128, 64), 3.0)
    assert planned(HALF) == planned(HALF, "tune") == ("exact", tile(64, 128, 64))


def test_shipped_configs_that_sum_alike(unpredicted, monkeypatch):
    for config, source in ((OTHER, "model"), (GOOD, "table")):
        digests = {"matmul/tile": FAMILIES["matmul"]["tile"].digest}
        shipped = Table(HOPPER.to_dict(), digests, (Entry(FREE, config, 1.0),))
        monkeypatch.setattr(gpu_tables, "like", lambda device, shipped=shipped: (shipped,))
        tritile.forget()
        assert planned(HALF)[0] == source
    assert planned(HALF, "strict") == ("table", GOOD)
    monkeypatch.setattr(gpu_tables, "like", lambda device: ())
    tritile.forget()
    with pytest.raises(NotTunedError, match="invariant"):
        planned(HALF, "strict")


def test_invariant_problems_never_swap():
    a, b = torch.ones(5, 4), torch.ones(4, 3)
    out = torch.empty(3, 5).t()
    assert matmul_call(a, b, out, "ieee").a.buffer == "b"
    with tritile.batch_invariant():
        call = matmul_call(a, b, out, "ieee")
        assert call.problem.invariant
        assert call.a.buffer == "a"
        assert tritile.plan(tritile.matmul, a, b).problem.invariant
    assert not tritile.plan(tritile.matmul, a, b).problem.invariant


X = torch.ones(4, 8)
Z = torch.ones(4, 8, dtype=torch.complex64)
REFUSED = [
    ("fp16x3", lambda: tritile.matmul(X, X.t(), precision="fp16x3"), ("fp16x3", "batch-invariant")),
    ("complex", lambda: tritile.matmul(Z, Z.t()), ("complex64", "batch-invariant", "real operands")),
    ("linear", lambda: tritile.linear(X, X, precision="fp16x3"), ("linear", "fp16x3")),
]


@pytest.mark.parametrize(("kind", "call", "words"), cases({UnsupportedError: REFUSED}))
def test_refused_before_any_launch(monkeypatch, kind, call, words):
    launches = recorded(monkeypatch)
    with tritile.batch_invariant():
        assert_refused(kind, call, words, launches)


@pytest.mark.parametrize("out_layout", ["row", "column"])
def test_single_tf32_column_one_way(out_layout):
    """As rows by columns it lies either way, of which TMA sees one: the kernel rounds."""
    column = replace(TF32, n=1, out_layout=out_layout, b_layout="column")
    found = {numerics(config, column, HOPPER) for config in legal_configs(column, HOPPER)}
    assert found == {Numerics("warpgroup", rounding="kernel")}
