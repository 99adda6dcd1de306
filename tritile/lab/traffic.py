"""Compute the bytes that a problem asks of global memory: without tiles, with a config's, and the least.

Caches do not count, nor masked elements. A product without reuse reads a row of a and a column of b for
every element. A permutation moves each element once however it is tiled; tiles save 32-byte sectors that
are moved for part of their bytes.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, Known, MatmulProblem, PermuteProblem
from tritile.families.common import operands, upright
from tritile.families.common.grids import unit
from tritile.families.few_rows import across
from tritile.families.few_rows import family as few_rows
from tritile.families.matmul_clusters import family as clusters
from tritile.families.matmul_clusters import transposed as transposed_clusters
from tritile.families.matmul_split import family as split
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tma import family as descriptor
from tritile.families.odd_rows import family as odd_rows
from tritile.families.permute import boxes
from tritile.families.permute import family as permute
from tritile.lab.counting import SECTOR

_ROW: Final = 128  # rows of a copied operand are multiples of these bytes
_PARTIAL: Final = 4  # bytes of an element of a partial sum
# The families that make tiles by clusters of programs, and what gives a cluster's rows and columns.
CLUSTERED: Final = {
    clusters.NAME: clusters.KIND.clustered,
    transposed_clusters.NAME: transposed_clusters.KIND.clustered,
}


@dataclass(frozen=True)
class Traffic:
    """Hold the bytes that loads and stores ask of global memory."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Return both together."""
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read + other.read, self.written + other.written)


def least(problem: Known) -> Traffic:
    """Return the least traffic of any tiling: every input read once, the output written once.

    An element that a permutation reads repeatedly, over a dimension of stride 0, counts once. An operand that
    a product's batch shares counts for each matrix, as the problem does not tell.
    """
    if isinstance(problem, PermuteProblem):
        own = math.prod(n for n, step in zip(problem.shape, problem.x_strides, strict=True) if step)
        return Traffic(own * problem.itemsize, problem.bytes / 2)
    written = problem.batch * problem.m * problem.n * ITEMSIZE[problem.out_dtype]
    return Traffic(problem.bytes - written, written)


def untiled(problem: Known) -> Traffic:
    """Return the traffic element by element.

    A product reuses nothing. A permutation goes along the densest dimension of x and counts whole sectors,
    those of one row once.
    """
    if isinstance(problem, MatmulProblem):
        elements = problem.batch * problem.m * problem.n
        return Traffic(2 * elements * problem.k * problem.itemsize, elements * ITEMSIZE[problem.out_dtype])
    elements, size = math.prod(problem.shape), problem.itemsize
    if not problem.plane.n:
        return Traffic(SECTOR, SECTOR)
    along = problem.plane.n[0]
    length = problem.shape[along]
    found = []
    for steps in (problem.x_strides, problem.out_strides):
        starts = math.gcd(SECTOR, *(step * size for step in steps if step > steps[along]))
        found.append(elements / length * _row(length, steps[along], size, starts))
    return Traffic(*found)


def _row(count: int, step: int, size: int, starts: int) -> float:
    """Return the bytes of sectors that `count` elements touch, `step` apart, from multiples of `starts`."""
    if step * size >= SECTOR:
        return count * SECTOR * sectors(size, max(size, 1))
    return sectors((count - 1) * step * size + size, starts) * SECTOR


def clustered(config: Config) -> Config:
    """Return the config with the rows and columns of its cluster, if it has one, as its blocks."""
    found: Config = CLUSTERED[config.family](config) if config.family in CLUSTERED else config
    return found


