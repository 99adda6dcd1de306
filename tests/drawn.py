"""Drawn calls: shapes, layouts, lazy views and outputs.

Numbers are small and whole, so that every order of sums gives the same bits.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F

import tritile
from tests.reference import DEFAULT_OUT, LAYOUTS, frame, guard_intact, placed

SUMMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def whole(shape, dtype, draw):
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    if not dtype.is_complex:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    return torch.complex(*torch.randint(-2, 3, (2, *shape), generator=generator).double()).to(dtype)


def laid(x, draw):
    """The same numbers in any layout, and lazily negated or conjugated."""
    conjugates = x.is_complex() and draw.random() < 0.3
    negates = (x.is_complex() or x.dtype in SUMMED) and draw.random() < 0.2
    x = x.conj().resolve_conj() if conjugates else x
    x = -x if negates else x
    x = placed(x, draw.choice(LAYOUTS)) if x.ndim > 1 else x
    if x.ndim > 3 and draw.random() < 0.5:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x = x.conj() if conjugates else x
    return torch._neg_view(x) if negates else x


def operand(draw, batch, shape, dtype):
    """An operand with some of the batch dimensions, of which some are 1 or expanded."""
    own = [size if draw.random() < 0.7 else 1 for size in batch][draw.randint(0, len(batch)) :]
    x = laid(whole((*own, *shape), dtype, draw), draw)
    return x.expand(*batch, *shape) if own and draw.random() < 0.3 else x


def factors(draw, batch, mnk, dtype):
    """Two operands of a product, of which each may be a vector."""
    m, n, k = mnk
    return [
        laid(whole((k,), dtype, draw), draw) if draw.random() < 0.2 else operand(draw, batch, shape, dtype)
        for shape in ((m, k), (k, n))
    ]


def spread(draw, shape, dtype):
    """A tensor that broadcasts to a result."""
    own = [size if draw.random() < 0.6 else 1 for size in shape][draw.randint(0, len(shape)) :]
    return laid(whole(own, dtype, draw), draw)


def wide(x):
    return x.resolve_conj().resolve_neg().to(torch.complex128 if x.is_complex() else torch.float64)


def sizes(draw):
    return tuple(draw.choice([0, 1, 1, 2, 3, 5, 8]) for _ in range(3))


def assert_into(draw, call, wanted, again=None):
    """A fresh result and one in memory that is given are as wanted, and nothing around it is written.

    Once more inside the context that `again` makes.
    """
    if wanted.ndim > 1:
        buffer, out = frame(tuple(wanted.shape), wanted.dtype, draw.choice(LAYOUTS))
    else:
        buffer, view = frame((1, *wanted.shape, 1), wanted.dtype, "sparse")
        out = view[0, ..., 0]
    for context in (contextlib.nullcontext, *([again] if again else [])):
        with context():
            fresh = call()
            assert (fresh.is_contiguous(), fresh.is_conj(), fresh.is_neg()) == (True, False, False)
            assert torch.equal(fresh, wanted)
            version, strides = out._version, out.stride()
            assert call(out=out) is out
            assert out.stride() == strides
            assert out._version > version or not out.numel()
            assert torch.equal(out, wanted)
            assert guard_intact(buffer, out)


def product(draw, dtype, again=None):
    batch = [draw.choice([0, 1, 2, 2, 3]) for _ in range(draw.randint(0, 3))]
    a, b = factors(draw, batch, sizes(draw), dtype)
    wanted = torch.matmul(wide(a), wide(b)).to(DEFAULT_OUT.get(dtype, dtype))
    assert_into(draw, functools.partial(tritile.matmul, a, b), wanted, again)


def linear(draw, dtype, again=None):
    """Of any bias and residual, gated too, and into the place of the residual."""
    m, n, k = sizes(draw)
    batch = [draw.choice([1, 2, 3]) for _ in range(draw.randint(0, 2))]
    x, up = operand(draw, batch, (m, k), dtype), laid(whole((n, k), dtype, draw), draw)
    weight = laid(whole((k,) if draw.random() < 0.2 else (n, k), dtype, draw), draw)
    added = draw.choice([torch.float32, torch.float16, torch.bfloat16]) if dtype.itemsize < 8 else dtype
    how = None if dtype.is_complex else draw.choice([None, "relu"])
    active = torch.relu if how else lambda y: y
    sums, bias, given = F.linear(wide(x), wide(weight)), None, {}
    if draw.random() < 0.8:
        bias = spread(draw, sums.shape, added)
        sums = sums + wide(bias)
    call = functools.partial(tritile.linear, x, weight, bias, activation=how)
    if draw.random() < 0.8:
        given["residual"] = spread(draw, sums.shape, added)
    wanted = active(sums) + (wide(given["residual"]) if given else 0)
    assert_into(draw, functools.partial(call, **given), wanted.to(dtype), again)
    if added == dtype and wanted.ndim > 1:
        place = placed(torch.ones_like(wanted, dtype=dtype), draw.choice(LAYOUTS))
        assert call(residual=place, out=place) is place
        assert torch.equal(place, (active(sums) + 1).to(dtype))
    if weight.ndim == 2 and not dtype.is_complex:
        gate = active(F.linear(wide(x), wide(up)))
        call = functools.partial(tritile.gated_linear, x, up, weight, activation=how, bias_up=bias)
        assert_into(draw, call, (gate * sums).to(dtype), again)


def weighted(draw, dtype, again=None):
    """addmm and baddbmm, also into the place of what is added."""
    (m, n, k), rank = sizes(draw), draw.choice([2, 3])
    batch = (draw.choice([1, 3]),) if rank == 3 else ()
    a, b = (laid(whole((*batch, *shape), dtype, draw), draw) for shape in ((m, k), (k, n)))
    added, op = spread(draw, (*batch, m, n), dtype), tritile.addmm if rank == 2 else tritile.baddbmm
    alphas, betas = ([1, 2 + 1j, -3j, 0], [0, 1, 2 - 4j]) if dtype.is_complex else ([1, 2, -3], [0, 1, 2])
    alpha, beta = draw.choice(alphas), draw.choice(betas)
    if beta == 0:
        added = torch.full_like(added, torch.nan)  # not read
    sums = wide(a) @ wide(b)
    wanted = (alpha * sums + (beta * wide(added) if beta else 0)).to(dtype)
    call = functools.partial(op, added, a, b, alpha=alpha, beta=beta)
    assert_into(draw, call, wanted, again if alpha and k else None)
    place = placed(torch.ones_like(wanted), draw.choice(LAYOUTS))
    assert op(place, a, b, alpha=2, beta=3, out=place) is place
    assert torch.equal(place, (2 * sums + 3).to(dtype))
