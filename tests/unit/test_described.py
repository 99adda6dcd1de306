"""How calls are described: drawn shapes, layouts, lazy views and outputs, carried out by torch."""

import functools
import random

import pytest
import torch

import tritile
from tests.drawn import SUMMED, assert_into, laid, linear, product, sizes, weighted, whole, wide
from tests.executed import executed
from tests.reference import (
    COMPLEX,
    DTYPES,
    LAYOUTS,
    MATMUL_DTYPES,
    SIGN_BYTES,
    bytes_of,
    frame,
    guard_intact,
    name,
    placed,
    poison_empty,
    random_bits,
    same_bits,
)
from tritile.families import launching

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch):
    poison_empty(monkeypatch)
    monkeypatch.setattr(launching, "run_interpreted", executed)


CASES = [
    *((product, dtype, 5) for dtype in MATMUL_DTYPES),
    *((linear, dtype, 3) for dtype in SUMMED),
    *((weighted, dtype, 2) for dtype in SUMMED[:2]),
]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("made", "dtype", "times"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_products(made, dtype, times, seed):
    draw = random.Random(f"{made.__name__} {dtype} {seed}")
    for _ in range(times):
        made(draw, dtype)


@pytest.mark.parametrize("seed", range(10))
def test_scales(seed):
    draw = random.Random(seed)
    for _ in range(5):
        m, n, k = sizes(draw)
        a, b = laid(whole((m, k), torch.int8, draw), draw), laid(whole((k, n), torch.int8, draw), draw)
        scale_a, scale_b = (
            whole(draw.choice([(), shape]), torch.float32, draw) for shape in ((m, 1), (1, n))
        )
        wanted = wide(a) * scale_a @ (wide(b) * scale_b)
        run = functools.partial(tritile.scaled_matmul, a, b, scale_a, scale_b, out_dtype=torch.float32)
        assert_into(draw, run, wanted.float())


def lazily(raw, x, draw):
    """A lazy view of complex numbers, and its bits: sign bits turned over by hand."""
    raw = raw.clone()
    if draw.random() < 0.5:
        x = x.conj()
        raw[..., -1] ^= 128
    if draw.random() < 0.5:
        x = torch._neg_view(x)
        raw[..., -1] ^= 128
        raw[..., SIGN_BYTES[x.dtype] - 1] ^= 128
    return raw, x


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_permutations(dtype, seed):
    draw = random.Random(f"{dtype} {seed}")
    for _ in range(5):
        ndim = draw.randint(0, 6)
        shape = tuple(draw.choice([1, 2, 3, 4, 8] + [0] * (draw.random() < 0.1)) for _ in range(ndim))
        lies, dims = (draw.sample(range(ndim), ndim) for _ in range(2))
        raw, x = random_bits(shape, dtype, draw.randrange(1 << 16))
        raw = raw.permute(*lies, ndim)
        x = (placed(x, draw.choice(LAYOUTS)) if ndim > 1 else x).permute(lies)
        if dtype in COMPLEX:
            raw, x = lazily(raw, x, draw)
        got = tritile.permute(x, [dim - ndim * (draw.random() < 0.5) for dim in dims])
        assert got.is_contiguous()
        assert not got.is_conj()
        assert not got.is_neg()
        assert same_bits(got, raw.permute(*dims, ndim))
        if ndim > 1:
            one, other = draw.sample(range(ndim), 2)
            buffer, out = frame(tuple(raw.transpose(one, other).shape[:-1]), dtype, draw.choice(LAYOUTS))
            assert tritile.transpose(x, one - ndim, other, out=out) is out
            assert same_bits(out, raw.transpose(one, other))
            assert guard_intact(buffer, out)


@pytest.mark.parametrize("dtype", COMPLEX, ids=name)
def test_the_imaginary_part_of_a_conjugate(dtype):
    _, x = random_bits((13, 21), dtype)
    imaginary = x.conj().imag  # lazily negated, and strided: every second number in memory
    assert imaginary.is_neg()
    expected = torch.view_as_real(x)[..., 1].contiguous()
    expected.view(torch.uint8).view(13, 21, -1)[..., -1] ^= 128
    assert torch.equal(bytes_of(tritile.transpose(imaginary)), bytes_of(expected.mT))


def test_expanded_overlapping_and_shared_operands():
    windows = torch.arange(40.0).unfold(0, 8, 1)  # each row begins one element after the last
    b = torch.arange(40.0).view(8, 5)
    row, column = b[:1].expand(7, 5), b[:, :1].expand(8, 4)
    for left, right in ((windows, b), (b.mT, windows.mT), (row, b.mT), (b.mT, column), (b, b.mT)):
        assert torch.equal(tritile.matmul(left, right), left @ right)
        assert torch.equal(tritile.transpose(left), left.mT)


def test_in_place_inside_a_larger_tensor():
    buffer = torch.arange(4 * 40 * 3 * 50.0).view(4, 40, 3, 50)
    before, x = buffer.clone(), buffer[1:3, 2:35, :, 4:37]
    tritile.permute(x, (0, 3, 2, 1), out=x)
    assert torch.equal(x, before[1:3, 2:35, :, 4:37].transpose(1, 3))
    x.copy_(before[1:3, 2:35, :, 4:37])
    assert torch.equal(buffer, before)