def own_tile_of(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    """Return the rows and columns of the tile that one program makes of a product."""
    if config.family in upright.FAMILIES:
        return upright.tile_of(config, problem)
    if config.family == odd_rows.NAME:
        return odd_rows.tile_of(config, problem)
    return config["BLOCK_M"], config["BLOCK_N"]


def tile_of(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    """Return the rows and columns of a product's tile: of a cluster's, whose programs share operands."""
    return own_tile_of(clustered(config), problem)


def tile_counts(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    """Return how many tiles a product has along its rows, and along its columns."""
    if config.family == odd_rows.NAME:
        return odd_rows.tile_counts(config, problem)
    m, n = tile_of(config, problem)
    return -(-problem.m // m), -(-problem.n // n)


def tiled(problem: Known, config: Config, device: Device | None = None) -> Traffic:
    """Return the traffic with a config's tiles; permutations count whole sectors.

    Copies of operands that no tensor descriptor can read count, and partial sums where programs share a
    tile; those of the last wave's tiles, and of `few_rows_across`, only if a device is given. A lowered
    product counts as its core, without the kernels that convert operands.
    """
    if isinstance(problem, PermuteProblem):
        return _moved(problem, config)
    problem = problem.core
    m, n = tile_of(config, problem)
    rows, columns = tile_counts(config, problem)
    once = problem.batch * problem.k * problem.itemsize
    out = least(problem).written
    found = Traffic(once * (problem.m * columns + problem.rights * problem.n * rows), out)
    if config.family in (tile.NAME, few_rows.NAME):
        return found
    parts = 0  # of tiles, written to memory as partial sums
    if config.family in (descriptor.NAME, odd_rows.NAME) and config["SPLIT_K"] > 1:
        parts = rows * columns * problem.batch * config["SPLIT_K"]
    elif config.family == split.NAME and device is not None:
        tail = split.tail(config, problem, device)
        parts = tail.rest * tail.split
    sums = parts * m * n * _PARTIAL
    if config.family == across.NAME and device is not None:
        shared = across.parts(config, problem, device.processors)
        sums = shared * problem.batch * problem.m * problem.n * _PARTIAL if shared > 1 else 0
    found += Traffic(sums, sums)
    if config.family == odd_rows.NAME:
        x, copies = odd_rows.copied(problem)
        return found + Traffic(x * problem.itemsize, copies * problem.itemsize)
    return found if config.family == across.NAME else found + copied(problem)


def copied(problem: MatmulProblem) -> Traffic:
    """Return the traffic of copying operands that descriptors cannot read; rows of copies are padded."""
    found = Traffic(0, 0)
    sides = (
        (problem.m, problem.k, problem.a_layout == "column"),
        (problem.k, problem.n, problem.b_layout == "column"),
    )
    copies, transposed = operands.copied(problem), operands.turned(problem)
    for (rows, columns, by_columns), copy, transpose in zip(sides, copies, transposed, strict=True):
        if copy:
            outer, inner = (columns, rows) if by_columns != transpose else (rows, columns)
            size = problem.itemsize * problem.batch * outer
            whole = _ROW // problem.itemsize
            found += Traffic(size * inner, size * -(-inner // whole) * whole)
    return found


def sectors(run: float, align: int) -> float:
    """Return the mean number of sectors that a run of bytes touches, over its starts at this alignment."""
    starts = range(0, SECTOR, min(SECTOR, align))
    return sum((start + math.ceil(run) - 1) // SECTOR + 1 for start in starts) / len(starts)


class Covers(NamedTuple):
    """Hold how many tiles a permutation has along m and n, and how many rows and columns each moves."""

    tiles_m: int
    m: int
    tiles_n: int
    n: int


def _covered(extent: int, block: int, least_step: int) -> tuple[int, int]:
    """Return how many tiles cover an extent, and how much each covers, as `tile_span` of permute has it."""
    tiles, step = -(-extent // block), min(least_step, block)
    each = -(-extent // tiles)
    return tiles, -(-each // step) * step if permute.uneven(extent, block) else block


def covers(problem: PermuteProblem, config: Config) -> Covers:
    """Return how a config's tiles cover a permutation, without ends of rows that fill no whole word."""
    size, rows, lanes = problem.itemsize, problem.m, 1
    units = unit(problem.m, min(size, 8)), unit(problem.n, min(size, 8))
    if config.family == permute.PACKED:
        rows, lanes, units = permute.whole_rows(problem), permute.WORD // size, (1, 1)
    tiles_m, words = _covered(rows // lanes, config["BLOCK_M"] // lanes, units[0])
    tiles_n, n = _covered(problem.n, config["BLOCK_N"], units[1])
    return Covers(tiles_m, words * lanes, tiles_n, n)


class _Moves(NamedTuple):
    """Hold the elements that all tiles move, the sides of a tile, and its runs in x and in out."""

    elements: int
    sides: tuple[int, ...]
    runs: tuple[int, int]


def _moves(problem: PermuteProblem, config: Config) -> _Moves:
    """Return what tiles move, some of it a second time at the end of a side."""
    if config.family == boxes.BOX:
        box = boxes.box_of(config, problem)
        moved = boxes.boxes_of(box, problem) * math.prod(box.sides)
        return _Moves(moved, box.sides, boxes.runs(box, problem))
    of = covers(problem, config)
    ends = problem.m - permute.whole_rows(problem) if config.family == permute.PACKED else 0
    moved = (of.tiles_m * of.m + ends) * of.tiles_n * of.n * problem.batch
    own = dict.fromkeys(problem.plane.n, of.n) | dict.fromkeys(problem.plane.m, of.m)
    sides = tuple(min(own.get(i, 1), extent) for i, extent in enumerate(problem.shape))
    return _Moves(moved, sides, problem.runs(of.m, of.n))


def _moved(problem: PermuteProblem, config: Config) -> Traffic:
    moves, size = _moves(problem, config), problem.itemsize
    found = []
    for run, steps in zip(moves.runs, (problem.x_strides, problem.out_strides), strict=True):
        dense = min((step for step in steps if step), default=1)
        if dense > 1:  # with gaps between elements, a row runs along the densest dimension
            count = moves.sides[steps.index(dense)]
            starts = math.gcd(SECTOR, *(step * size for step in steps if step > dense), count * dense * size)
            found.append(moves.elements / count * _row(count, dense, size, starts))
            continue
        starts = math.gcd(SECTOR, *(step * size for step in steps if step >= run), run * size)
        found.append(moves.elements / run * sectors(run * size, starts) * SECTOR)
    return Traffic(*found)
