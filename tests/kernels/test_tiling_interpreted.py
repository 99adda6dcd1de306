"""Tilings against the kernels they tell of: every load and store that a program does in the interpreter."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests.counting import counted
from tests.reference import values
from tests.tilings import turns_of
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import PermuteProblem
from tritile.core.threads import library_lock
from tritile.core.views import posed
from tritile.families.space import illegal
from tritile.families.work import work_of
from tritile.lab.report.tiling import move_of, step_of, tiling_of
from tritile.lab.report.tiling.steps import covered, whole_rows
from tritile.ops.described import described
from tritile.runtime import launch

DEVICE = replace(target_device("nvidia-h200"), processors=3)  # as `run_interpreted` has it


@dataclass
class Watched:
    """Hold (address of each element, mask) of loads and stores, by program, in order."""

    loads: dict = field(default_factory=lambda: defaultdict(list))
    stores: dict = field(default_factory=lambda: defaultdict(list))
    order: list = field(default_factory=list)


@pytest.fixture
def watch(monkeypatch):
    watched = Watched()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def note(kept, builder, pointers, mask):
        program = builder.grid_idx
        if program not in watched.order:
            watched.order.append(program)
        shape = pointers.data.shape
        kept[program].append((np.array(pointers.data), np.broadcast_to(mask.data, shape).astype(bool)))

    def watching_load(self, pointers, mask, *rest, **options):
        note(watched.loads, self, pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def watching_store(self, pointers, value, mask, *rest, **options):
        note(watched.stores, self, pointers, mask)
        return store(self, pointers, value, mask, *rest, **options)

    with library_lock:
        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watching_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watching_store)
        yield watched


def within(tensor, addresses):
    """Tell whether addresses lie in a tensor."""
    first = tensor.data_ptr()
    return (addresses >= first) & (addresses < first + tensor.numel() * tensor.element_size())


def elements(tensor, accesses):
    """Return for each access the (matrix, row, column) of elements of a contiguous tensor that it touches."""
    found = []
    for pointers, mask in accesses:
        at = pointers[mask].astype(np.int64)
        if at.size and within(tensor, at).all():
            index = (at - tensor.data_ptr()) // tensor.element_size()
            found.append(
                set(zip(*(axis.tolist() for axis in np.unravel_index(index, tensor.shape)), strict=True))
            )
    return found


def filled(accesses, tensor):
    """Return the elements that each access to a tensor masks."""
    touching = [(p, m) for p, m in accesses if m.any() and within(tensor, p[m].astype(np.int64)).all()]
    return [int((~mask).sum()) for _, mask in touching]


def rectangle(matrix, block):
    rows = range(block.top, block.top + block.rows)
    columns = range(block.left, block.left + block.columns)
    return {(matrix, row, column) for row in rows for column in columns}


def linear(program, grid):
    x, y, z = program
    return x + grid[0] * (y + grid[1] * z)


def product(size, config):
    """Return tensors and the call of a batch of products, and its tiling."""
    batch, m, n, k = size
    a, b = values((batch, m, k), torch.float32), values((batch, k, n), torch.float32, 1)
    out = torch.empty(batch, m, n)
    call = described(a, b, out, "tf32x3")
    return a, b, out, call, tiling_of(call.problem, config, DEVICE)


def tile(group, m=32, n=16, k=16):
    return Config.of(4, 2, "tile", BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group)


def tma(group, persistent=False, split=1, m=16, n=32, k=16):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}
    return Config.of(4, 3, "descriptor", **blocks, PERSISTENT=persistent, SPLIT_K=split, SUBTILES=1)


SIZES = [(1, 100, 60, 36), (1, 96, 64, 32), (2, 70, 52, 44), (1, 16, 36, 48)]  # rows of whole 16 bytes
CONFIGS = [
    *(tile(group) for group in (1, 2, 4, 8)),
    *(tma(group) for group in (1, 2, 8)),
    *(tma(group, persistent=True) for group in (1, 2, 8)),
    tma(2, split=2),
]
ODD = [((1, 71, 33, 49), tile(2)), ((3, 65, 31, 15), tile(4)), ((1, 1, 1, 1), tile(1))]


OF_EACH = [tile(2), tma(2), tma(2, persistent=True), tma(2, split=2)]


@pytest.mark.parametrize(
    ("size", "config"),
    [*itertools.product(SIZES[:1], CONFIGS), *itertools.product(SIZES[2:], OF_EACH), *ODD],
    ids=str,
)
def test_programs_of_a_product_load_the_blocks_that_the_tiling_tells(size, config, watch):
    a, b, out, call, tiling = product(size, config)
    grid = work_of(call, config, DEVICE.processors, False).steps[-1].grid
    launch.run_interpreted(call, config)
    torch.testing.assert_close(out, a @ b, atol=1e-4, rtol=1e-4)
    assert tiling.copied == ()
    assert prod(grid) == tiling.programs
    programs = {linear(program, grid): program for program in watch.order}
    assert sorted(programs) == list(range(tiling.programs))
    for number, program in programs.items():
        of_a, of_b = (elements(t, watch.loads[program]) for t in (a, b))
        masked_a, masked_b = (filled(watch.loads[program], t) for t in (a, b))
        done = 0
        for turn in turns_of(tiling, number):
            matrix = tiling.place(turn).matrix
            for step in range(len(tiling.k_blocks(turn))):
                told = step_of(tiling, turn, step)
                assert of_a[done] == rectangle(matrix, told.a)
                assert of_b[done] == rectangle(matrix, told.b)
                assert (masked_a[done], masked_b[done]) == (told.a.masked, told.b.masked)
                done += 1
        assert done == len(of_a) == len(of_b)


def test_an_operand_that_is_copied_first_is_told():
    for size, copied in (((1, 64, 36, 33), ("A",)), ((1, 64, 33, 36), ("B",)), ((1, 64, 33, 33), ("A", "B"))):
        assert product(size, tma(2))[-1].copied == copied
        assert product(size, tile(2))[-1].copied == ()


@pytest.mark.parametrize("config", OF_EACH, ids=str)
def test_every_tile_is_stored_once_by_its_programs(config, watch):
    _, _, out, call, tiling = product((2, 100, 60, 36), config)
    grid = work_of(call, config, DEVICE.processors, False).steps[-1].grid
    launch.run_interpreted(call, config)
    stored = {linear(program, grid): elements(out, watch.stores[program]) for program in watch.order}
    everything = [element for tiles in stored.values() for tile in tiles for element in tile]
    assert len(everything) == len(set(everything)) == out.numel()
    for number, tiles in stored.items():
        told = [
            rectangle(tiling.place(turn).matrix, step_of(tiling, turn, 0).c)
            for turn in turns_of(tiling, number)
        ]
        if tiling.parts == 1:
            assert tiles == told
        else:
            assert set().union(*tiles) <= told[0]  # the last of those that share a tile sums it


def mover(family, group, m=32, n=32):
    return Config.of(4, 1, family, BLOCK_M=m, BLOCK_N=n, GROUP_M=group)


def moved(problem, strides, matrix, rows, columns):
    """Return the byte offsets, in a tensor of these strides, of elements (m, n) of a matrix."""
    found = set()
    for m, n in zip(rows.ravel().tolist(), columns.ravel().tolist(), strict=True):
        at = 0
        for dims, index in ((problem.plane.m, m), (problem.plane.n, n), (problem.plane.batch[::-1], matrix)):
            for i in dims:
                at += index % problem.shape[i] * strides[i]
                index //= problem.shape[i]
        found |= set(range(at * problem.itemsize, (at + 1) * problem.itemsize))
    return found


def touched(tensor, accesses, size):
    """Return the byte offsets in a tensor that accesses of `size` bytes each touch."""
    found = set()
    for pointers, mask in accesses:
        at = (pointers[mask].astype(np.int64) - tensor.data_ptr()).ravel()
        found |= set((at[:, None] + np.arange(size)).ravel().tolist())
    return found


PERMUTED = [
    PermuteProblem.turned(1, 100, 70, 1),
    PermuteProblem.turned(2, 64, 96, 1),
    PermuteProblem.turned(1, 33, 65, 2),
    PermuteProblem.turned(2, 71, 31, 2),  # too few columns for a tile: a row goes on in the next matrix
    PermuteProblem.turned(1, 130, 20, 4),
    PermuteProblem.turned(3, 64, 45, 16),
    PermuteProblem.of((40, 5, 33), (1, 40 * 33, 40), (165, 33, 1), 4),  # x[5, 33, 40]
    PermuteProblem.of((12, 30, 50), (50, 600, 1), (1500, 50, 1), 2),  # two dimensions exchanged, rows kept
]


# Groups are told by problems of several rows of tiles: of one batch, and of two with a part of a tile.
@pytest.mark.parametrize(
    ("problem", "group"),
    [*((problem, 2) for problem in PERMUTED), *itertools.product((PERMUTED[0], PERMUTED[3]), (1, 32))],
    ids=lambda given: getattr(given, "label", given),
)
@pytest.mark.parametrize("family", ["tile", "packed"])
def test_programs_of_a_permutation_move_the_tiles_that_the_tiling_tells(problem, group, family, watch):
    config = mover(family, group)
    if illegal(config, problem, DEVICE) is not None:
        assert family == "packed"
        pytest.skip("packed moves elements of 1 and 2 bytes that are turned over")
    kept = []

    def make(dtype, count):
        kept.append(torch.arange(count).to(getattr(torch, dtype)))
        return kept[-1]

    call = posed(problem, make)
    tiling = tiling_of(problem, config, DEVICE)
    launch.run_interpreted(call, config)
    grid = work_of(call, config, 3, False).steps[-1].grid
    programs = {linear(program, grid): program for program in watch.order}
    assert sorted(programs) == list(range(tiling.programs))
    wide = min(problem.itemsize, 8)
    for turn in range(tiling.turns):
        rows, columns = covered(tiling, turn)
        matrix, move = tiling.place(turn).matrix, move_of(tiling, turn)
        loads, stores = watch.loads[programs[turn]], watch.stores[programs[turn]]
        ends = len(stores) - 1
        assert bool(ends) == move.ends
        read = touched(kept[0], loads[: len(loads) - ends], wide)
        assert read == moved(problem, problem.x_strides, matrix, rows, columns)
        written = touched(kept[1], stores[:1], 4 if family == "packed" else wide)
        assert written == moved(problem, problem.out_strides, matrix, rows, columns)
        assert len(written) == move.bytes
        assert len({byte // 32 for byte in read}) == move.read_sectors
        assert len({byte // 32 for byte in written}) == move.written_sectors
        block = move.block
        assert (block.rows, block.columns) == rows.shape
        assert block.top <= rows.min()
        assert block.left == columns.min()
    assert tiling.rows * tiling.covers[0] >= whole_rows(tiling)


@pytest.mark.parametrize("size", [(1, 100, 70), (2, 64, 96), (1, 33, 65)], ids=str)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_sectors_of_a_transpose_are_those_that_kernels_ask_for(size, itemsize):
    batch, m, n = size
    problem = PermuteProblem.turned(batch, m, n, itemsize)
    buffers = []

    def make(dtype, count):
        whole = torch.zeros(count + 32, dtype=getattr(torch, dtype))
        skew = -whole.data_ptr() % 32 // whole.element_size()
        buffers.append(
            whole[skew : skew + count]
        )  # from a sector's start on, as torch's allocator for GPUs gives
        return buffers[-1]

    config = mover("tile", 2)
    tiling = tiling_of(problem, config, DEVICE)
    with counted() as counts:
        launch.run_interpreted(posed(problem, make), config)
    moves = [move_of(tiling, turn) for turn in range(tiling.turns)]
    assert sum(move.bytes for move in moves) == counts.read == counts.written
    assert sum(move.read_sectors for move in moves) == counts.read_sectors
    assert sum(move.written_sectors for move in moves) == counts.written_sectors
