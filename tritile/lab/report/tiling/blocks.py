"""Which elements a turn touches: blocks of A and B step by step, and what moving them costs."""

from typing import NamedTuple

from tritile.core.problem import MatmulProblem
from tritile.lab.report.tiling.order import Tiling


class Block(NamedTuple):
    """A rectangle of a matrix that starts at (top, left).

    `height` x `width` elements are asked for, of which the first `rows` x `columns` lie inside of the matrix;
    the others are masked: no memory is touched for them, and they are read as zero.
    """

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """How many elements lie inside."""
        return self.rows * self.columns

    @property
    def masked(self) -> int:
        """How many lie outside."""
        return self.height * self.width - self.elements


def cut(top: int, left: int, height: int, width: int, inside: tuple[int, int]) -> Block:
    """The block with its edges told: `inside` is the matrix, rows and columns."""
    return Block(top, left, height, width, min(height, inside[0] - top), min(width, inside[1] - left))


class Step(NamedTuple):
    """One step of a turn through K: its blocks of A, B and C, and bytes.

    `bytes` are read at this step and `so_far` up to its end. `untiled` would be, so far, if each element of
    the tile were made by itself, from a row of A and a column of B. `masked` is the share of both blocks that
    is zero-filled. `k` counts elements of K that are done.
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
    """Blocks that the programs of a wave load at one step: all of them, and how many different ones."""

    loads: int
    a: int
    b: int


def _matmul(tiling: Tiling) -> MatmulProblem:
    assert isinstance(tiling.problem, MatmulProblem)
    return tiling.problem


def step_of(tiling: Tiling, turn: int, step: int) -> Step:
    """What a turn of a product does at a step, from 0. `turn` and `step` must exist."""
    problem, config, place = _matmul(tiling), tiling.config, tiling.place(turn)
    height, width, depth = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    m, n, k = place.row * height, place.column * width, tiling.k_blocks(turn)[step] * depth
    a = cut(m, k, height, depth, (problem.m, problem.k))
    b = cut(k, n, depth, width, (problem.k, problem.n))
    c = cut(m, n, height, width, (problem.m, problem.n))
    done = step * depth + a.columns  # only the last block of K can be short, and it is a turn's last
    return Step(
        a, b, c, done,
        bytes=(a.elements + b.elements) * problem.itemsize,
        so_far=(c.rows + c.columns) * done * problem.itemsize,
        untiled=2 * c.elements * done * problem.itemsize,
        masked=(a.masked + b.masked) / (a.height * a.width + b.height * b.width),
    )  # fmt: skip


def total_bytes(tiling: Tiling) -> tuple[int, int]:
    """Bytes that all loads of a product ask for: with these tiles, and with none."""
    problem = _matmul(tiling)
    tiled = problem.k * (problem.m * tiling.columns + problem.n * tiling.rows)
    untiled = 2 * problem.m * problem.n * problem.k
    return tiled * problem.batch * problem.itemsize, untiled * problem.batch * problem.itemsize


def sharing(tiling: Tiling, wave: int) -> Sharing:
    """How far the programs of a wave of a product load the same blocks, all at one step."""
    a, b, turns = set(), set(), tiling.wave(wave)
    for turn in turns:
        matrix, row, column = tiling.place(turn)
        part = tiling.part(turn)
        a.add((matrix, part, row))
        b.add((matrix, part, column))
    return Sharing(2 * len(turns), len(a), len(b))
