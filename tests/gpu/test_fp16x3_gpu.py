"""float32 products of float16 parts on a GPU: errors of every kind of data, and each kernel of the call."""

import itertools
import random

import pytest
import torch

import tritile
from tests.configs import tile, tma, warpgroups
from tests.launched import captured, launched
from tests.reference import bytes_of, placed, product64, values
from tests.simulated import DATA, assert_bounded
from tritile.core.problem import error_bound, suits
from tritile.families.common.fallback import EXTREME, UNFIT
from tritile.families.work import lowered
from tritile.ops.products import matmul_call
from tritile.runtime import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
U = 2.0**-24
EXTREMES = ("NaN", "infinite", "huge", "denormal")
UNSUITED = ("wide", "graded", "one large", "far out", "one small")
RANGES = {name: DATA[name] for name in ("normal", "uniform", "log-normal", "cancelling", "graded")} | {
    "badly ranged": lambda a, b: (a * (8 * torch.randn_like(a)).exp(), b * (8 * torch.randn_like(b)).exp())
}
FIT = tuple(name for name in DATA if name not in (*EXTREMES, *UNSUITED))


def posed(name, m, n, k, layouts=("row", "row")):
    a, b = (values(shape, torch.float32, seed, "cuda") for seed, shape in enumerate(((m, k), (k, n))))
    a, b = DATA[name](a, b)
    return placed(a, layouts[0]), placed(b, layouts[1])


def verdict_of(a, b):
    """What the kernels before the core say of these data."""
    out = torch.empty(a.shape[0], b.shape[1], device="cuda")
    call = matmul_call(a, b, out, "fp16x3")
    parts = lowered(call, False)
    buffers = dict(zip(call.buffers, call.tensors, strict=True))
    for name, section in parts.scratch.items():
        buffers[name] = torch.empty(section.elements, dtype=getattr(torch, section.dtype), device="cuda")
    for step in parts.before:
        args = {name: launch._bound(value, buffers) for name, value in step.args.items()}
        options = {name: value for name, value in step.options.items() if name != "launch_pdl"}
        step.kernel[step.grid](**args, **options)
    return int(buffers[parts.core.fallback.flag.buffer])


@pytest.mark.parametrize("size", [(131, 259, 300), (131, 259, 1009), (64, 128, 16384)], ids=str)
@pytest.mark.parametrize("name", DATA)
def test_answers_and_verdicts_of_every_kind_of_data(name, size):
    a, b = posed(name, *size)
    assert_bounded(tritile.matmul(a, b, precision="fp16x3"), a, b)
    verdict = verdict_of(a, b)
    if name in EXTREMES:
        assert verdict >= EXTREME.value
    elif name == "one small":  # among identity's, by itself harmful
        assert verdict == UNFIT.value
    else:
        assert (verdict < UNFIT.value) == (name in FIT)
        assert verdict <= UNFIT.value


TRANSPOSES = list(itertools.product(("row", "column"), repeat=2))
EDGES = [(127, 257, 4095), (65, 63, 129), (64, 66, 9001), (130, 2, 8191), (4, 68, 40000), (2047, 2049, 2051)]


@pytest.mark.parametrize("size", EDGES, ids=str)
@pytest.mark.parametrize("layouts", TRANSPOSES, ids=str)
def test_operands_along_k_and_across(layouts, size):
    """Rows split whole and by tiles, ragged and not, are judged alike, and multiplied within the bound."""
    for name in ("normal", "relu", "graded"):
        a, b = posed(name, *size, layouts)
        assert verdict_of(a, b) == verdict_of(*posed(name, *size, ("row", "column")))
        assert (verdict_of(a, b) < UNFIT.value) == (name != "graded")
        assert_bounded(tritile.matmul(a, b, precision="fp16x3"), a, b)


def drawn(count):
    """Sizes at which calls that name no precision are made of parts, log-uniform."""
    draw = random.Random(20)
    while count:
        m, n = (round(512 * 16 ** draw.random()) for _ in "mn")
        k = round(256 * 128 ** draw.random())
        if suits(m, n, k):
            count -= 1
            yield m, n, k


