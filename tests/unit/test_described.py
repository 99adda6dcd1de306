"""How calls are described: drawn shapes, layouts, lazy views and outputs, carried out by torch.

Numbers are small and whole, so that every order of sums gives the same bits.
"""

import functools
import random

import pytest
import torch

import tritile
from tests.executed import executed
from tests.reference import (
    COMPLEX,
    DEFAULT_OUT,
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
from tritile.runtime import launch

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
SUMMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch):
    poison_empty(monkeypatch)
    monkeypatch.setattr(launch, "run_interpreted", executed)


def whole(shape, dtype, draw):
    """Small whole numbers."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def laid(x, draw):
    """The same numbers in any layout, and lazily negated."""
    negates = x.dtype in SUMMED and draw.random() < 0.2
    x = -x if negates else x
    x = placed(x, draw.choice(LAYOUTS)) if x.ndim > 1 else x
    if x.ndim > 3 and draw.random() < 0.5:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return torch._neg_view(x) if negates else x


def factors(draw, batch, mnk, dtype):
    """Two operands of a product, of which each may be a vector."""
    m, n, k = mnk
    vectors = [draw.random() < 0.2 for _ in range(2)]
    return [
        laid(whole((k,), dtype, draw), draw) if vector else operand(draw, batch, shape, dtype)
        for vector, shape in zip(vectors, ((m, k), (k, n)), strict=True)
    ]


def operand(draw, batch, shape, dtype):
    """An operand with some of the batch dimensions, of which some are 1 or expanded."""
    own = [size if draw.random() < 0.7 else 1 for size in batch][draw.randint(0, len(batch)) :]
    x = laid(whole((*own, *shape), dtype, draw), draw)
    return x.expand(*batch, *shape) if own and draw.random() < 0.3 else x


def wide(x):
    return x.resolve_neg().double()


def assert_into(draw, run, wanted):
    """A fresh result, and one in memory that is given, are as wanted, and nothing around it is written."""
    fresh = run()
    assert fresh.is_contiguous()
    assert torch.equal(fresh, wanted)
    if wanted.ndim > 1:
        buffer, out = frame(tuple(wanted.shape), wanted.dtype, draw.choice(LAYOUTS))
    else:
        buffer, view = frame((1, *wanted.shape, 1), wanted.dtype, "sparse")
        out = view[0, ..., 0]
    version = out._version
    assert run(out=out) is out
    assert out._version > version or not out.numel()
    assert torch.equal(out, wanted)
    assert guard_intact(buffer, out)


def sizes(draw):
    return tuple(draw.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(3))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", MATMUL_DTYPES, ids=name)
def test_products(dtype, seed):
    draw = random.Random(f"{dtype} {seed}")
    for _ in range(5):
        batch = [draw.choice([0, 1, 2, 2, 3]) for _ in range(draw.randint(0, 3))]
        a, b = factors(draw, batch, sizes(draw), dtype)
        wanted = torch.matmul(wide(a), wide(b)).to(DEFAULT_OUT.get(dtype, dtype))
        assert_into(draw, functools.partial(tritile.matmul, a, b), wanted)


def spread(draw, shape, dtype):
    """A tensor that broadcasts to a result."""
    own = [size if draw.random() < 0.6 else 1 for size in shape][draw.randint(0, len(shape)) :]
    return laid(whole(own, dtype, draw), draw)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", SUMMED, ids=name)
def test_products_with_an_epilogue(dtype, seed):
    draw = random.Random(f"{dtype} {seed}")
    for _ in range(3):
        m, n, k = sizes(draw)
        batch = [draw.choice([1, 2, 3]) for _ in range(draw.randint(0, 2))]
        x, up = operand(draw, batch, (m, k), dtype), laid(whole((n, k), dtype, draw), draw)
        weight = laid(whole((k,) if draw.random() < 0.2 else (n, k), dtype, draw), draw)
        sums = torch.nn.functional.linear(wide(x), wide(weight))
        added = dtype if dtype == torch.float64 else draw.choice(SUMMED[:1] + SUMMED[2:])
        bias, residual = (spread(draw, sums.shape, added) for _ in range(2))
        how = draw.choice([None, "relu"])
        active = torch.relu if how else lambda y: y
        wanted = (active(sums + wide(bias)) + wide(residual)).to(dtype)
        run = functools.partial(tritile.linear, x, weight, bias, activation=how)
        assert_into(draw, functools.partial(run, residual=residual), wanted)
        if added == dtype and wanted.ndim > 1:  # the result may take the place of what is added
            place = placed(torch.ones_like(wanted), draw.choice(LAYOUTS))
            assert run(residual=place, out=place) is place
            assert torch.equal(place, (active(sums + wide(bias)) + 1).to(dtype))
        if weight.ndim == 2:
            gate = active(torch.nn.functional.linear(wide(x), wide(up)))
            run = functools.partial(tritile.gated_linear, x, up, weight, activation=how, bias_up=bias)
            assert_into(draw, run, (gate * (sums + wide(bias))).to(dtype))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_weighted_sums(dtype, rank, seed):
    draw = random.Random(f"{dtype} {seed} {rank}")
    m, n, k = sizes(draw)
    batch = (draw.choice([1, 3]),) if rank == 3 else ()
    a, b = (laid(whole((*batch, *shape), dtype, draw), draw) for shape in ((m, k), (k, n)))
    added = spread(draw, (*batch, m, n), dtype)
    alpha, beta = draw.choice([1, 2, -3]), draw.choice([0, 1, 2])
    if beta == 0:
        added = torch.full_like(added, torch.nan)  # not read
    wanted = alpha * (wide(a) @ wide(b)) + (beta * wide(added) if beta else 0)
    op = tritile.addmm if rank == 2 else tritile.baddbmm
    assert_into(draw, functools.partial(op, added, a, b, alpha=alpha, beta=beta), wanted.to(dtype))
    place = placed(torch.ones_like(wanted, dtype=dtype), draw.choice(LAYOUTS))
    assert op(place, a, b, alpha=alpha, beta=3, out=place) is place
    assert torch.equal(place, (alpha * (wide(a) @ wide(b)) + 3).to(dtype))


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
