"""Bytes that formulas say against those that kernels ask for, access by access, in the interpreter."""

import itertools
import threading

import pytest
import torch

from tests.accesses import counted
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.lab import traffic
from tritile.lab.ladder.matmul import matmul_naive
from tritile.lab.ladder.transpose import transpose_rows
from tritile.lab.traffic import SECTOR
from tritile.ops import permute as permute_op
from tritile.ops.products import matmul_call
from tritile.planning import model
from tritile.runtime import launch

pytestmark = pytest.mark.interpreted

H200 = target_device("nvidia-h200")
SMALL = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2}


def product(m, n, k, layout, dtype, batch=()):
    a = torch.randn(*batch, m, k) if layout[0] == "N" else torch.randn(*batch, k, m).mT
    b = torch.randn(*batch, k, n) if layout[1] == "N" else torch.randn(*batch, n, k).mT
    out = torch.empty(*batch, m, n, dtype=dtype)
    return matmul_call(a.to(dtype), b.to(dtype), out, "ieee")


TILE = Config.of(family="tile", **SMALL)
BY_TMA = [  # copies of operands, and partial sums, are among what is requested
    Config.of(family="descriptor", **SMALL | {"PERSISTENT": False, "SUBTILES": 1} | how)
    for how in ({"SPLIT_K": 1}, {"SPLIT_K": 2}, {"SPLIT_K": 1, "PERSISTENT": True})
]
PRODUCTS = [
    *itertools.product([(70, 50, 33), (64, 64, 64), (1, 17, 100)], [torch.float16, torch.float32], [TILE]),
    *itertools.product([(70, 48, 64), (70, 51, 65), (33, 16, 200)], [torch.float16], BY_TMA),
    ((3, 40, 24, 24), torch.float16, TILE),
]


@pytest.mark.parametrize(("sizes", "dtype", "config"), PRODUCTS, ids=str)
@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_products_ask_for_just_what_is_said(sizes, dtype, config, layout):
    *batch, m, n, k = sizes
    call = product(m, n, k, layout, dtype, batch)
    with counted() as found:
        launch.run_interpreted(call, config)
    assert traffic.tiled(call.problem, config, H200) == traffic.Traffic(found.read, found.written)


def sectors_of(shape, dims, dtype, which=slice(0, 400, 133), gap=1):
    """Return by config the sectors that each program touches, predicted and counted, read and written."""
    x = torch.zeros(*shape[:-1], gap * shape[-1], dtype=dtype)[..., ::gap]
    call = permute_op.permute_call(x, x.permute(dims).contiguous(), dims)
    for config in model.ranked(call.problem, H200)[which]:
        with counted() as found:
            launch.run_interpreted(call, config)
        said = traffic.tiled(call.problem, config, H200)
        yield config, said.read / SECTOR / found.read_sectors, said.written / SECTOR / found.written_sectors


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((128, 256), torch.float16),
        ((131, 257), torch.float16),
        ((300, 127), torch.uint8),
        ((70, 50), torch.float32),
        ((257, 130), torch.float64),
        ((100, 203), torch.bfloat16),
    ],
)
def test_transposes_touch_the_sectors_that_are_said(shape, dtype):
    """Allow for packed words: their row ends are moved apart, which the prediction leaves out."""
    for config, read, written in sectors_of(shape, (1, 0), dtype):
        near = 0.01 if config.family == "tile" else 0.12
        assert read == pytest.approx(1, abs=near), config
        assert written == pytest.approx(1, abs=near), config


def test_elements_with_gaps_touch_the_sectors_that_are_said():
    for config, read, _ in sectors_of((64, 64), (0, 1), torch.uint8, slice(0, 400, 100), gap=16):
        assert read == pytest.approx(1, rel=0.1), config


def test_permutations_touch_no_more_than_is_said():
    """Bound the counts: the prediction gives adjacent runs of a tile sectors of their own."""
    for shape, dims in [((2, 33, 65, 16), (0, 2, 1, 3)), ((4, 50, 3, 32), (3, 1, 0, 2))]:
        for config, read, written in sectors_of(shape, dims, torch.float16):
            assert 0.95 < read < 2.1, config
            assert 0.95 < written < 2.1, config


@pytest.mark.parametrize("n", [1, 31, 40])
def test_untiled_is_what_the_naive_kernels_ask_for(n):
    """Compare with a product element by element, and a transpose that scatters, a sector an element."""
    a, b, out = (torch.randn(n, n) for _ in range(3))
    with counted() as found:
        matmul_naive[(-(-n * n // 64),)](a, b, out, n, 64)
    problem = matmul_call(a, b, out, "ieee").problem
    assert traffic.untiled(problem) == traffic.Traffic(found.read, found.written)
    x, out = torch.randn(8 * n, 8 * n), torch.empty(8 * n, 8 * n)
    with counted() as found:
        transpose_rows[(8 * n,)](x, out, 8 * n, 1024)
    said = traffic.untiled(permute_op.permute_call(x, out, (1, 0)).problem)
    assert (said.read, said.written) == (SECTOR * found.read_sectors, SECTOR * found.written_sectors)


def test_other_threads_are_counted_and_not_held_up():
    call = product(16, 16, 16, "NN", torch.float16)
    with counted() as found:
        thread = threading.Thread(target=launch.run_interpreted, args=(call, TILE))
        thread.start()
        thread.join()
    assert found.read == traffic.tiled(call.problem, TILE, H200).read


def test_a_sector_that_a_program_reads_again_counts_once_for_the_program():
    call = product(16, 16, 64, "NN", torch.float16)
    config = Config.of(family="tile", **SMALL | {"BLOCK_M": 16})
    with counted() as found:
        launch.run_interpreted(call, config)
        launch.run_interpreted(call, config)
    assert found.read_sectors == (16 * 64 * 2 + 64 * 16 * 2) // SECTOR
    assert found.read == 2 * traffic.tiled(call.problem, config, H200).read
