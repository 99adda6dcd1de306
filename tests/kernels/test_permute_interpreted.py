"""Permutations, interpreted, bit for bit: operations of every dtype, shape and layout, and every kernel."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

import tritile
from tests.cases.permute import *  # noqa: F403
from tests.cases.permute import check
from tests.configs import boxed, turned
from tests.reference import bytes_of, frame, guard_intact, name, random_bits, same_bits, values
from tritile.core.device import TARGETS
from tritile.errors import TuningError
from tritile.families.common import grids
from tritile.families.permute.boxes import box_of
from tritile.families.permute.family import in_place
from tritile.families.work import pieces_of, work_of
from tritile.ops import permute as permute_op
from tritile.ops import request as ops_request
from tritile.runtime import launch

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
def test_elements_side_by_side_move_as_wider_words(offset, dtype):
    for inner in (2, 4, 6, 8, 32):
        raw, flat = random_bits((offset + 5 * 7 * inner,), dtype)
        x, bits = flat[offset:].view(5, 7, inner), raw[offset:].view(5, 7, inner, -1)
        assert same_bits(tritile.transpose(x, 0, 1), bits.transpose(0, 1))
        wide = permute_op.permute_call(x, torch.empty(7, 5, inner, dtype=dtype), [1, 0, 2]).problem.itemsize
        fits = dtype.itemsize < 8 and not offset % 2 and inner * dtype.itemsize <= 64
        assert (wide > dtype.itemsize) == fits


def test_contiguous_is_the_tensor_itself_where_it_is_contiguous():
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
def test_batches_too_large_for_one_launch_are_split(monkeypatch, dtype, most):
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
        launch.run_interpreted(piece, config)
    assert same_bits(out, bits.transpose(1, 2))


def test_in_place_only_what_is_not_exchanged_is_split(monkeypatch):
    buffer = values((2, 3, 40), torch.float32)
    x, before = buffer[:, :2], buffer[:, :2].clone()
    call = permute_op.permute_call(x, x, [1, 0, 2])
    monkeypatch.setattr("tritile.families.work._MAX_PROGRAMS", 8)
    for piece, _ in pieces_of(call, in_place(call.problem), TARGETS["nvidia-h200"]):
        launch.run_interpreted(piece, in_place(call.problem))
    assert torch.equal(x, before.transpose(0, 1))
    square = torch.zeros(200, 200)
    call = permute_op.permute_call(square, square, [1, 0])
    with pytest.raises(TuningError, match="more programs than a launch counts"):
        pieces_of(call, in_place(call.problem), TARGETS["nvidia-h200"])


def test_what_is_done_in_place_is_never_measured(monkeypatch):
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
def test_words_are_counted_of_what_is_transposed_in_place(dtype, wide):
    """An element of 16 bytes is two of them."""
    x = torch.empty_strided((2, 2), (3 << 29, 1), dtype=dtype, device="meta")
    call = replace(permute_op.permute_call(x, x, [1, 0]), in_place=True)
    (step,) = work_of(call, in_place(call.problem), 1, False).steps
    assert step.args["WIDE"] is wide


# Kernels by configs of one's own.

SHORT = [torch.uint8, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.int16]
BOXES = ((64, 1, 256), (64, 32, 512), (128, 64, 1024))
BLOCKS = [(1, 512, 1), (512, 1, 8), (16, 32, 1), (32, 16, 32), (4, 256, 8), (32, 64, 8)]


def tile(block_m, block_n, group=1):
    return turned(block_m, block_n, group=group)


def packed(block_m, block_n, group=1):
    return turned(block_m, block_n, group=group, family="packed")


def box(*blocks):
    return boxed(*blocks, warps=1)


SIZES = [
    *(((2, 19, 37), dtype, tile(*blocks))
      for blocks in BLOCKS for dtype in (torch.uint8, torch.float32, torch.complex128)),
    ((64, 64), torch.uint8, packed(32, 32, 2)),
    ((36, 130), torch.float16, packed(32, 32, 2)),
    *(((67, 61), dtype, packed(32, 32, 2)) for dtype in SHORT),
    *(  # around words and tiles
        ((m, n), dtype, packed(32, 16))
        for dtype in (torch.uint8, torch.float16)
        for m in (7, 8, 9, 10, 32, 33, 34, 35, 36, 37, 70)
        for n in ((2, 3, 5, 33) if m in (10, 35, 37) else (3, 5))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "config"), SIZES, ids=str)
def test_configs_of_tiles_and_of_packed_words(dtype, shape, config):
    assert check(shape, (1, 0) if len(shape) == 2 else (0, 2, 1), dtype, config)


# One of each number of dimensions that run along either side of a tile, and of each type another one.
OF_FOUR = {
    torch.int8: [(0, 1, 3, 2), (0, 3, 2, 1), (1, 0, 3, 2), (1, 2, 3, 0), (2, 3, 1, 0), (3, 0, 2, 1)],
    torch.bfloat16: [(0, 3, 1, 2), (1, 3, 2, 0), (2, 1, 3, 0), (3, 0, 1, 2), (3, 2, 0, 1), (3, 2, 1, 0)],
}


@pytest.mark.parametrize("dtype", OF_FOUR, ids=name)
def test_runs_of_several_dimensions(dtype):
    found = [check((9, 5, 7, 4), order, dtype, packed(64, 32, 4)) for order in OF_FOUR[dtype]]
    assert len({tuple(map(len, problem.plane)) for problem in found}) == 6


ORDERS = [
    ((3, 640), (1, 0)), ((640, 3), (1, 0)), ((641, 5), (1, 0)), ((2, 9, 7, 83), (2, 1, 3, 0)),
    ((48, 20, 5, 9), (1, 2, 0, 3)), ((169, 2, 10, 3), (2, 0, 1, 3)), ((160, 2, 5), (1, 0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=name)
def test_short_sides(dtype):
    for i, (shape, dims) in enumerate(ORDERS if dtype == torch.uint8 else ORDERS[1:4]):
        boxes = (BOXES[i % 3], BOXES[1]) if dtype == torch.uint8 else BOXES[1:2]
        found = [check(shape, dims, dtype, box(*blocks)) for blocks in boxes]
        assert any(found)


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0), (2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=name)
def test_nothing_around_out_is_touched_wherever_x_and_out_begin(dtype, offsets):
    for shape, dims, config in (
        ((2, 41, 39), (0, 2, 1), packed(32, 32)),
        (*ORDERS[1 + offsets[0]], box(*BOXES[1])),
    ):
        assert check(shape, dims, dtype, config, offsets)


@pytest.mark.parametrize(
    ("shape", "dtype", "read", "lanes", "skewed"),
    [
        ((3, 1024), torch.uint8, 16, 4, True),
        ((4, 1024), torch.uint8, 16, 4, False),
        ((3, 1021), torch.uint8, 1, 4, True),
        ((4, 1024), torch.bfloat16, 8, 2, False),
        ((5, 1021), torch.bfloat16, 1, 2, True),
        ((3, 1024), torch.float32, 4, 1, False),
        ((3, 1024), torch.float64, 2, 1, False),
    ],
)
def test_each_way_to_read_and_write_boxes(shape, dtype, read, lanes, skewed):
    found = box_of(box(*BOXES[0]), check(shape, (1, 0), dtype, box(*BOXES[0])))
    assert (found.read, found.lanes, found.skewed) == (read, lanes, skewed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=name)
def test_indices_of_64_bits(monkeypatch, dtype):
    monkeypatch.setattr(grids, "WIDE_FROM", 0)
    for shape, dims in (((3, 45, 37), (0, 2, 1)), ((9, 5, 7, 4), (3, 1, 2, 0))):
        assert check(shape, dims, dtype, packed(16, 16))
        assert check(shape, dims, dtype, tile(16, 16))
    for shape, dims in ORDERS[3:5]:
        assert check(shape, dims, dtype, box(*BOXES[1]))


@pytest.mark.parametrize(
    ("config", "shape", "layouts"),
    [
        (packed(16, 16), (2, 45, 37), ("row", "sliced")),
        (box(16, 16, 256), (3, 70, 9), ("sliced", "sparse")),
    ],
    ids=str,
)
def test_rows_of_out_that_lie_apart_and_lazy_negation(config, shape, layouts):
    def run(x, bits, out):
        launch.run_interpreted(permute_op.permute_call(x, out, [0, 2, 1]), config)
        assert same_bits(out, bits.permute(0, 2, 1, 3))

    for dtype, layout in itertools.product((torch.uint8, torch.float16), layouts):
        raw, x = (each.clone() for each in random_bits(shape, dtype))
        buffer, out = frame((shape[0], shape[2], shape[1]), dtype, layout)
        run(x, raw, out)
        assert guard_intact(buffer, out)
    raw[..., -1] ^= 128  # of the last, of fp16
    run(torch._neg_view(x), raw, torch.empty(out.shape, dtype=dtype))


CONFIGS = [packed(*blocks) for blocks in ((32, 32), (64, 8), (16, 64), (64, 64))]
CONFIGS += [box(*blocks) for blocks in ((64, 1, 256), (16, 16, 256), (64, 32, 512), (8, 64, 1024))]


@pytest.mark.parametrize("seed", range(40))
def test_any_permutation_by_any_config(seed):
    draw = random.Random(seed)
    shape = draw.choices([1, 2, 3, 4, 5, 9, 17, 40, 130], k=draw.randint(2, 4))
    while math.prod(shape) > 20000:
        shape.remove(max(shape))
    dtype = draw.choice([torch.uint8, torch.float16, torch.float32, torch.int64])
    check(tuple(shape), draw.sample(range(len(shape)), len(shape)), dtype, draw.choice(CONFIGS))