@pytest.mark.parametrize("size", list(drawn(6)), ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["NN", "NT"])
@pytest.mark.parametrize("name", RANGES)
def test_what_runs_by_default_is_no_less_exact_than_torch(cuda_matmul, name, size, transposed):
    cuda_matmul.fp32_precision = "none"
    m, n, k = size
    a, b = RANGES[name](torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda"))
    b = b.mT.contiguous().mT if transposed else b
    assert tritile.plan(tritile.matmul, a, b).problem.precision == "fp16x3"
    exact = a.double() @ b.double()
    ours, torchs = ((x - exact).norm().item() for x in (tritile.matmul(a, b), torch.matmul(a, b)))
    assert ours <= 1.001 * torchs  # where few terms decide, both are rounded alike


CONFIGS = [
    tile(128, 64, 32, 8, 3),
    tile(32, 64, 64, 4, 4, group=1),
    tma(64, 64, 64, 4, 4),
    tma(128, 128, 64, 8, 4, persistent=True),
    tma(64, 64, 64, 4, 4, split=4),
    warpgroups(64, 64, 64, 1, 4),
    warpgroups(128, 192, 64, 2, 3, persistent=True, subtiles=2),
    warpgroups(192, 96, 64, 3, 4),
    warpgroups(128, 160, 64, 2, 4, persistent=True),
    warpgroups(192, 128, 64, 3, 3, persistent=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", ["normal", "uniform", "graded", "NaN"])
def test_every_family_makes_the_core_or_leaves_it(name, config):
    for size in ((256, 384, 2048), (201, 325, 1111)):
        a, b = posed(name, *size)
        out = torch.full(size[:2], float("nan"), device="cuda")
        call = matmul_call(a, b, out, "fp16x3")
        run = launched(call, config)
        assert_bounded(out, a, b)
        first = bytes_of(out)
        run(*call.tensors)
        assert torch.equal(bytes_of(out), first)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_errors_do_not_grow_with_k(config):
    """Simulated, 2.0e-7 at any K; 3.2e-7 where what rounding loses of totals is not carried on."""
    a, b = posed("uniform", 256, 384, 16384)
    out = torch.full((256, 384), float("nan"), device="cuda")
    launched(matmul_call(a, b, out, "fp16x3"), config)
    exact = product64(a, b)
    assert float((out - exact).norm() / exact.norm()) < 2.3e-7


def test_one_launch_serves_data_of_all_kinds_in_turn():
    """What a call leaves behind does not reach the next one, nor a replay of a graph."""
    a, b = torch.empty(128, 640, device="cuda"), torch.empty(640, 192, device="cuda")
    out = torch.empty(128, 192, device="cuda")
    tritile.matmul(a, b, out=out, precision="fp16x3")
    graph, _ = captured(lambda: tritile.matmul(a, b, out=out, precision="fp16x3"))
    for name in ("normal", "graded", "normal", "NaN", "uniform", "infinite", "relu", "one large", "normal"):
        for x, value in zip((a, b), posed(name, 128, 192, 640), strict=True):
            x.copy_(value)
        for run in (lambda: tritile.matmul(a, b, out=out, precision="fp16x3"), graph.replay):
            out.fill_(float("nan"))
            run()
            torch.cuda.synchronize()
            assert_bounded(out, a, b)


@pytest.mark.parametrize("name", ["normal", "graded", "NaN"])
def test_what_is_fused_follows_whichever_kernel(name):
    a, b = posed(name, 200, 240, 1000)
    residual = values((200, 240), torch.float32, 3, "cuda")
    got = tritile.addmm(residual, a, b, beta=0.5, alpha=-2.0, precision="fp16x3")
    wanted = 0.5 * residual.double() - 2.0 * product64(a, b)
    bound = 2 * error_bound(1000) * product64(a.abs(), b.abs()) + 4 * U * (wanted.abs() + residual.abs())
    assert bool((((got.double() - wanted).abs() <= bound) | wanted.isnan()).all())
    assert torch.equal(got.isnan(), wanted.isnan())
