"""Find the blocks of A and B that a turn loads at each step, and the bytes that takes."""

from typing import NamedTuple

from tritile.core.problem import MatmulProblem
from tritile.lab.report.tiling.order import Tiling


class Block(NamedTuple):
    """Describe a rectangle of a matrix that starts at (top, left).

    A program asks for `height` x `width` elements. The first `rows` x `columns` lie inside the matrix; the
    others are masked: they touch no memory and read as zero.
    """

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """Count the elements inside the matrix."""
        return self.rows * self.columns

    @property
    def masked(self) -> int:
        """Count the elements outside the matrix."""
        return self.height * self.width - self.elements


def cut(top: int, left: int, height: int, width: int, inside: tuple[int, int]) -> Block:
    """Return a block cut at the edges of a matrix; `inside` has the matrix's rows and columns."""
    return Block(top, left, height, width, min(height, inside[0] - top), min(width, inside[1] - left))


class Step(NamedTuple):
    """Describe one step of a turn along K: its blocks of A, B and C, and bytes.

    `bytes` counts bytes read at this step, `so_far` those up to its end. `untiled` counts those up to its
    end if each element of the tile were made alone, from a row of A and a column of B. `masked` is the
    zero-filled share of both blocks. `k` counts the elements of K that are done.
    """

    a: Block
    b: Block
    c: Block
    k: int
    bytes: int
    so_far: int
    untiled: int
    masked: float


class Sharing(NamedTuple):
    """Count the blocks that a wave loads at one step: all loads, and different blocks of A and of B."""

    loads: int
    a: int
    b: int


def _matmul(tiling: Tiling) -> MatmulProblem:
    assert isinstance(tiling.problem, MatmulProblem)
    return tiling.problem


def step_of(tiling: Tiling, turn: int, step: int) -> Step:
    """Return a step of a turn of a product, both counted from 0. Both must exist."""
    problem, config, place = _matmul(tiling), tiling.config, tiling.place(turn)
    (height, width), depth = tiling.covers, config["BLOCK_K"]
    m, n, k = place.row * height, place.column * width, tiling.k_blocks(turn)[step] * depth
    a = cut(m, k, height, depth, (problem.m, problem.k))
    b = cut(k, n, depth, width, (problem.k, problem.n))
    c = cut(m, n, height, width, (problem.m, problem.n))
    done = step * depth + a.columns  # only the last block of K can be short
    return Step(
        a, b, c, done,
        bytes=(a.elements + b.elements) * problem.itemsize,
        so_far=(c.rows + c.columns) * done * problem.itemsize,
        untiled=2 * c.elements * done * problem.itemsize,
        masked=(a.masked + b.masked) / (a.height * a.width + b.height * b.width),
    )  # fmt: skip


def total_bytes(tiling: Tiling) -> tuple[int, int]:
    """Return the bytes that all loads of a product ask for, with these tiles and without tiles."""
    problem = _matmul(tiling)
    tiled = problem.k * (problem.m * tiling.columns + problem.n * tiling.rows)
    untiled = 2 * problem.m * problem.n * problem.k
    return tiled * problem.batch * problem.itemsize, untiled * problem.batch * problem.itemsize


def sharing(tiling: Tiling, wave: int) -> Sharing:
    """Count the blocks that the programs of a wave load at one step, and how many differ."""
    a, b, turns = set(), set(), tiling.wave(wave)
    for turn in turns:
        matrix, row, column = tiling.place(turn)
        part = tiling.part(turn)
        a.add((matrix, part, row))
        b.add((matrix, part, column))
    return Sharing(2 * len(turns), len(a), len(b))
