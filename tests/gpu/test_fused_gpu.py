"""Epilogues, scales, zero points and gated products on a GPU, in every family, against float64."""

import itertools
import math

import pytest
import torch

import tritile
from tests.configs import ON_GPU as CONFIGS
from tests.launched import captured, launched
from tests.reference import (
    ACTIVATIONS,
    FP8,
    Sides,
    assert_fused,
    assert_gated,
    bytes_of,
    frame,
    guard_intact,
    name,
    placed,
    values,
)
from tests.scales import assert_block_scaled, assert_exact, blocks_of, scale
from tritile.core import device as devices
from tritile.core.problem import MatmulProblem
from tritile.ops import call as ops_call
from tritile.ops.products import matmul_call
from tritile.planning import model
from tritile.runtime import launch
from tritile.tune.subject import answers, operands

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison", "fresh")]
BF16, FP16, FP32, FP64, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8
E4M3, E5M2 = FP8


SIDES = [
    ("row", "", "gelu", 1.0, 1.0),
    ("row", "full", "silu", 1.0, 1.0),
    ("full", "column", "gelu_tanh", -0.5, 2.0),
    ("column", "row", "relu", 1.0, 1.0),
    ("one", "one", "", 3.0, 0.25),
    ("", "full", "", 1.0, 1.0),
]


def gpu(shape, dtype=BF16, seed=0):
    return values(tuple(shape), dtype, seed, "cuda")


def side(spread, m, n, dtype=BF16, seed=5, batch=()):
    sizes = {"one": (), "row": (n,), "column": (m, 1), "full": (*batch, m, n), "": None}[spread]
    return None if sizes is None else gpu(sizes, dtype, seed)


def sides_of(how, m, n, dtype=BF16, batch=()):
    bias, residual, *rest = how
    return Sides(None, None, side(bias, m, n, dtype, 5, batch), side(residual, m, n, dtype, 6, batch), *rest)


every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
SIZES = [(256, 320, 512), (301, 203, 517), (77, 515, 259), (1, 33, 256), (64, 1, 256)]


# Every epilogue at one ragged size; at each other size one, a different one for each config.
EPILOGUES = [(config, how, SIZES[1]) for config in CONFIGS for how in SIDES]
EPILOGUES += [
    (config, SIDES[(i + j) % 6], size)
    for i, config in enumerate(CONFIGS)
    for j, size in enumerate((SIZES[0], *SIZES[2:]))
]


@pytest.mark.parametrize(("config", "how", "size"), EPILOGUES, ids=str)
def test_every_family_with_every_epilogue(config, how, size):
    m, n, k = size
    a, b, sides = gpu((m, k)), gpu((k, n), seed=1), sides_of(how, m, n)
    buffer, out = frame((m, n), BF16, "row", "cuda")
    launched(matmul_call(a, b, out, "ieee", **sides._asdict()), config)
    assert_fused(out, a, b, sides)
    assert guard_intact(buffer, out)


ADDED_LAYOUTS = ("sliced", "offset", "column")


@every_config
@pytest.mark.parametrize("layout", ADDED_LAYOUTS)
def test_results_and_what_is_added_lie_in_any_way(config, layout):
    """Each config has three ways to add in three layouts, each family every pair of them."""
    how = SIDES[1 + (CONFIGS.index(config) + ADDED_LAYOUTS.index(layout)) % 3]
    m, n, k = 200, 330, 264
    a, b, sides = gpu((m, k), FP16), gpu((k, n), FP16, 1), sides_of(how, m, n, FP32)
    added = {which: getattr(sides, which) for which in ("bias", "residual")}
    matrices = {which: t for which, t in added.items() if t is not None and t.ndim > 1}
    lain = sides._replace(**{which: placed(t, layout) for which, t in matrices.items()})
    buffer, out = frame((m, n), FP16, layout, "cuda")
    launched(matmul_call(a, b, out, "ieee", **lain._asdict()), config)
    assert_fused(out, a, b, sides)
    assert guard_intact(buffer, out)


