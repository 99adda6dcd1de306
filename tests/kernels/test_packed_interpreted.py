"""The packed kernel, interpreted: permutations of short elements by words, bit for bit at every edge."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reference import frame, guard_intact, name, random_bits, same_bits
from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.families.common import grids
from tritile.families.space import illegal
from tritile.ops import permute as permute_op
from tritile.runtime import launch

SHORT = [torch.uint8, torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.int16]


def packed(block_m: int, block_n: int, group: int = 1) -> Config:
    return Config.of(4, 1, "packed", BLOCK_M=block_m, BLOCK_N=block_n, GROUP_M=group)


def check(x, bits, dims, config, out=None):
    """Run the call with this config and compare; None where the config may not run it."""
    shape = tuple(x.shape[d] for d in dims)
    out = torch.empty(shape, dtype=x.dtype) if out is None else out
    call = permute_op.described(x, out, dims)
    if illegal(config, call.problem, TARGETS["sm_90"]) is not None:
        return False
    launch.run_interpreted(call, config)
    assert same_bits(out, bits.permute(*dims, x.ndim))
    return True


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *itertools.product([(64, 64), (36, 130)], [torch.uint8, torch.float16]),
        *(((67, 61), dtype) for dtype in SHORT),
    ],
    ids=str,
)
def test_every_short_type(dtype, shape):
    raw, x = random_bits(shape, dtype)
    assert check(x, raw, [1, 0], packed(32, 32, 2))


@pytest.mark.parametrize("m", [7, 8, 9, 10, 32, 33, 34, 35, 36, 37, 70])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=name)
def test_sizes_around_words_and_tiles(dtype, m):
    for n in (2, 3, 5, 33) if m in (10, 35, 37) else (3, 5):
        raw, x = random_bits((m, n), dtype)
        assert check(x, raw, [1, 0], packed(32, 16))


@pytest.mark.parametrize(("x_offset", "out_offset"), [(0, 1), (1, 0), (2, 3), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=name)
def test_wherever_x_and_out_begin(dtype, x_offset, out_offset):
    raw, flat = random_bits((x_offset + 2 * 41 * 39,), dtype)
    x, bits = flat[x_offset:].view(2, 41, 39), raw[x_offset:].view(2, 41, 39, -1)
    memory, buffer = random_bits((out_offset + 2 * 41 * 39 + 8,), dtype, seed=1)
    before = memory.clone()
    out = buffer[out_offset : out_offset + 2 * 41 * 39].view(2, 39, 41)
    assert check(x, bits, [0, 2, 1], packed(32, 32), out)
    ends = torch.ones(len(before), dtype=torch.bool)
    ends[out_offset : out_offset + 2 * 41 * 39] = False
    assert same_bits(buffer[ends], before[ends])


@pytest.mark.parametrize("layout", ["padded rows", "sliced"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=name)
def test_rows_of_out_that_lie_apart(dtype, layout):
    raw, x = random_bits((2, 45, 37), dtype)
    buffer, out = frame((2, 37, 45), dtype, "row" if layout == "padded rows" else "sliced")
    assert check(x, raw, [0, 2, 1], packed(16, 16), out)
    assert guard_intact(buffer, out)


ORDERS = [order for order in itertools.permutations(range(4)) if order[-1] != 3]


@pytest.mark.parametrize(
    ("order", "dtype"),
    [*((order, torch.int8) for order in ORDERS), *((order, torch.bfloat16) for order in ORDERS[::3])],
    ids=str,
)
def test_runs_of_several_dimensions(order, dtype):
    raw, x = random_bits((9, 5, 7, 4), dtype)
    check(x, raw, list(order), packed(64, 32, 4))


def test_64_bit_indices(monkeypatch):
    monkeypatch.setattr(grids, "WIDE_FROM", 0)
    for dtype in (torch.uint8, torch.float16):
        raw, x = random_bits((3, 45, 37), dtype)
        assert check(x, raw, [0, 2, 1], packed(16, 16))
        raw, x = random_bits((9, 5, 7, 4), dtype)
        assert check(x, raw, [3, 1, 2, 0], packed(16, 16))


def test_lazily_negated_halves():
    raw, x = random_bits((40, 33), torch.float16)
    raw = raw.clone()
    raw[..., -1] ^= 128
    assert check(torch._neg_view(x), raw, [1, 0], packed(16, 16))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 17), min_size=2, max_size=3)
    | st.lists(st.integers(1, 7), min_size=4, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.uint8, torch.float16]),
    st.sampled_from([(32, 32), (64, 8), (16, 64), (64, 64)]),
)
def test_any_permutation_that_may_be_packed(shape, draw, dtype, blocks):
    dims = list(range(len(shape)))
    draw.shuffle(dims)
    raw, x = random_bits(tuple(shape), dtype)
    check(x, raw, dims, packed(*blocks))
