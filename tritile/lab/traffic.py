"""How many bytes a problem asks of global memory: with no tiles, with those of a config, and at the least.

These are what loads and stores ask for, caches aside, and edges that are masked off left out. Counted so,
a product with no reuse reads a row of a and a column of b for every element. A permutation moves each
element once however it is tiled: what tiles save there is sectors, of 32 bytes, that are moved for part
of what they hold.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import ITEMSIZE, Known, MatmulProblem, PermuteProblem
from tritile.families.common import operands
from tritile.families.common.grids import unit
from tritile.families.matmul_split import family as split
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tma import family as descriptor
from tritile.families.permute import family as permute
from tritile.lab.counting import SECTOR

_ROW: Final = 128  # bytes, of which rows of a copied operand are whole multiples
_PARTIAL: Final = 4  # bytes of an element of a partial sum


@dataclass(frozen=True)
class Traffic:
    """Bytes that loads and stores ask of global memory."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read + other.read, self.written + other.written)


def least(problem: Known) -> Traffic:
    """Every input read once, the output written once: no tiling takes less.

    What a permutation reads again and again, as it is stretched over a dimension, counts once. Of a product
    the problem does not tell whether its batch shares an operand.
    """
    if isinstance(problem, PermuteProblem):
        own = math.prod(n for n, step in zip(problem.shape, problem.x_strides, strict=True) if step)
        return Traffic(own * problem.itemsize, problem.bytes / 2)
    written = problem.batch * problem.m * problem.n * ITEMSIZE[problem.out_dtype]
    return Traffic(problem.bytes - written, written)


def untiled(problem: Known) -> Traffic:
    """Element by element: a product with no reuse; a permutation that goes along the densest dimension of x.

    Of the latter sectors count, those of one row once.
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
    """Bytes of the sectors that so many elements touch, `step` elements apart, from multiples of `starts`."""
    if step * size >= SECTOR:
        return count * SECTOR * sectors(size, max(size, 1))
    return sectors((count - 1) * step * size + size, starts) * SECTOR


def tiled(problem: Known, config: Config, device: Device | None = None) -> Traffic:
    """With the tiles of a config; of permutations, whole sectors.

    Copies of operands that no tensor descriptor can read, and partial sums where programs share a tile,
    are among it; those of the last wave's tiles where a device is given. Of a product made through
    another it is that of the other, without what makes operands over.
    """
    if isinstance(problem, PermuteProblem):
        return _moved(problem, config)
    problem = problem.core
    rows, columns = -(-problem.m // config["BLOCK_M"]), -(-problem.n // config["BLOCK_N"])
    once = problem.batch * problem.k * problem.itemsize
    out = least(problem).written
    found = Traffic(once * (problem.m * columns + problem.rights * problem.n * rows), out)
    if config.family == tile.NAME:
        return found
    parts = 0  # of tiles, left in memory
    if config.family == descriptor.NAME and config["SPLIT_K"] > 1:
        parts = rows * columns * problem.batch * config["SPLIT_K"]
    elif config.family == split.NAME and device is not None:
        tail = split.tail(config, problem, device)
        parts = tail.rest * tail.split
    sums = parts * config["BLOCK_M"] * config["BLOCK_N"] * _PARTIAL
    found += Traffic(sums, sums)
    return found + copied(problem)


def copied(problem: MatmulProblem) -> Traffic:
    """What copying operands takes which descriptors cannot read as they lie: rows of copies are padded."""
    found = Traffic(0, 0)
    sides = (
        (problem.m, problem.k, problem.a_layout == "column"),
        (problem.k, problem.n, problem.b_layout == "column"),
    )
    copies, turns = operands.copied(problem), operands.turned(problem)
    for (rows, columns, by_columns), copy, turn in zip(sides, copies, turns, strict=True):
        if copy:
            outer, inner = (columns, rows) if by_columns != turn else (rows, columns)
            size = problem.itemsize * problem.batch * outer
            whole = _ROW // problem.itemsize
            found += Traffic(size * inner, size * -(-inner // whole) * whole)
    return found


def sectors(run: float, align: int) -> float:
    """Sectors that a run of so many bytes touches, the mean over where it may start at this alignment."""
    starts = range(0, SECTOR, min(SECTOR, align))
    return sum((start + math.ceil(run) - 1) // SECTOR + 1 for start in starts) / len(starts)


class Covers(NamedTuple):
    """Tiles of a permutation: how many along m and n of each matrix, and how much of either each moves."""

    tiles_m: int
    m: int
    tiles_n: int
    n: int


def _covered(extent: int, block: int, least_step: int) -> tuple[int, int]:
    """How many tiles cover an extent, and how much each covers of it: as `tile_span` of permute has it."""
    tiles, step = -(-extent // block), min(least_step, block)
    each = -(-extent // tiles)
    return tiles, -(-each // step) * step if permute.uneven(extent, block) else block


def covers(problem: PermuteProblem, config: Config) -> Covers:
    """How the tiles of a config cover a permutation; the ends of rows that fill no whole word left out."""
    size, rows, lanes = problem.itemsize, problem.m, 1
    units = unit(problem.m, min(size, 8)), unit(problem.n, min(size, 8))
    if config.family == permute.PACKED:
        rows, lanes, units = permute.whole_rows(problem), permute.WORD // size, (1, 1)
    tiles_m, words = _covered(rows // lanes, config["BLOCK_M"] // lanes, units[0])
    tiles_n, n = _covered(problem.n, config["BLOCK_N"], units[1])
    return Covers(tiles_m, words * lanes, tiles_n, n)


def _moved(problem: PermuteProblem, config: Config) -> Traffic:
    of, size = covers(problem, config), problem.itemsize
    ends = problem.m - permute.whole_rows(problem) if config.family == permute.PACKED else 0
    elements = (of.tiles_m * of.m + ends) * of.tiles_n * of.n * problem.batch
    found = []
    for run, steps in zip(problem.runs(of.m, of.n), (problem.x_strides, problem.out_strides), strict=True):
        dense = min((step for step in steps if step), default=1)
        if dense > 1:  # elements with gaps between them: a row of the tile along the densest dimension
            along = steps.index(dense)
            side = of.m if along in problem.plane.m else of.n if along in problem.plane.n else 1
            count = min(side, problem.shape[along])
            starts = math.gcd(SECTOR, *(step * size for step in steps if step > dense), count * dense * size)
            found.append(elements / count * _row(count, dense, size, starts))
            continue
        starts = math.gcd(SECTOR, *(step * size for step in steps if step >= run), run * size)
        found.append(elements / run * sectors(run * size, starts) * SECTOR)
    return Traffic(*found)