@every_config
@pytest.mark.parametrize("which", ["bias", "residual"])
@pytest.mark.parametrize("layout", ["row", "column"])
def test_the_result_may_take_the_place_of_what_is_added(config, which, layout):
    m, n, k = 301, 203, 517
    a, b, added = gpu((m, k)), gpu((k, n), seed=1), gpu((m, n), seed=5)
    buffer, out = frame((m, n), BF16, layout, "cuda")
    call = matmul_call(a, b, out, "ieee", **{which: out}, activation="silu")
    out.copy_(added)
    prepared = launched(call, config)
    assert_fused(out, a, b, Sides(**{which: added}, activation="silu"))
    first = bytes_of(out)
    for _ in range(10):
        out.copy_(added)
        prepared(*call.tensors)
        assert torch.equal(bytes_of(out), first)
    assert guard_intact(buffer, out)


@every_config
@pytest.mark.parametrize("size", [(128, 192, 320), (101, 67, 259)], ids=str)
def test_batches(config, size):
    m, n, k = size
    a, b = gpu((3, 5, m, k)), gpu((3, 5, k, n), seed=1)
    for left, right, given in (
        (a, b, (3, 5)),
        (a, b, (5,)),
        (a, b[0], (3, 1)),
        (a.transpose(0, 1).contiguous().transpose(0, 1), b, (3, 5)),
        (a[:, 0], b[0, 0], (3,)),
    ):
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        sides = Sides(bias=gpu((n,), seed=3), residual=gpu((*given, m, n), seed=4), activation="gelu")
        out = torch.empty(*batch, m, n, dtype=BF16, device="cuda")
        launched(matmul_call(left, right, out, "ieee", **sides._asdict()), config)
        assert_fused(out, left, right, sides)


@every_config
def test_other_result_types(config):
    m, n, k = 260, 140, 300
    for dtype, out_dtype in ((FP16, BF16), (BF16, FP16), (FP16, FP32)):
        a, b = gpu((m, k), dtype), gpu((k, n), dtype, 1)
        sides = Sides(bias=gpu((n,), FP32, 3), residual=gpu((m, n), FP16, 4), activation="silu")
        out = torch.empty(m, n, dtype=out_dtype, device="cuda")
        launched(matmul_call(a, b, out, "ieee", **sides._asdict()), config)
        assert_fused(out, a, b, sides)


@every_config
def test_not_finite_values_come_out_where_torch_has_them(config):
    a, b = gpu((300, 517)), gpu((517, 200), seed=1)
    a[3, 5], a[200, 516], b[7, 9] = math.nan, math.inf, -math.inf
    bias, residual = gpu((200,), seed=2), gpu((300, 200), seed=3)
    bias[4], residual[5, 5] = math.inf, math.nan
    for activation, function in ACTIVATIONS.items():
        out = torch.empty(300, 200, dtype=FP32, device="cuda")
        launched(matmul_call(a, b, out, "ieee", bias=bias, residual=residual, activation=activation), config)
        wanted = function(a.double() @ b.double() + bias) + residual
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(out.isinf(), wanted.isinf())


@every_config
def test_a_chain_waits_for_what_it_reads(config):
    """Each may start before the one ahead of it is done, whose result it reads, as its residual too."""
    x, weight = gpu((256, 256)) / 16, gpu((256, 256), seed=1) / 16
    outs = [torch.empty(256, 256, dtype=BF16, device="cuda") for _ in range(12)]
    call = matmul_call(x, weight, outs[0], "ieee", residual=x, activation="silu")
    prepared = launched(call, config)
    other = weight.clone()  # at another address than it was prepared with, as all that follows
    torch.cuda.synchronize()
    for before, after in itertools.pairwise(outs):
        prepared(before, other, after, before)
    for before, after in itertools.pairwise(outs):
        alone, copy = torch.empty_like(after), before.clone()
        torch.cuda.synchronize()
        prepared(copy, weight, alone, copy)
        assert torch.equal(bytes_of(alone), bytes_of(after))


# The operations.


