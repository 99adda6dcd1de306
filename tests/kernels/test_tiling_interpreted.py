"""Tilings against the kernels that they describe: what each program loads and stores in the interpreter."""

from collections import defaultdict
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch

from picture import blocks_of, tiling_of
from tests import configs
from tests.accesses import watched
from tests.reference import values
from tritile.core.call import call_for
from tritile.core.device import target_device
from tritile.core.permutation import PermuteProblem
from tritile.families import launching
from tritile.families.work import work_of
from tritile.ops.products import matmul_call

pytestmark = pytest.mark.interpreted

DEVICE = replace(target_device("nvidia-h200"), processors=3)  # as `run_interpreted` has it


@pytest.fixture
def watch():
    """Return (address of each element, mask) of loads and of stores, by program, in order."""
    loads, stores = defaultdict(list), defaultdict(list)
    with watched(
        lambda program, *access: loads[program].append(access[:2]),
        lambda program, *access: stores[program].append(access[:2]),
    ):
        yield loads, stores


def elements(tensor, accesses):
    """Return the elements of a contiguous tensor that each access to it touches, and how many it masks."""
    found = []
    for pointers, mask in accesses:
        at = pointers[mask].astype(np.int64) - tensor.data_ptr()
        if at.size and (at >= 0).all() and (at < tensor.nbytes).all():
            axes = np.unravel_index(at // tensor.element_size(), tensor.shape)
            touched = set(zip(*(axis.tolist() for axis in axes), strict=True))
            found.append((touched, int((~mask).sum())))
    return found


def rectangle(matrix, block):
    """Return the elements of a block that lie inside its matrix, and how many lie outside."""
    rows = range(block.top, block.top + block.rows)
    columns = range(block.left, block.left + block.columns)
    touched = {(matrix, row, column) for row in rows for column in columns}
    return touched, block.height * block.width - len(touched)


def linear(program, grid):
    x, y, z = program
    return x + grid[0] * (y + grid[1] * z)


def tile(group):
    return configs.tile(32, 16, 16, group=group)


def tma(group, persistent=False):
    return configs.tma(16, 32, 16, group=group, persistent=persistent)


ALIGNED = (1, 100, 60, 36)  # rows of whole 16 bytes
POSED = [
    *((ALIGNED, tile(group)) for group in (1, 2, 4, 8)),
    *((ALIGNED, tma(group)) for group in (1, 2, 8)),
    *((ALIGNED, tma(group, persistent=True)) for group in (1, 2, 8)),
    ((2, 70, 52, 44), tma(2)),
    ((71, 33, 49), tile(2)),
    ((3, 65, 31, 15), tile(4)),
    ((1, 1, 1, 1), tile(1)),
]


@pytest.mark.parametrize(("size", "config"), POSED, ids=str)
def test_product_programs_access_their_tiles(size, config, watch):
    *batch, m, n, k = size
    a, b = (values((*batch, *s), torch.float32, i).round() for i, s in enumerate(((m, k), (k, n))))
    out = torch.empty(*batch, m, n)
    call = matmul_call(a, b, out, "tf32")
    tiling = tiling_of(call.problem, config, DEVICE)
    grid = work_of(call, config, DEVICE.processors, False).steps[-1].grid
    launching.run_interpreted(call, config)
    torch.testing.assert_close(out, a @ b, atol=1e-4, rtol=1e-4)
    a, b, out = (tensor.view(-1, *tensor.shape[-2:]) for tensor in (a, b, out))
    loads, stores = watch
    programs = {linear(program, grid): program for program in loads}
    count = min(prod(grid), tiling.tiles)
    assert sorted(programs) == list(range(count))
    for number, program in programs.items():
        of_a, of_b, of_out = (
            elements(a, loads[program]),
            elements(b, loads[program]),
            elements(out, stores[program]),
        )
        wanted_a, wanted_b, wanted_out = [], [], []
        for index in range(number, tiling.tiles, count):  # a persistent program makes several tiles
            matrix = tiling.place(index)[0]
            for step in range(tiling.steps):
                block_a, block_b, block_c = blocks_of(tiling, index, step)
                wanted_a.append(rectangle(matrix, block_a))
                wanted_b.append(rectangle(matrix, block_b))
            wanted_out.append(rectangle(matrix, block_c))
        assert of_a == wanted_a
        assert of_b == wanted_b
        assert of_out == wanted_out


@pytest.mark.parametrize("group", [1, 2, 32])
@pytest.mark.parametrize(
    "problem",
    [
        PermuteProblem.transposed(1, 100, 70, 1),
        PermuteProblem.transposed(1, 33, 65, 2),
        PermuteProblem.transposed(1, 130, 20, 4),
        PermuteProblem.transposed(2, 70, 100, 4),
    ],
    ids=lambda problem: problem.label,
)
def test_transpose_programs_move_their_tiles(problem, group, watch):
    config = configs.turned(32, 32, group=group)
    kept = []

    def make(dtype, count):
        kept.append(torch.arange(count).to(getattr(torch, dtype)))
        return kept[-1]

    call = call_for(problem, make)
    tiling = tiling_of(problem, config, DEVICE)
    launching.run_interpreted(call, config)
    grid = work_of(call, config, DEVICE.processors, False).steps[-1].grid
    loads, stores = watch
    programs = {linear(program, grid): program for program in loads}
    assert sorted(programs) == list(range(tiling.tiles))
    (height, width), (m, n) = tiling.tile, (problem.m, problem.n)
    for index in range(tiling.tiles):
        (matrix, *_), (top, left) = tiling.place(index), tiling.corner(index)
        moved = {(matrix, i, j) for i in range(top, top + height) for j in range(left, left + width)}
        ((read, _),) = elements(kept[0].view(-1, m, n), loads[programs[index]])
        ((written, _),) = elements(kept[1].view(-1, n, m), stores[programs[index]])
        assert read == moved
        assert written == {(matrix, j, i) for matrix, i, j in moved}
