"""The box kernel, interpreted: permutations of short sides, bit for bit at every edge."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reference import frame, guard_intact, name, random_bits, same_bits
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.families.common import grids
from tritile.families.permute.boxes import box_of, illegal
from tritile.ops import permute as permute_op
from tritile.runtime import launch


def boxed(run_out: int, run_x: int, block: int, warps: int = 1) -> Config:
    return Config.of(warps, 1, "box", BLOCK_M=run_out, BLOCK_N=run_x, BLOCK=block)


def check(x, bits, dims, config, out=None):
    """Run the call with this config and compare: how its boxes lie, None where the config may not run it."""
    out = torch.empty([x.shape[d] for d in dims], dtype=x.dtype) if out is None else out
    call = permute_op.described(x, out, dims)
    if illegal(config, call.problem, TARGETS["sm_90"]) is not None:
        return None
    launch.run_interpreted(call, config)
    assert same_bits(out, bits.permute(*dims, x.ndim))
    return box_of(config, call.problem)


ORDERS = [
    ((3, 640), (1, 0)), ((640, 3), (1, 0)), ((3, 641), (1, 0)), ((641, 5), (1, 0)),
    ((2, 9, 7, 83), (2, 1, 3, 0)), ((169, 2, 10, 3), (2, 0, 1, 3)),
    ((48, 20, 5, 9), (1, 2, 0, 3)), ((160, 2, 5), (1, 0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=name)
@pytest.mark.parametrize(("shape", "dims"), ORDERS, ids=str)
def test_short_sides(dtype, shape, dims):
    raw, x = random_bits(shape, dtype)
    found = [check(x, raw, dims, boxed(*of)) for of in ((64, 1, 256), (64, 32, 512), (128, 64, 1024))]
    assert any(found)


@pytest.mark.parametrize(
    ("shape", "dims", "dtype", "read", "lanes", "skewed"),
    [
        ((3, 1024), (1, 0), torch.uint8, 16, 4, True),
        ((4, 1024), (1, 0), torch.uint8, 16, 4, False),
        ((3, 1021), (1, 0), torch.uint8, 1, 4, True),
        ((4, 1024), (1, 0), torch.bfloat16, 8, 2, False),
        ((5, 1021), (1, 0), torch.bfloat16, 1, 2, True),
        ((3, 1024), (1, 0), torch.float32, 4, 1, False),
        ((3, 1024), (1, 0), torch.float64, 2, 1, False),
    ],
)
def test_each_way_to_read_and_write(shape, dims, dtype, read, lanes, skewed):
    raw, x = random_bits(shape, dtype)
    box = check(x, raw, dims, boxed(64, 1, 256))
    assert box is not None
    assert (box.read, box.lanes, box.skewed) == (read, lanes, skewed)


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=name)
def test_tensors_that_start_anywhere_and_their_surroundings(dtype, offsets):
    x_at, out_at = offsets
    for shape, dims in ORDERS:
        size = torch.Size(shape).numel()
        raw, flat = random_bits((x_at + size,), dtype)
        _, room = random_bits((out_at + size + 9,), dtype, seed=1)
        before = room.view(torch.uint8).clone()
        out = room[out_at : out_at + size].view([shape[d] for d in dims])
        assert check(flat[x_at:].view(shape), raw[x_at:].view(*shape, -1), dims, boxed(64, 32, 512), out)
        after, first, last = room.view(torch.uint8), out_at * dtype.itemsize, (out_at + size) * dtype.itemsize
        assert torch.equal(after[:first], before[:first])
        assert torch.equal(after[last:], before[last:])


def test_indices_of_64_bits(monkeypatch):
    monkeypatch.setattr(grids, "WIDE_FROM", 1)
    for dtype, (shape, dims) in itertools.product([torch.uint8, torch.float32], ORDERS[3:]):
        raw, x = random_bits(shape, dtype)
        assert check(x, raw, dims, boxed(64, 32, 512))


def test_lazy_negation():
    raw, x = random_bits((5, 641), torch.float16)
    raw = raw.clone()
    raw[..., -1] ^= 128
    assert check(torch._neg_view(x), raw, [1, 0], boxed(64, 1, 256))


def test_an_output_with_gaps_keeps_them():
    raw, x = random_bits((3, 70, 9), torch.uint8)
    for layout in ("sliced", "sparse"):
        buffer, out = frame((3, 9, 70), torch.uint8, layout, "cpu")
        assert check(x, raw, [0, 2, 1], boxed(16, 16, 256), out), layout
        assert guard_intact(buffer, out)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 5, 9, 17, 40, 130]), min_size=2, max_size=4),
    draw=st.randoms(use_true_random=False),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.int64]),
    config=st.sampled_from([(64, 1, 256), (16, 16, 256), (64, 32, 512), (8, 64, 1024)]),
)
def test_any_permutation_by_boxes(shape, draw, dtype, config):
    if torch.Size(shape).numel() > 20000:
        return
    dims = draw.sample(range(len(shape)), len(shape))
    raw, x = random_bits(tuple(shape), dtype)
    check(x, raw, dims, boxed(*config))
