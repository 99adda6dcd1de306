"""The check of a tuned kernel's output: honest rounding passes in every dtype, gross errors do not."""

import math

import pytest
import torch

from tests.reference import FLOATS, FP8, name, product64
from tritile.errors import TuningError
from tritile.tuner.measure.outputs import allowed_error, error_of

REALS = (*FLOATS, *FP8)
reals = pytest.mark.parametrize("dtype", REALS, ids=name)
SHAPES = [(), (1,), (37,), (1, 300), (300, 1), (5, 3), (3, 4, 50)]


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def passes(got, wanted, tolerance=None):
    return error_of("out", got, wanted, tolerance)


def fails(got, wanted, reason="wrong answer", tolerance=None):
    with pytest.raises(TuningError, match=reason):
        error_of("out", got, wanted, tolerance)


def one_by_one(a, b):
    """Return a @ b in float32 whose terms are added one after the other."""
    sums = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        sums.addcmul_(a[:, k : k + 1], b[k : k + 1])
    return sums


@reals
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zeros_and_other_gross_errors_fail(dtype, shape):
    wanted = (torch.rand(shape) + 0.5).to(dtype)
    assert passes(wanted.clone(), wanted) == 0.0
    wide = wanted.double()
    for wrong in (0 * wide, 2 * wide, 0.5 * wide, -wide, math.nan * wide, 7 * wide):
        fails(wrong.to(dtype), wanted)


@reals
@pytest.mark.parametrize("far", [0.0, 0.5, 7.0], ids=["zeros", "halved", "seven times"])
def test_wrong_row_among_larger_ones(dtype, far):
    large = {torch.float8_e4m3fn: 64.0, torch.float8_e5m2: 1000.0, torch.float16: 1000.0}.get(dtype, 1e4)
    wanted = torch.randn(40, 60).clamp(-3, 3) * large
    wanted[11] /= large
    got = wanted.clone()
    got[11] *= far
    got, wanted = got.to(dtype), wanted.to(dtype)
    fails(got, wanted, r"out\[11, \d+\] is ")
    fails(got.mT, wanted.mT, r"out\[\d+, 11\] is ")
    fails(got.unflatten(0, (2, 20)), wanted.unflatten(0, (2, 20)), r"out\[0, 11, \d+\] is ")


def plain():
    return torch.randn(40, 4096), torch.randn(4096, 40)


def few():
    return torch.randn(5, 16384), torch.randn(16384, 3)


def of_all_sizes():
    a, b = torch.randn(64, 1024), torch.randn(1024, 64)
    a[:20] *= 1e-3
    a[20:25] *= 1e3
    b[:, :5] *= 100
    b[:, 5:9] *= 1e-3
    return a, b


def that_cancel():
    """Two rows whose errors are large next to their own sizes."""
    flat, centered = torch.randn(64, 4096), torch.randn(4096, 64)
    centered -= centered.double().mean(0).float()
    flat[3], flat[7] = 1.7, -0.3
    return flat, centered


@pytest.mark.parametrize("operands", [plain, few, of_all_sizes, that_cancel])
def test_sums_in_any_order_pass(operands):
    a, b = operands()
    sums, wanted = one_by_one(a, b), product64(a, b)
    assert 0 < passes(sums, wanted) <= allowed_error(torch.float32)
    narrow = () if operands is of_all_sizes else (torch.float16, *FP8)  # whose range they leave
    for dtype in (torch.bfloat16, *narrow):
        passes(sums.to(dtype), wanted)
        passes(sums.to(dtype).mT, wanted.mT)  # strided
    passes(sum(a.double()[:, i::7] @ b.double()[i::7] for i in range(7)), wanted)


def test_tf32_is_no_rounding_of_float32():
    a, b = torch.randn(40, 256), torch.randn(256, 40)
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    fails(product64(*cut).float(), product64(a, b))
    passes(product64(*cut).float(), product64(a, b), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_attention_weights_may_be_rounded(dtype):
    q, k, v = (torch.randn(256, 64) for _ in range(3))
    v[:, 3] *= 100
    q, k, v = (x.to(dtype).double() for x in (q, k, v))
    scores = q @ k.mT / 8
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = weights.to(dtype).double() @ v / weights.sum(-1, keepdim=True)
    assert passes(rounded.to(dtype), scores.softmax(-1) @ v) > 0


@pytest.mark.parametrize("dtype", FP8, ids=name)
def test_fp8_neighbours_pass(dtype):
    numbers = torch.arange(1, 0x70, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite() & (numbers >= torch.finfo(dtype).smallest_normal)]
    for low, middle, high in zip(numbers, numbers[1:], numbers[2:], strict=False):
        passes(high.to(dtype), middle.to(dtype))
        passes(middle.to(dtype), high.to(dtype))
        fails(high.to(dtype), low.to(dtype))
    tiny = torch.arange(9, dtype=torch.uint8).view(dtype)  # subnormals: all one step apart
    passes(tiny[1:], tiny[:-1])
    fails(tiny[2:].clone(), tiny[:-2])


def test_whole_numbers_and_booleans_are_exact():
    for dtype in (torch.int8, torch.uint16, torch.int32, torch.uint64):
        wanted = torch.arange(100).reshape(10, 10).to(dtype)
        assert passes(wanted.clone(), wanted) == 0.0
        got = wanted.clone()
        got[4, 5] = 46
        fails(got, wanted, r"out\[4, 5\] is 46, and 45 is right")
        passes(got, wanted, tolerance=0.1)
    for wanted in (torch.tensor(True), torch.tensor([True, False])):
        assert passes(wanted.clone(), wanted) == 0.0
        fails(~wanted, wanted)


def test_infinities_and_nans_in_place():
    wanted = torch.randn(20, 30)
    wanted[0, 0], wanted[1, 1], wanted[2] = math.inf, math.nan, -math.inf
    assert passes(wanted.clone(), wanted) == 0.0
    passes(wanted * (1 + 1e-6), wanted)
    for i, j, wrong in ((0, 0, -math.inf), (0, 0, 1.0), (1, 1, 0.0), (2, 4, math.nan), (5, 5, math.inf)):
        got = wanted.clone()
        got[i, j] = wrong
        fails(got, wanted, rf"out\[{i}, {j}\].*relative error inf")


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_squares_of_large_and_small(size):
    wanted = size * torch.randn(20, 30, dtype=torch.float64)
    assert passes(wanted * (1 + 1e-15), wanted) > 0
    fails(wanted * (1 + 1e-9), wanted)
    fails(0 * wanted, wanted)


def test_all_zero_passes_smallest_sums():
    for dtype in REALS:
        zeros = torch.zeros(20, 30, dtype=dtype)
        assert passes(zeros.clone(), zeros) == 0.0
        fails((zeros.double() + 0.05).to(dtype), zeros)
    passes(torch.full((20, 30), 1e-7), torch.zeros(20, 30))
    assert passes(torch.empty(0, 3), torch.empty(0, 3)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_tolerance_of_element_or_typical(dtype):
    wanted = torch.full((20, 30), 8.0, dtype=dtype)
    wanted[3, 4] = 0.0
    got = wanted.clone()
    got[3, 4], got[5, 6] = 0.25, 9.0
    assert passes(got, wanted, 0.125) == pytest.approx(0.125, rel=1e-2)
    fails(got, wanted, r"out\[5, 6\] is 9, and 8 is right: relative error 0.125, above tolerance=0.1", 0.1)
    fails(got, wanted, r"out\[3, 4\] is 0.25, and 0 is right.*above tolerance=0.01", 0.01)
    passes(wanted.clone(), wanted, 0.0)