LINEAR = [(activation, (300, 200, 500)) for activation in ACTIVATIONS]
LINEAR += [("gelu", (17, 33, 65)), ("silu", (1, 4096, 512))]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=name)
@pytest.mark.parametrize(("activation", "size"), LINEAR, ids=str)
def test_linear(dtype, activation, size):
    m, n, k = size
    x, weight = gpu((m, k), dtype), gpu((n, k), dtype, 1)
    bias, residual = gpu((n,), dtype, 2), gpu((m, n), dtype, 3)
    for _ in range(2):  # prepared, and met again
        got = tritile.linear(x, weight, bias, activation=activation or None, residual=residual)
        assert got.dtype == dtype
        assert_fused(got, x, weight.mT, Sides(bias=bias, residual=residual, activation=activation))


@pytest.mark.parametrize("precision", ["ieee", "fp16x3", "tf32"])
def test_precisions_of_float32(precision):
    x, weight, bias = gpu((300, 500), FP32), gpu((200, 500), FP32, 1), gpu((200,), FP32, 2)
    got = tritile.linear(x, weight, bias, activation="gelu", precision=precision)
    assert_fused(got, x, weight.mT, Sides(bias=bias, activation="gelu"), precision)


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=name)
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (0.3, -2.7), (2, 0)])
def test_addmm_and_baddbmm(dtype, alpha, beta):
    a, b = gpu((3, 130, 260), dtype), gpu((3, 260, 140), dtype, 1)
    for shape in ((3, 130, 140), (140,), (130, 1), ()):
        added = gpu(shape, dtype, 2) if beta else torch.full(shape, math.nan, dtype=dtype, device="cuda")
        sides = Sides(bias=added if beta else None, alpha=alpha, beta=beta)
        for _ in range(2):
            assert_fused(tritile.baddbmm(added, a, b, alpha=alpha, beta=beta), a, b, sides)
            if len(shape) < 3:
                got = tritile.addmm(added, a[0], b[0], alpha=alpha, beta=beta)
                assert_fused(got, a[0], b[0], sides)
    out = gpu((130, 140), dtype, 4)
    wanted = out.clone()
    for _ in range(2):
        out.copy_(wanted)
        assert tritile.addmm(out, a[0], b[0], out=out, beta=0.5) is out
        assert_fused(out, a[0], b[0], Sides(bias=wanted, beta=0.5))


def test_calls_met_again_prepare_nothing(monkeypatch):
    x, weight, bias = gpu((130, 260)), gpu((140, 260), seed=1), gpu((140,), seed=2)
    eight, wide = gpu((128, 256), E4M3), gpu((128, 256), E4M3, 1).mT
    scales = scale(128, 1).cuda(), scale(1, 128).cuda()
    whole, one = gpu((128, 256), INT8), torch.ones((), device="cuda")
    doubles, out = gpu((131, 300), FP64), torch.empty(130, 140, dtype=BF16, device="cuda")
    calls = [
        lambda: tritile.linear(x, weight, bias, activation="gelu"),
        lambda: tritile.addmm(bias, x, weight.mT, beta=2),
        lambda: tritile.scaled_matmul(eight, wide, *scales),
        lambda: tritile.scaled_matmul(whole, whole.mT, one, one),
        lambda: tritile.gated_linear(x, weight, weight + 1, bias_gate=bias),
        lambda: tritile.matmul(x, weight.mT, out=out),
        lambda: tritile.matmul(doubles, doubles.mT),
        lambda: tritile.transpose(x),
    ]
    first = [bytes_of(call()) for call in calls]
    monkeypatch.setattr(ops_call, "prepared", lambda *given: pytest.fail("prepared again"))
    for _ in range(3):
        assert all(torch.equal(bytes_of(call()), wanted) for call, wanted in zip(calls, first, strict=True))


QUANTISED = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (INT8, INT8)]


