"""Find what a turn loads at each step of a product, and what a turn of a permutation moves."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.families.permute import family as permute
from tritile.lab.report.tiling.order import Place, Tiling
from tritile.lab.traffic import SECTOR


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

    @classmethod
    def cut(cls, top: int, left: int, height: int, width: int, inside: tuple[int, int]) -> "Block":
        """Return a block cut at the edges of a matrix; `inside` has the matrix's rows and columns."""
        return cls(top, left, height, width, min(height, inside[0] - top), min(width, inside[1] - left))

    @property
    def elements(self) -> int:
        """Count the elements inside the matrix."""
        return self.rows * self.columns

    @property
    def masked(self) -> int:
        """Count the elements outside the matrix."""
        return self.height * self.width - self.elements


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


def _matmul(tiling: Tiling) -> MatmulProblem:
    assert isinstance(tiling.problem, MatmulProblem)
    return tiling.problem


def step_of(tiling: Tiling, turn: int, step: int) -> Step:
    """Return a step of a turn of a product, both counted from 0. Both must exist."""
    problem, config, place = _matmul(tiling), tiling.config, tiling.place(turn)
    (height, width), depth = tiling.covers, config["BLOCK_K"]
    m, n, k = place.row * height, place.column * width, tiling.k_blocks(turn)[step] * depth
    a = Block.cut(m, k, height, depth, (problem.m, problem.k))
    b = Block.cut(k, n, depth, width, (problem.k, problem.n))
    c = Block.cut(m, n, height, width, (problem.m, problem.n))
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


class Move(NamedTuple):
    """Describe the tile that a turn moves, as a block of x's m rows and n columns.

    Masked elements are not moved. `again` counts the first rows and columns that the tile before moves too,
    to the same place. `ends` tells whether this turn also moves the rows at both ends of each column that
    fill no whole word (family packed). `read_sectors` and `written_sectors` count the turn's sectors;
    `untiled` counts those it would write if it wrote x row by row.
    """

    block: Block
    again: tuple[int, int]
    ends: bool
    bytes: int
    read_sectors: int
    written_sectors: int
    untiled: int


def _permute(tiling: Tiling) -> PermuteProblem:
    assert isinstance(tiling.problem, PermuteProblem)
    return tiling.problem


def lanes_of(tiling: Tiling) -> int:
    """Return how many rows one moved word holds: one, except in family packed."""
    return permute.WORD // _permute(tiling).itemsize if tiling.config.family == permute.PACKED else 1


def whole_rows(tiling: Tiling) -> int:
    """Count the rows that tiles cover: in each column those that fill whole words; the rest are its ends."""
    lanes = lanes_of(tiling)
    return (_permute(tiling).m - lanes + 1) // lanes * lanes


def offsets(sizes: Sequence[int], strides: Sequence[int], indices: Any) -> Any:
    """Return the offsets, in elements, of indices into dimensions given innermost first."""
    found = np.zeros_like(indices)
    for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        last = i == len(sizes) - 1
        found = found + (indices if last else indices % size) * stride
        indices = indices // size
    return found


def strides_of(problem: PermuteProblem) -> dict[str, Any]:
    """Return sizes, strides of x and strides of out for m, n and batch, each innermost first."""
    return {
        name: [[of[i] for i in dims] for of in (problem.shape, problem.x_strides, problem.out_strides)]
        for name, dims in (
            ("m", problem.plane.m),
            ("n", problem.plane.n),
            ("batch", problem.plane.batch[::-1]),
        )
    }


def starts(tiling: Tiling, matrix: int, columns: Any) -> Any:
    """Return the row at which the first whole word of out starts, for each column of a matrix."""
    dims = strides_of(_permute(tiling))
    (batch, _, batch_out), (n, _, n_out) = dims["batch"], dims["n"]
    at = offsets(batch, batch_out, np.asarray(matrix)) + offsets(n, n_out, columns)
    return -at % lanes_of(tiling)


def _corner(tiling: Tiling, place: Place) -> tuple[int, int]:
    """Return the first row and column of a tile, moved back where it would cross the edge."""
    (height, width), whole = tiling.covers, whole_rows(tiling)
    return min(place.row * height, whole - height), min(place.column * width, tiling.problem.n - width)


def covered(tiling: Tiling, turn: int) -> tuple[Any, Any]:
    """Return rows and columns, both [height, width], of the elements of x in a turn's tile, without ends."""
    place, (height, width) = tiling.place(turn), tiling.covers
    top, left = _corner(tiling, place)
    columns = np.arange(left, left + width)[None, :]
    rows = np.arange(top, top + height)[:, None] + starts(tiling, place.matrix, columns)
    return rows, np.broadcast_to(columns, rows.shape)


def move_of(tiling: Tiling, turn: int) -> Move:
    """Return what a turn of a permutation moves."""
    problem, config, place = _permute(tiling), tiling.config, tiling.place(turn)
    height, width = tiling.covers
    rows, columns = covered(tiling, turn)
    top, left = _corner(tiling, place)
    dims, size = strides_of(problem), problem.itemsize
    indices = {"m": rows, "n": columns, "batch": np.asarray(place.matrix)}

    def sectors(i: int) -> Any:
        return sum(offsets(dims[name][0], dims[name][i], at) for name, at in indices.items()) * size // SECTOR

    read, written = sectors(1), sectors(2)
    by_row = np.sort(written, axis=1)
    return Move(
        Block(top, left, config["BLOCK_M"], config["BLOCK_N"], height, width),
        (place.row * height - top, place.column * width - left),
        place.row == 0 and lanes_of(tiling) > 1,
        height * width * size,
        np.unique(read).size,
        np.unique(written).size,
        by_row.shape[0] + int((by_row[:, 1:] != by_row[:, :-1]).sum()),
    )
