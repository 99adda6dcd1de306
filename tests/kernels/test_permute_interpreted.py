"""Permutations, interpreted, bit for bit: operations of every dtype, shape and layout, and every kernel."""

import math
import random
from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

import tritile
from tests.cases.permute import *  # noqa: F403
from tests.cases.permute import WAYS, check, goes_as_said
from tests.configs import boxed, turned
from tests.reference import bytes_of, frame, guard_intact, name, random_bits, same_bits, values
from tritile.core.device import TARGETS
from tritile.errors import TuningError
from tritile.families import launching
from tritile.families.common import grids
from tritile.families.permute.family import in_place
from tritile.families.space import illegal
from tritile.families.work import pieces_of, work_of
from tritile.ops import permute as permute_op
from tritile.ops import request as ops_request

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def test_out_and_input_may_interleave():
    buffer = values((9, 24), torch.float32)
    before = buffer.clone()
    tritile.transpose(buffer[:, :9], out=buffer[:, 10:19])
    assert torch.equal(buffer[:, 10:19], before[:, :9].mT)
    buffer[:, 10:19] = before[:, 10:19]
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.complex64], ids=name)
def test_adjacent_elements_move_as_words(offset, dtype):
    for inner in (2, 4, 6, 8, 32):
        raw, flat = random_bits((offset + 5 * 7 * inner,), dtype)
        x, bits = flat[offset:].view(5, 7, inner), raw[offset:].view(5, 7, inner, -1)
        assert same_bits(tritile.transpose(x, 0, 1), bits.transpose(0, 1))
        wide = permute_op.permute_call(x, torch.empty(7, 5, inner, dtype=dtype), [1, 0, 2]).problem.itemsize
        fits = dtype.itemsize < 8 and not offset % 2 and inner * dtype.itemsize <= 64
        assert (wide > dtype.itemsize) == fits


def test_contiguous_returns_itself():
    x = values((5, 6, 7), torch.float32)
    assert tritile.contiguous(x) is x
    for view in (x[:, ::2], x.mT, x[:1].expand(4, 6, 7), x[:, :, 3]):
        got = tritile.contiguous(view)
        assert got.is_contiguous()
        assert torch.equal(got, view)
    conjugate = values((3, 4), torch.complex64).conj()
    assert torch.equal(bytes_of(tritile.contiguous(conjugate)), bytes_of(conjugate.resolve_conj()))
    vector, leaf = values((7,), torch.float32), torch.zeros(3, 4, requires_grad=True)
    assert tritile.permute(vector, (0,)).data_ptr() != vector.data_ptr()
    assert tritile.contiguous(leaf) is leaf
    tritile.contiguous(leaf.mT)[1].sum().backward()
    assert torch.equal(leaf.grad, torch.eye(4)[1].expand(3, 4))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.complex128], ids=name)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_large_batches_are_split(monkeypatch, dtype, most):
    raw, flat = random_bits((3 + 5 * 80 * 70,), dtype)
    x, bits = flat[3:].view(5, 80, 70), raw[3:].view(5, 80, 70, -1)
    out = torch.empty(5, 70, 80, dtype=dtype)
    call = permute_op.permute_call(x, out, [0, 2, 1])
    assert call.batch_shape == (5,)
    config = turned(128, 128)
    monkeypatch.setattr("tritile.families.work._MAX_PROGRAMS", most)
    pieces = [piece for piece, _ in pieces_of(call, config, TARGETS["nvidia-h200"])]
    assert (len(pieces) > 1) == (most < 5)
    for piece in pieces:
        launching.run_interpreted(piece, config)
    assert same_bits(out, bits.transpose(1, 2))


def test_in_place_splits_the_rest(monkeypatch):
    """Dimensions that change places are never split."""
    buffer = values((2, 3, 40), torch.float32)
    x, before = buffer[:, :2], buffer[:, :2].clone()
    call = permute_op.permute_call(x, x, [1, 0, 2])
    monkeypatch.setattr("tritile.families.work._MAX_PROGRAMS", 8)
    for piece, _ in pieces_of(call, in_place(call.problem), TARGETS["nvidia-h200"]):
        launching.run_interpreted(piece, in_place(call.problem))
    assert torch.equal(x, before.transpose(0, 1))
    square = torch.zeros(200, 200)
    call = permute_op.permute_call(square, square, [1, 0])
    with pytest.raises(TuningError, match="more programs than a launch counts"):
        pieces_of(call, in_place(call.problem), TARGETS["nvidia-h200"])


def test_in_place_is_never_measured(monkeypatch):
    monkeypatch.setattr("tritile.tune.now.tuned_now", None)
    x = values((70, 70), torch.float32)
    before = x.clone()
    for mode in ("tune", "strict", "off"):
        with tritile.mode(mode):
            tritile.transpose(x, out=x)
    assert torch.equal(x, before.mT)
    call = permute_op.permute_call(x, x, [1, 0])
    assert ops_request.fixed(call) == in_place(call.problem)
    assert ops_request.fixed(permute_op.permute_call(x, before, [1, 0])) is None
    for device in (None, TARGETS["nvidia-h200"]):
        assert tritile.plan(tritile.transpose, x, out=x, device=device).config == ops_request.fixed(call)


@pytest.mark.parametrize(("dtype", "wide"), [(torch.complex64, False), (torch.complex128, True)], ids=str)
def test_words_of_in_place_transpose(dtype, wide):
    """An element of 16 bytes is two of them."""
    x = torch.empty_strided((2, 2), (3 << 29, 1), dtype=dtype, device="meta")
    call = replace(permute_op.permute_call(x, x, [1, 0]), in_place=True)
    (step,) = work_of(call, in_place(call.problem), 1, False).steps
    assert step.args["WIDE"] is wide


