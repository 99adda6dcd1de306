"""Bytes that formulas say against those that kernels ask for, access by access, in the interpreter."""

import itertools

import pytest
import torch

from ladder_matmul import matmul_naive
from ladder_transpose import transpose_rows
from tests.accesses import counted
from tritile.choose import waves
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.families import launching
from tritile.lab import traffic
from tritile.lab.traffic import SECTOR
from tritile.ops import permute as permute_op
from tritile.ops.products import matmul_call

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
def test_product_requests_as_counted(sizes, dtype, config, layout):
    *batch, m, n, k = sizes
    call = product(m, n, k, layout, dtype, batch)
    with counted() as found:
        launching.run_interpreted(call, config)
    assert traffic.tiled(call.problem, config, H200) == traffic.Traffic(found.read, found.written)


TURN, FIRST = (1, 0), slice(0, 400, 133)
# Shape, order, dtype, elements to one that is read, which configs, and bounds of what is said to what counts.
# Adjacent runs of a tile are predicted sectors of their own; rows that a box reads beyond it are left out.
PERMUTED = [
    ((128, 256), TURN, torch.float16, 1, FIRST, (0.88, 1.12)),
    ((131, 257), TURN, torch.float16, 1, FIRST, (0.88, 1.12)),
    ((300, 127), TURN, torch.uint8, 1, FIRST, (0.88, 1.12)),
    ((70, 50), TURN, torch.float32, 1, FIRST, (0.88, 1.12)),
    ((257, 130), TURN, torch.float64, 1, FIRST, (0.88, 1.12)),
    ((100, 203), TURN, torch.bfloat16, 1, FIRST, (0.88, 1.12)),
    ((64, 64), (0, 1), torch.uint8, 16, slice(0, 400, 100), (0.9, 1.1)),
    ((2, 33, 65, 16), (0, 2, 1, 3), torch.float16, 1, FIRST, (0.95, 2.1)),
    ((4, 50, 3, 32), (3, 1, 0, 2), torch.float16, 1, FIRST, (0.95, 2.1)),
]


@pytest.mark.parametrize(("shape", "dims", "dtype", "gap", "which", "bounds"), PERMUTED)
def test_permutation_sectors_as_counted(shape, dims, dtype, gap, which, bounds):
    x = torch.zeros(*shape[:-1], gap * shape[-1], dtype=dtype)[..., ::gap]
    call = permute_op.permute_call(x, x.permute(dims).contiguous(), dims)
    for config in waves.ranked(call.problem, H200)[which]:
        with counted() as found:
            launching.run_interpreted(call, config)
        said = traffic.tiled(call.problem, config, H200)
        shares = said.read / SECTOR / found.read_sectors, said.written / SECTOR / found.written_sectors
        least, most = (0.99, 1.01) if config.family == "tile" and dims == TURN else bounds
        assert least < shares[0] < most, config
        assert gap > 1 or least < shares[1] < most, config


@pytest.mark.parametrize("n", [1, 31])
def test_untiled_requests_of_naive_kernels(n):
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
