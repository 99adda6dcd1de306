"""Bytes requested from global memory: element by element, with a config's tiles, and each byte once.

Requests count whether or not a cache answers them; masked elements do not. A product without tiles reads a
row of a and a column of b for every element of the result. A permutation moves each element once however it
is tiled: tiles save 32-byte sectors, the least that memory moves, and only part of a sector is used.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import ITEMSIZE, MatmulProblem, Plain
from tritile.families.common import descriptors, skinny
from tritile.families.common.grids import unit
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tma import family as descriptor
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.odd_rows import family as odd_rows
from tritile.families.permute import boxes
from tritile.families.permute import family as permute
from tritile.families.skinny import family_k as skinny_k
from tritile.families.skinny import family_n

SECTOR: Final = 32  # bytes
_COPY_ROW: Final = 128  # bytes: rows of a copied operand are padded to multiples of these
_PARTIAL: Final = 4  # bytes of an element of a partial sum
_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True)
class Traffic:
    """Bytes that loads (`read`) and stores (`written`) request from global memory."""

    read: float
    written: float

    @property
    def total(self) -> float:
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read + other.read, self.written + other.written)


@dataclass(frozen=True)
class Tiling:
    """How a config tiles a problem.

    `programs` exceeds `tiles` if several programs share the K of a tile, or of some tiles; `partials` is
    then how many bytes of partial sums they write and read back. `filled` is the share of what tiles cover
    (over M, N and K of a product) that is not masked; of a permutation, the share of moved elements that is
    not moved twice.
    """

    tiles: int
    programs: int
    filled: float
    partials: int = 0


def bytes_text(count: float) -> str:
    """Write a number of bytes in decimal units, like memory rates: 134 MB."""
    power = 0
    while count >= 999.5 and power < len(_UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {_UNITS[power]}"


def unique(problem: Plain) -> Traffic:
    """Every input read once, the output written once: a lower bound for any tiling.

    An element that a permutation reads repeatedly, over a dimension of stride 0, counts once. An operand that
    the whole batch of a product shares counts for each matrix, as the problem does not say that it is shared.
    """
    if isinstance(problem, PermuteProblem):
        own = math.prod(n for n, step in zip(problem.shape, problem.x_strides, strict=True) if step)
        return Traffic(own * problem.itemsize, problem.bytes / 2)
    written = problem.batch * problem.m * problem.n * ITEMSIZE[problem.out_dtype]
    return Traffic(problem.bytes - written, written)


def untiled(problem: Plain) -> Traffic:
    """Element by element: a product reuses nothing.

    A permutation goes along the densest dimension of x, and counts whole sectors, those of one row once.
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
        found.append(elements / length * _row_bytes(length, steps[along], size, starts))
    return Traffic(*found)


