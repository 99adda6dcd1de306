"""float32 products of float16 parts on a GPU: errors of every kind of data, and each kernel of the call."""

import itertools
import random

import pytest
import torch

import tritile
from tests.cases.fp16x3 import *  # noqa: F403
from tests.cases.fp16x3 import Divided, posed
from tests.launched import captured
from tests.simulated import DATA, assert_bounded
from tritile.families.common.fallback import EXTREME, UNFIT
from tritile.families.fp16x3.lowering import suits_fp16x3

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
EXTREMES = ("NaN", "infinite", "huge", "denormal")
UNSUITED = ("wide", "graded", "one large", "far out", "one small")
RANGES = {name: DATA[name] for name in ("normal", "uniform", "log-normal", "cancelling", "graded")} | {
    "badly ranged": lambda a, b: (a * (8 * torch.randn_like(a)).exp(), b * (8 * torch.randn_like(b)).exp())
}
FIT = tuple(name for name in DATA if name not in (*EXTREMES, *UNSUITED))


@pytest.mark.parametrize("size", [(131, 259, 300), (131, 259, 1009), (64, 128, 16384)], ids=str)
@pytest.mark.parametrize("name", DATA)
def test_answers_and_verdicts_of_data(name, size):
    a, b = posed(name, *size)
    assert_bounded(tritile.matmul(a, b, precision="fp16x3"), a, b)
    verdict = Divided(a, b).verdict
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
        assert Divided(a, b).verdict == Divided(*posed(name, *size, ("row", "column"))).verdict
        assert (Divided(a, b).verdict < UNFIT.value) == (name != "graded")
        assert_bounded(tritile.matmul(a, b, precision="fp16x3"), a, b)


def drawn(count):
    """Sizes that suit fp16 parts, log-uniform."""
    draw = random.Random(20)
    while count:
        m, n = (round(512 * 16 ** draw.random()) for _ in "mn")
        k = round(256 * 128 ** draw.random())
        if suits_fp16x3(m, n, k):
            count -= 1
            yield m, n, k


@pytest.mark.parametrize("size", list(drawn(6)), ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["NN", "NT"])
@pytest.mark.parametrize("name", RANGES)
def test_mode_makes_parts_exact(cuda_matmul, name, size, transposed):
    """By their errors as shares of what was summed, so that no few elements decide."""
    cuda_matmul.fp32_precision = "none"
    m, n, k = size
    torch.manual_seed(20)
    a, b = RANGES[name](torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda"))
    b = b.mT.contiguous().mT if transposed else b
    exact, summed = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert tritile.plan(tritile.matmul, a, b).problem.precision == "ieee"
    with tritile.mode(fp32="fp16x3"):
        assert tritile.plan(tritile.matmul, a, b).problem.precision == "fp16x3"
        ours = ((tritile.matmul(a, b) - exact) / summed).norm().item()
    torchs = ((torch.matmul(a, b) - exact) / summed).norm().item()
    assert ours <= 1.001 * torchs  # where few terms decide, both are rounded alike


def test_one_launch_all_data():
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
