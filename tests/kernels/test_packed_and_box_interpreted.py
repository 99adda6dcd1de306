"""The packed kernel and that of boxes, interpreted: permutations bit for bit at every edge."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.configs import boxed, turned
from tests.reference import frame, guard_intact, name, random_bits, same_bits
from tritile.core.device import TARGETS
from tritile.families.common import grids
from tritile.families.permute.boxes import box_of
from tritile.families.space import illegal
from tritile.ops import permute as permute_op
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

SHORT = [torch.uint8, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.int16]
BOXES = ((64, 1, 256), (64, 32, 512), (128, 64, 1024))


def packed(block_m, block_n, group=1):
    return turned(block_m, block_n, group=group, family="packed")


def box(*blocks):
    return boxed(*blocks, warps=1)


def check(x, bits, dims, config, out=None):
    """Run the call with this config and compare; the call's problem, None where the config may not run it."""
    out = torch.empty([x.shape[d] for d in dims], dtype=x.dtype) if out is None else out
    call = permute_op.permute_call(x, out, dims)
    if illegal(config, call.problem, TARGETS["sm_90"]) is not None:
        return None
    launch.run_interpreted(call, config)
    assert same_bits(out, bits.permute(*dims, x.ndim))
    return call.problem


def check_amid(shape, dtype, dims, config, offsets):
    """The same from and to memory where offsets say, nothing around which is touched."""
    (x_at, out_at), size = offsets, math.prod(shape)
    raw, flat = random_bits((x_at + size,), dtype)
    room, buffer = random_bits((out_at + size + 9,), dtype, seed=1)
    before = room.clone()
    out = buffer[out_at : out_at + size].view([shape[d] for d in dims])
    found = check(flat[x_at:].view(shape), raw[x_at:].view(*shape, -1), dims, config, out)
    ends = torch.ones(len(room), dtype=torch.bool)
    ends[out_at : out_at + size] = False
    assert same_bits(buffer[ends], before[ends])
    return found


SIZES = [
    ((64, 64), torch.uint8, (32, 32, 2)),
    ((36, 130), torch.float16, (32, 32, 2)),
    *(((67, 61), dtype, (32, 32, 2)) for dtype in SHORT),
    *(  # around words and tiles
        ((m, n), dtype, (32, 16))
        for dtype in (torch.uint8, torch.float16)
        for m in (7, 8, 9, 10, 32, 33, 34, 35, 36, 37, 70)
        for n in ((2, 3, 5, 33) if m in (10, 35, 37) else (3, 5))
    ),
]


@pytest.mark.parametrize(("shape", "dtype", "blocks"), SIZES, ids=str)
def test_packed_words_of_every_short_type(dtype, shape, blocks):
    raw, x = random_bits(shape, dtype)
    assert check(x, raw, [1, 0], packed(*blocks))


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0), (2, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=name)
def test_wherever_x_and_out_begin(dtype, offsets):
    assert check_amid((2, 41, 39), dtype, (0, 2, 1), packed(32, 32), offsets)
    shape, dims = ORDERS[1 + offsets[0]]
    assert check_amid(shape, dtype, dims, box(*BOXES[1]), offsets)


# One of each number of dimensions that run along either side of a tile, and of each type another one.
OF_FOUR = {
    torch.int8: [(0, 1, 3, 2), (0, 3, 2, 1), (1, 0, 3, 2), (1, 2, 3, 0), (2, 3, 1, 0), (3, 0, 2, 1)],
    torch.bfloat16: [(0, 3, 1, 2), (1, 3, 2, 0), (2, 1, 3, 0), (3, 0, 1, 2), (3, 2, 0, 1), (3, 2, 1, 0)],
}


@pytest.mark.parametrize("dtype", OF_FOUR, ids=name)
def test_runs_of_several_dimensions(dtype):
    raw, x = random_bits((9, 5, 7, 4), dtype)
    found = [check(x, raw, list(order), packed(64, 32, 4)) for order in OF_FOUR[dtype]]
    assert len({tuple(map(len, problem.plane)) for problem in found}) == 6


ORDERS = [
    ((3, 640), (1, 0)), ((640, 3), (1, 0)), ((641, 5), (1, 0)), ((2, 9, 7, 83), (2, 1, 3, 0)),
    ((48, 20, 5, 9), (1, 2, 0, 3)), ((169, 2, 10, 3), (2, 0, 1, 3)), ((160, 2, 5), (1, 0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=name)
def test_short_sides(dtype):
    orders, boxes = (ORDERS, BOXES) if dtype == torch.uint8 else (ORDERS[1:4], BOXES[1:2])
    for shape, dims in orders:
        raw, x = random_bits(shape, dtype)
        found = [check(x, raw, dims, box(*blocks)) for blocks in boxes]
        assert any(found)


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
    raw, x = random_bits(shape, dtype)
    found = box_of(box(*BOXES[0]), check(x, raw, (1, 0), box(*BOXES[0])))
    assert (found.read, found.lanes, found.skewed) == (read, lanes, skewed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=name)
def test_indices_of_64_bits(monkeypatch, dtype):
    monkeypatch.setattr(grids, "WIDE_FROM", 0)
    for shape, dims in (((3, 45, 37), (0, 2, 1)), ((9, 5, 7, 4), (3, 1, 2, 0))):
        raw, x = random_bits(shape, dtype)
        assert check(x, raw, dims, packed(16, 16))
        assert check(x, raw, dims, turned(16, 16))
    for shape, dims in ORDERS[3:5]:
        raw, x = random_bits(shape, dtype)
        assert check(x, raw, dims, box(*BOXES[1]))


@pytest.mark.parametrize(
    ("config", "shape", "layouts"),
    [
        (packed(16, 16), (2, 45, 37), ("row", "sliced")),
        (box(16, 16, 256), (3, 70, 9), ("sliced", "sparse")),
    ],
    ids=str,
)
def test_rows_of_out_that_lie_apart_and_lazy_negation(config, shape, layouts):
    for dtype, layout in itertools.product((torch.uint8, torch.float16), layouts):
        raw, x = (each.clone() for each in random_bits(shape, dtype))
        buffer, out = frame((shape[0], shape[2], shape[1]), dtype, layout)
        assert check(x, raw, [0, 2, 1], config, out)
        assert guard_intact(buffer, out)
    raw[..., -1] ^= 128  # of the last, of fp16
    assert check(torch._neg_view(x), raw, [0, 2, 1], config)


CONFIGS = [packed(*blocks) for blocks in ((32, 32), (64, 8), (16, 64), (64, 64))]
CONFIGS += [box(*blocks) for blocks in ((64, 1, 256), (16, 16, 256), (64, 32, 512), (8, 64, 1024))]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 5, 9, 17, 40, 130]), min_size=2, max_size=4),
    draw=st.randoms(use_true_random=False),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.int64]),
    config=st.sampled_from(CONFIGS),
)
def test_any_permutation(shape, draw, dtype, config):
    if math.prod(shape) > 20000:
        return
    raw, x = random_bits(tuple(shape), dtype)
    check(x, raw, draw.sample(range(len(shape)), len(shape)), config)
