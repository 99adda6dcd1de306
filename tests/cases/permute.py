"""Permutations bit for bit: interpreted at small sizes, on a GPU at full ones."""

import math
import random

import pytest
import torch

import tritile
from tests.configs import boxed
from tests.launched import DEVICE, INTERPRETED
from tests.reference import (
    COMPLEX,
    DTYPES,
    LAYOUTS,
    SIGN_BYTES,
    frame,
    guard_intact,
    name,
    placed,
    random_bits,
    same_bits,
    words_of,
)
from tritile.core import device as devices
from tritile.core.device import target_device
from tritile.families import launching
from tritile.families.permute.boxes import box_of, shared
from tritile.families.space import illegal
from tritile.ops import permute as permute_op


def bits(shape, dtype, seed=0):
    """Random bits as bytes, and as a tensor of the dtype."""
    return random_bits(shape, dtype, seed, DEVICE)


def check(shape, dims, dtype, config, offsets=(0, 0)):
    """Permute by a config, from and to so many elements after the start of memory; nothing else is touched.

    The call's problem, or None where the config may not run it.
    """
    x_at, out_at = offsets
    raw, flat = bits((x_at + math.prod(shape),), dtype)
    x, wanted = flat[x_at:].view(shape), raw[x_at:].view(*shape, -1).permute(*dims, len(shape))
    _, buffer = bits((out_at + math.prod(shape) + 9,), dtype, seed=1)
    before, end = words_of(buffer).clone(), out_at + math.prod(shape)
    out = buffer[out_at:end].view(wanted.shape[:-1])
    call = permute_op.permute_call(x, out, dims)
    device = target_device("sm_90") if INTERPRETED else devices.gpu(0)
    if illegal(config, call.problem, device) is not None:
        return None
    if INTERPRETED:
        launching.run_interpreted(call, config)
    else:
        launching.prepare(call, config)(*call.tensors)
    assert same_bits(out, wanted)
    after = words_of(buffer)
    assert torch.equal(after[:out_at], before[:out_at])
    assert torch.equal(after[end:], before[end:])
    return call.problem


def ways(config, problem):
    """How the kernel of boxes goes about a problem."""
    box = box_of(config, problem)
    pieces = box.pieces
    found = {f"{problem.itemsize}-byte", f"read {box.read * problem.itemsize}"}
    found.add(f"write {pieces.lanes * problem.itemsize}")
    found.add("slanted" if pieces.more else "ends" if pieces.skewed else "whole")
    found.add("one piece" if pieces.number == 1 else "pieces")
    found.add("runs" if len(pieces.inner) > 1 else "run")
    found.add("shared" if shared(box) else "apart")
    if pieces.more:  # the row that is read beyond a box is in its runs in x, or begins one
        last = pieces.inner[-1]
        found.add("cut runs" if last in box.runs else "cut rows")
        if problem.shape[last] > 2 * box.sides[last]:  # first, inner and last ones
            found.add("three boxes a line")
    return found | {"split"} if box.jump else found


# Ways to permute by boxes: shape, order, dtype, config, and how the kernel goes about it.
WAYS = [
    ((131, 67), (1, 0), torch.uint8, boxed(1024, 64, 4, 1), "slanted, pieces, cut rows, three boxes a line"),
    ((131, 67), (1, 0), torch.bfloat16, boxed(256, 16, 4, 1), "slanted, pieces, split, three boxes a line"),
    ((130, 9, 7), (2, 1, 0), torch.uint8, boxed(512, 32, 1, 1), "slanted, pieces, split, read 1"),
    ((3, 640), (1, 0), torch.uint8, boxed(512, 64, 16, 1), "slanted, one piece, cut runs, read 16, write 16"),
    ((641, 5), (1, 0), torch.uint8, boxed(1024, 16, 2, 1), "slanted, pieces, run, cut runs, read 2, write 8"),
    ((641, 5), (1, 0), torch.bfloat16, boxed(512, 32, 16, 1), "slanted, 2-byte, three boxes a line"),
    ((85, 2, 10, 3), (2, 0, 1, 3), torch.uint8, boxed(512, 64, 16, 1), "slanted, one piece, runs, cut rows"),
    ((169, 2, 10, 3), (2, 0, 1, 3), torch.uint8, boxed(1024, 64, 4, 1), "slanted, pieces, runs, cut runs"),
    ((2, 9, 7, 83), (2, 1, 3, 0), torch.uint8, boxed(256, 16, 4, 1), "ends, one piece, runs"),
    ((2, 9, 7, 83), (2, 1, 3, 0), torch.uint8, boxed(512, 64, 16, 1), "ends, pieces, runs"),
    ((5, 301), (1, 0), torch.uint8, boxed(2048, 64, 16, 1), "ends, one piece, runs, write 16"),
    ((331, 5), (1, 0), torch.bfloat16, boxed(1024, 128, 16, 1), "slanted, run, three boxes a line, write 8"),
    ((64, 64), (1, 0), torch.uint8, boxed(1024, 64, 4, 1), "whole, one piece, runs, shared, split, write 8"),
    ((256, 64), (1, 0), torch.bfloat16, boxed(1024, 64, 4, 1), "whole, pieces, run, shared, split, write 16"),
    ((4, 300), (1, 0), torch.uint8, boxed(512, 64, 8, 1), "whole, one piece, shared, read 8, write 4"),
    ((131, 67), (1, 0), torch.float32, boxed(2048, 64, 16, 1), "whole, pieces, 4-byte, read 16"),
    ((37, 53), (1, 0), torch.float64, boxed(512, 16, 16, 1), "whole, pieces, 8-byte, read 16"),
    ((5, 9, 7, 21), (2, 1, 3, 0), torch.float64, boxed(512, 64, 8, 1), "whole, runs, 8-byte, read 8"),
]  # fmt: skip