@pytest.mark.parametrize(("a_dtype", "b_dtype"), QUANTISED, ids=name)
@pytest.mark.parametrize("size", [(256, 320, 512), (77, 515, 259), (16, 256, 1024)], ids=str)
@pytest.mark.parametrize("turned", [True, False])
def test_scales(a_dtype, b_dtype, size, turned):
    m, n, k = size
    a, b = gpu((m, k), a_dtype), gpu((k, n), b_dtype, 1)
    b = placed(b, "column") if turned else b
    for shapes in (((), ()), ((m, 1), (1, n)), ((m, 1), (1,))):
        scales = scale(*shapes[0]).cuda() / 64, scale(*shapes[1]).cuda() / 64
        for out_dtype in (BF16, FP16, FP32):
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=out_dtype)
            assert_fused(got, a, b, Sides(*scales))
    bias, residual = gpu((n,), FP32, 2), gpu((m, n), BF16, 3)
    for fast in (False, True):
        if fast and a_dtype == INT8:
            continue
        how = {"bias": bias, "residual": residual, "activation": "gelu", "use_fast_accum": fast}
        got = tritile.scaled_matmul(a, b, *scales, **how)
        if not fast:  # which has no bound of fp32's
            assert_fused(got, a, b, Sides(*scales, bias, residual, "gelu"))
        exact = tritile.scaled_matmul(a, b, *scales, bias=bias, residual=residual, activation="gelu")
        assert ((got - exact).float().norm() / exact.float().norm()).item() < 1e-2