# Kernels by configs of one's own.

BLOCKS = [(1, 512, 1), (512, 1, 8), (16, 32, 1), (32, 16, 32), (4, 256, 8), (32, 64, 8)]


def tile(block_m, block_n, group=1):
    return turned(block_m, block_n, group=group)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128], ids=name)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_configs_of_tiles(dtype, blocks):
    assert check((2, 19, 37), (0, 2, 1), dtype, tile(*blocks))


@pytest.mark.parametrize("case", WAYS, ids=lambda case: case[-1])
def test_boxes_go_each_way(case):
    goes_as_said(case)


OFFSETS = [(1, 0), (2, 3), (9, 5)]


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_nothing_around_out_is_touched(offsets):
    assert check((2, 41, 39), (0, 2, 1), torch.uint8, tile(32, 32), offsets)
    ways = WAYS[OFFSETS.index(offsets) :: len(OFFSETS)]
    ran = [check(*case[:4], offsets) for case in ways]
    assert sum(problem is not None for problem in ran) >= len(ways) - 1  # an odd address may need more room


# Around words of 4 bytes and around boxes, which overlap where sides are no multiples.
AROUND = [*range(3, 14), 31, 32, 33, 34, 35, 64, 65]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=name)
@pytest.mark.parametrize("other", [2, 3, 5, 33])
def test_boxes_of_sides_around_words(dtype, other):
    found = [check((m, other), (1, 0), dtype, boxed(256, 16, 4, 1)) for m in AROUND]
    assert sum(map(bool, found)) >= len(AROUND) - 3
    found = [check((other, n), (1, 0), dtype, boxed(256, 16, 4, 1)) for n in AROUND]
    assert sum(map(bool, found)) >= len(AROUND) - 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=name)
def test_indices_of_64_bits(monkeypatch, dtype):
    monkeypatch.setattr(grids, "WIDE_FROM", 0)
    for shape, dims in (((3, 45, 37), (0, 2, 1)), ((9, 5, 7, 4), (3, 1, 2, 0))):
        assert check(shape, dims, dtype, tile(16, 16))
    for shape, dims, own, config, _ in WAYS:
        if own == dtype or (own.itemsize > 2 and dtype == torch.bfloat16):
            assert check(shape, dims, own, config)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (tile(16, 16), (2, 45, 37)),
        (boxed(256, 16, 4, 1), (3, 70, 9)),
        (boxed(512, 32, 8, 1), (2, 22, 37)),
        (boxed(1024, 64, 8, 1), (3, 9, 70)),
    ],
    ids=str,
)
def test_rows_of_out_apart_and_negated(config, shape):
    def run(x, bits, out):
        call = permute_op.permute_call(x, out, [0, 2, 1])
        assert illegal(config, call.problem, TARGETS["nvidia-h200"]) is None
        launching.run_interpreted(call, config)
        assert same_bits(out, bits.permute(0, 2, 1, 3))

    for dtype in (torch.uint8, torch.float16, torch.complex64):
        raw, x = (each.clone() for each in random_bits(shape, dtype))
        for layout in ("row", "padded", "sliced", "sparse"):
            buffer, out = frame((shape[0], shape[2], shape[1]), dtype, layout)
            run(x, raw, out)
            assert guard_intact(buffer, out)
        if dtype != torch.uint8:
            raw[..., -1] ^= 128  # the sign of the last, or of an imaginary part
            lazy = x.conj() if dtype.is_complex else torch._neg_view(x)
            run(lazy, raw, torch.empty(out.shape, dtype=dtype))


CONFIGS = [
    boxed(block, run, read, 1)
    for block, run, read in (
        (256, 16, 4),
        (256, 64, 1),
        (512, 32, 16),
        (1024, 64, 4),
        (1024, 16, 8),
        (2048, 128, 2),
    )
]


@pytest.mark.parametrize("seed", range(16))
def test_any_permutation_by_boxes(seed):
    draw = random.Random(seed)
    shape = draw.choices([1, 2, 3, 4, 5, 9, 17, 40, 130], k=draw.randint(2, 4))
    while math.prod(shape) > 20000:
        shape.remove(max(shape))
    dtype = draw.choice([torch.uint8, torch.float16, torch.float32, torch.int64])
    dims, offsets = draw.sample(range(len(shape)), len(shape)), (draw.randint(0, 3), draw.randint(0, 3))
    for config in draw.sample(CONFIGS, 3):
        check(tuple(shape), dims, dtype, config, offsets)


@pytest.mark.parametrize("case", WAYS, ids=lambda case: case[-1])
def test_boxes_read_nothing_outside_their_input(case, monkeypatch):
    """Words of memory in which rows begin or end are read, but none that x does not have all of."""
    (shape, dims, dtype, config, _), read = case, []
    x = random_bits((1 + math.prod(shape),), dtype)[1][1:].view(shape)
    call = permute_op.permute_call(x, torch.empty([shape[i] for i in dims], dtype=dtype), dims)
    load = InterpreterBuilder.create_masked_load

    def recorded(self, ptrs, mask, *rest):
        read.extend(ptrs.data[mask.data].tolist())
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recorded)
    launching.run_interpreted(call, config)
    assert x.data_ptr() == min(read)
    assert max(read) < x.data_ptr() + x.nbytes