def tiled(problem: Plain, config: Config, device: Device) -> Traffic:
    """With a config's tiles; permutations count whole sectors.

    Copies of operands that no tensor descriptor can read count, and so do partial sums. A lowered product
    counts as its core, without the kernels that convert operands.
    """
    if isinstance(problem, PermuteProblem):
        return _permute_traffic(problem, config)
    problem = problem.core
    tiles_m, tiles_n = tile_counts(config, problem)
    # Each column of tiles reads all of a, each row of tiles all of b; of pairs, each row of pairs.
    once = problem.batch * problem.k * problem.itemsize
    sums = tiling(problem, config, device).partials
    read = once * (problem.m * tiles_n + problem.rights * problem.n * (tiles_m // config.num_ctas))
    found = Traffic(read + sums, unique(problem).written + sums)
    if config.family == odd_rows.NAME:
        x, copies = odd_rows.copied(problem)
        return found + Traffic(x * problem.itemsize, copies * problem.itemsize)
    if config.family in (tile.NAME, skinny_k.NAME, family_n.NAME):
        return found
    return found + _copy_traffic(problem)


def tiling(problem: Plain, config: Config, device: Device) -> Tiling:
    """Count tiles and programs; a lowered product counts by its core."""
    if isinstance(problem, PermuteProblem):
        if config.family == boxes.BOX:
            box = boxes.box_of(config, problem)
            tiles, sides = boxes.boxes_of(box, problem), math.prod(box.sides)
        else:
            of = coverage(problem, config)
            tiles, sides = of.tiles_m * of.tiles_n * problem.batch, of.m * of.n
        return Tiling(tiles, tiles, min(1.0, math.prod(problem.shape) / (tiles * sides)))
    problem = problem.core
    m, n = tile_of(config, problem)
    tiles_m, tiles_n = tile_counts(config, problem)
    tiles = tiles_m * tiles_n * problem.batch
    programs, sums = tiles, 0  # elements of partial sums
    if config.family in (descriptor.NAME, odd_rows.NAME):
        programs = tiles * config["SPLIT_K"]
        sums = programs * m * n * (config["SPLIT_K"] > 1)
    elif config.family == warpgroups.NAME and warpgroups.splits(config):
        made = warpgroups.tail(config, problem, device.processors)
        programs = made.whole + made.rest * made.split
        sums = made.rest * made.split * m * n
    elif config.family == family_n.NAME:
        parts = family_n.parts(config, problem, device.processors)
        programs = tiles * parts
        sums = parts * problem.batch * problem.m * problem.n * (parts > 1)
    padded_k = -(-problem.k // config["BLOCK_K"]) * config["BLOCK_K"]
    filled = problem.m / (tiles_m * m) * problem.n / (tiles_n * n) * problem.k / padded_k
    return Tiling(tiles, programs, filled, sums * _PARTIAL)


def tile_of(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    """Rows and columns of a product's tile."""
    if config.family in skinny.FAMILIES:
        return skinny.tile_of(config, problem)
    if config.family == odd_rows.NAME:
        return odd_rows.tile_of(config, problem)
    return config["BLOCK_M"], config["BLOCK_N"]


def tile_counts(config: Config, problem: MatmulProblem) -> tuple[int, int]:
    """Number of tiles along M, in whole pairs if CTAs are paired, and along N."""
    if config.family == odd_rows.NAME:
        return odd_rows.tile_counts(config, problem)
    m, n = tile_of(config, problem)
    return -(-problem.m // (m * config.num_ctas)) * config.num_ctas, -(-problem.n // n)


def _copy_traffic(problem: MatmulProblem) -> Traffic:
    """Traffic of copying operands that descriptors cannot read; rows of copies are padded."""
    found = Traffic(0, 0)
    sides = (
        (problem.m, problem.k, problem.a_layout == "column"),
        (problem.k, problem.n, problem.b_layout == "column"),
    )
    copies, transposed = descriptors.copied(problem), descriptors.k_major_copies(problem)
    for (rows, columns, by_columns), copy, transpose in zip(sides, copies, transposed, strict=True):
        if copy:
            outer, inner = (columns, rows) if by_columns != transpose else (rows, columns)
            size = problem.itemsize * problem.batch * outer
            whole = _COPY_ROW // problem.itemsize
            found += Traffic(size * inner, size * -(-inner // whole) * whole)
    return found


def sectors(run: float, align: int) -> float:
    """Mean number of sectors that a run of bytes touches, over its starts at this alignment."""
    starts = range(0, SECTOR, min(SECTOR, align))
    return sum((start + math.ceil(run) - 1) // SECTOR + 1 for start in starts) / len(starts)


def _row_bytes(count: int, step: int, size: int, starts: int) -> float:
    """Bytes of the sectors that `count` elements touch, `step` apart, from multiples of `starts`."""
    if step * size >= SECTOR:
        return count * SECTOR * sectors(size, max(size, 1))
    return sectors((count - 1) * step * size + size, starts) * SECTOR


class Coverage(NamedTuple):
    """How many tiles a permutation has along m and n, and how many rows and columns each moves."""

    tiles_m: int
    m: int
    tiles_n: int
    n: int


def coverage(problem: PermuteProblem, config: Config) -> Coverage:
    """Return how a config's tiles cover a permutation."""

    def covered(extent: int, block: int, least_step: int) -> tuple[int, int]:  # as `tile_span` of permute
        tiles, step = -(-extent // block), min(least_step, block)
        each = -(-extent // tiles)
        return tiles, -(-each // step) * step if permute.uneven(extent, block) else block

    word = min(problem.itemsize, 8)
    m = covered(problem.m, config["BLOCK_M"], unit(problem.m, word))
    return Coverage(*m, *covered(problem.n, config["BLOCK_N"], unit(problem.n, word)))


def _permute_traffic(problem: PermuteProblem, config: Config) -> Traffic:
    """Sectors of all runs of all tiles, some of which are moved a second time at the end of a side."""
    size = problem.itemsize
    if config.family == boxes.BOX:
        box = boxes.box_of(config, problem)
        elements, sides = boxes.boxes_of(box, problem) * math.prod(box.sides), box.sides
        runs = box.run, box.pieces.size
    else:
        of = coverage(problem, config)
        elements = of.tiles_m * of.m * of.tiles_n * of.n * problem.batch
        own = dict.fromkeys(problem.plane.n, of.n) | dict.fromkeys(problem.plane.m, of.m)
        sides = tuple(min(own.get(i, 1), extent) for i, extent in enumerate(problem.shape))
        runs = problem.runs(of.m, of.n)
    found = []
    for run, steps in zip(runs, (problem.x_strides, problem.out_strides), strict=True):
        dense = min((step for step in steps if step), default=1)
        if dense > 1:  # with gaps between elements, a row runs along the densest dimension
            count = sides[steps.index(dense)]
            starts = math.gcd(SECTOR, *(step * size for step in steps if step > dense), count * dense * size)
            found.append(elements / count * _row_bytes(count, dense, size, starts))
            continue
        starts = math.gcd(SECTOR, *(step * size for step in steps if step >= run), run * size)
        found.append(elements / run * sectors(run * size, starts) * SECTOR)
    return Traffic(*found)