@pytest.mark.parametrize("shared", list(itertools.product((1, 128), repeat=2)), ids=str)
@pytest.mark.parametrize("size", [(256, 384, 512), (77, 528, 272), (4, 144, 640), (1, 48, 256)], ids=str)
def test_scales_for_each_128_of_k(shared, size):
    """torch's alone, on Hopper: of any number of rows, and of K and N that are multiples of 16."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch has these on Hopper alone")
    m, n, k = size
    a, b = gpu((m, k), E4M3), placed(gpu((k, n), E4M3, 1), "column")
    scales = tuple(s.cuda() for s in blocks_of(m, n, k, shared))
    bias, residual = gpu((n,), FP32, 2), gpu((m, n), BF16, 3)
    sides, how = Sides(None, None, bias, residual, "gelu"), {"bias": bias, "residual": residual}
    with tritile.mode(backends="triton,aten"):
        for layout in ("row", "column", "sparse"):
            lain = [placed(each, layout) for each in scales]
            for out in (None, None, torch.empty(n, m, dtype=BF16, device="cuda").mT):
                got = tritile.scaled_matmul(a, b, *lain, out=out)
                assert_block_scaled(got, a, b, *scales, shared)
        for dtype in (BF16, FP16, FP32):
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=dtype)
            assert_block_scaled(got, a, b, *scales, shared)
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=dtype, activation="gelu", **how)
            assert got.dtype == dtype
            assert_block_scaled(got, a, b, *scales, shared, sides)
        graph, out = captured(lambda: tritile.scaled_matmul(a, b, *scales))
        out.fill_(math.nan)
        graph.replay()
        assert_block_scaled(out, a, b, *scales, shared)


def test_scales_for_each_128_of_k_are_refused_in_words():
    a, b = gpu((64, 272), E4M3), gpu((272, 48), E4M3, 1)
    scales = tuple(s.cuda() for s in blocks_of(64, 48, 272, (1, 128)))
    with tritile.mode(backends="triton,aten"):
        with pytest.raises(tritile.errors.UnsupportedError, match=r"only torch computes .* contiguous"):
            tritile.scaled_matmul(a, b, *scales)
        with pytest.raises(tritile.errors.UnsupportedError, match="multiples of 16"):
            tritile.scaled_matmul(a[:, :260], placed(b, "column")[:260], *scales)
    with pytest.raises(tritile.errors.UnsupportedError, match="only torch computes"):
        tritile.scaled_matmul(a, placed(b, "column"), *scales)


@pytest.mark.parametrize("size", [(256, 320, 512), (77, 515, 259), (16, 256, 4100)], ids=str)
@pytest.mark.parametrize("turned", [True, False])
def test_int8_with_scales(size, turned):
    m, n, k = size
    a, b = gpu((m, k), INT8), gpu((k, n), INT8, 1)
    a, b = (placed(a, "column"), b) if turned else (a, placed(b, "column"))
    scales, bias = (scale(m, 1).cuda() / 64, scale(1, n).cuda() / 64), gpu((n,), FP32, 2)
    for out in (None, torch.empty(n, m, dtype=FP32, device="cuda").mT):
        for _ in range(2):
            got = tritile.scaled_matmul(a, b, *scales, out_dtype=FP32, bias=bias, out=out)
            assert_exact(got, a, b, Sides(*scales, bias))
    call = matmul_call(a, b, torch.empty(m, n, device="cuda"), "ieee", scale_a=scales[0], scale_b=scales[1])
    for config in model.screened(call.problem, devices.gpu(0), 6):
        launch.prepare(call, config)(*call.tensors)
        assert_exact(call.out.tensor, a, b, Sides(*scales))


GATED = [config for config in CONFIGS if config.family in ("tile", "descriptor")]


# Every layout at one ragged size; each other size with one, a different one for each config.
GATED_LAYOUTS = ("row", "column", "offset")
GATED_CASES = [(config, SIZES[1], layout) for config in GATED for layout in GATED_LAYOUTS]
GATED_CASES += [
    (config, size, GATED_LAYOUTS[(i + j) % 3])
    for i, config in enumerate(GATED)
    for j, size in enumerate((SIZES[0], *SIZES[2:]))
]


@pytest.mark.parametrize(("config", "size", "layout"), GATED_CASES, ids=str)
def test_gated_products(config, size, layout):
    m, n, k = size
    x, gate, up = gpu((m, k)), gpu((n, k), seed=1), gpu((n, k), seed=2)
    bias_gate, bias_up = gpu((n,), seed=3), gpu((n,), FP32, 4)
    for weights in ((placed(gate, layout), up), (gate, placed(up, layout))):
        buffer, out = frame((m, n), BF16, "row", "cuda")
        extras = {"bias": bias_gate, "bias_up": bias_up, "activation": "silu", "up": weights[1].mT}
        launched(matmul_call(x, weights[0].mT, out, "ieee", **extras), config)
        assert_gated(out, x, gate.mT, up.mT, "silu", bias_gate, bias_up)
        assert guard_intact(buffer, out)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=name)
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_gated_linear(dtype, activation):
    x, both = gpu((2, 130, 260), dtype), gpu((2 * 140, 260), dtype, 1)
    biases = gpu((140,), dtype, 2), gpu((140,), dtype, 3)
    how = {"activation": activation, "bias_gate": biases[0], "bias_up": biases[1]}
    for gate, up in ((both[:140], both[140:]), (both[::2], both[1::2])):
        for _ in range(2):
            got = tritile.gated_linear(x, gate, up, **how)
            assert_gated(got, x, gate.mT, up.mT, activation or "", *biases)
    for layout in ("column", "sliced"):
        buffer, out = frame((2, 130, 140), dtype, layout, "cuda")
        tritile.gated_linear(x, both[:140], both[140:], activation=activation, out=out)
        assert_gated(out, x, both[:140].mT, both[140:].mT, activation or "")
        assert guard_intact(buffer, out)
    batch = placed(x, "sliced")
    assert_gated(tritile.gated_linear(batch, gate, up), x, gate.mT, up.mT)


PROBLEMS = [
    {"epilogue": "bias=row residual=full gelu"},
    {"epilogue": "bias=full weighted silu", "batch": 3},
    {"epilogue": "gated silu"},
    {"epilogue": "bias=row bias_up=row gated gelu", "a_align": 2, "b_align": 2},
    {"dtype": "int8", "epilogue": "scale_a=column scale_b=row"},
    {"dtype": "float8_e4m3fn", "b_dtype": "float8_e5m2", "epilogue": "scale_a=one scale_b=row"},
    {"dtype": "float64", "out_dtype": "float64", "epilogue": "bias=row weighted gated silu"},
]


@pytest.mark.parametrize("fields", PROBLEMS, ids=str)
def test_the_tuner_checks_answers(fields):
    common = {"batch": 1, "m": 208, "n": 272, "k": 336, "dtype": "bfloat16", "out_dtype": "bfloat16"}
    problem, device = MatmulProblem(**common | fields), devices.current_gpu()
    for config in model.screened(problem, device, 6):
        guarded = operands.Guarded(problem)
        prepared = launch.prepare(guarded.call, config)
        answers.check(operands.run_of(prepared), guarded.call)
        guarded.check()
    out = guarded.call.out.tensor
    out.view(-1)[0] += 2 * out.abs().max() + 1e4  # and a wrong one is told
    with pytest.raises(tritile.errors.TuningError, match="wrong answer"):
        answers.answer_error(guarded.call)