def goes_as_said(case):
    """Run a case of `WAYS`, and check that the kernel goes about it as the case says."""
    *args, how = case
    problem = check(*args)
    assert problem is not None
    assert not set(how.split(", ")) - ways(args[-1], problem)


SHAPES = [(1, 1), (37, 53), (64, 16), (1, 19), (23, 1)]
FILLED = [torch.bool, torch.bfloat16, torch.float32, torch.complex128]
SQUARES = [1, 2, 63, 64, 65, 130]
LENGTHS = (1, 2, 3, 4, 5, 7)
if not INTERPRETED:
    SHAPES = [
        (1, 1), (1, 4099), (4099, 1), (3, 10007), (10007, 3), (64, 64), (2047, 2049), (4096, 8), (3, 129, 65),
        (300, 5, 7), (0, 5), (5, 0, 3),
    ]  # fmt: skip
    FILLED, SQUARES, LENGTHS = DTYPES, [1, 64, 2049], (1, 2, 3, 5, 8, 17, 33)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_every_dtype_bit_for_bit(dtype):
    for shape in SHAPES:
        raw, x = bits(shape, dtype)
        got = tritile.transpose(x)
        assert (got.dtype, got.shape, got.is_contiguous()) == (dtype, x.mT.shape, True)
        assert same_bits(got, raw.transpose(-3, -2)), shape


@pytest.mark.parametrize("dtype", FILLED, ids=name)
def test_only_out_is_filled(dtype):
    """Rows start on 16 bytes and end anywhere, or start anywhere, in x and in out."""
    for m, n in [(19, 33)] if INTERPRETED else [(129, 131), (3, 7), (130, 134)]:
        for batch, dims in (((), (1, 0)), ((3,), (2, 0, 1))):
            raw, x = bits((*batch, m, n), dtype)
            for layout in ("row", "padded", "column_padded", "column_sliced", "sliced", "sparse", "offset"):
                buffer, out = frame(tuple(x.shape[i] for i in dims), dtype, layout, DEVICE)
                for _ in range(2):  # the second call takes the fast path
                    assert tritile.permute(placed(x, "padded"), dims, out=out) is out
                    assert same_bits(out, raw.permute(*dims, x.ndim))
                    assert guard_intact(buffer, out), (m, n, dims, layout)


@pytest.mark.parametrize("dtype", COMPLEX, ids=name)
def test_lazy_conjugation_and_negation(dtype):
    """The sign bits of imaginary parts turned over, of both parts, of real ones."""
    raw, x = bits((13, 21) if INTERPRETED else (130, 70), dtype)
    conjugated, negated, reals = (raw.clone() for _ in range(3))
    conjugated[..., -1] ^= 128
    negated[..., [-1, SIGN_BYTES[dtype] - 1]] ^= 128
    reals[..., SIGN_BYTES[dtype] - 1] ^= 128
    cases = [(x, raw), (x.conj(), conjugated), (torch._neg_view(x), negated)]
    cases += [(torch._neg_view(x.conj()), reals), *cases[1::-1]]
    for _ in range(2):  # the second time over the fast path
        for lazy, expected in cases:
            got = tritile.transpose(lazy)
            assert not got.is_conj()
            assert not got.is_neg()
            assert same_bits(got, expected.transpose(0, 1))
            assert same_bits(tritile.transpose(lazy.mT), expected)


@pytest.mark.parametrize("seed", range(40))
def test_any_permutation_of_any_permuted_view(seed):
    draw = random.Random(seed)
    shape = tuple(draw.choice(LENGTHS) for _ in range(draw.randint(2, 5)))
    axes, dtype = range(len(shape)), draw.choice(DTYPES)
    dims, lies = (draw.sample(axes, len(shape)) for _ in range(2))
    raw, x = bits(shape, dtype, seed)
    x = placed(x, draw.choice(LAYOUTS)).permute(*lies)
    expected = raw.permute(*lies, len(shape)).permute(*dims, len(shape))
    assert same_bits(tritile.permute(x, dims), expected)


@pytest.mark.parametrize("size", SQUARES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128], ids=name)
def test_square_matrices_in_place(dtype, size):
    raw, x = bits((2, size, size), dtype)
    raw = raw.clone()
    for turns in range(3):
        assert tritile.transpose(x, out=x) is x
        assert same_bits(x, raw.transpose(1, 2) if turns % 2 == 0 else raw)
    other = torch.empty_like(x)
    assert same_bits(tritile.transpose(x, out=other), raw)  # what was prepared in place is not taken for this
    assert same_bits(tritile.contiguous(x.mT), raw)
