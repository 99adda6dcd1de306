"""What a turn of a permutation reads and writes, and in how many sectors of 32 bytes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tritile.core.problem import PermuteProblem
from tritile.families.permute import family as permute
from tritile.lab.counting import SECTOR
from tritile.lab.report.tiling.blocks import Block
from tritile.lab.report.tiling.order import Tiling


class Move(NamedTuple):
    """The tile that a turn moves, as a block of x's m rows and n columns; what is masked is not moved.

    `again`: its first rows and columns that the tile before it moves too, the same way. `ends`: whether the
    few rows that fill no whole word, at both ends of each column, are this turn's as well (family packed).
    Sectors are those that a turn reads and writes; `untiled`, those that it would write if it wrote x row by
    row as it reads it.
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
    """Rows to a word that the kernel moves: one, but for family packed."""
    return permute.WORD // _permute(tiling).itemsize if tiling.config.family == permute.PACKED else 1


def whole_rows(tiling: Tiling) -> int:
    """Rows that tiles cover: of each column as many as fill whole words; the others are its ends."""
    lanes = lanes_of(tiling)
    return (_permute(tiling).m - lanes + 1) // lanes * lanes


def offsets(sizes: Sequence[int], strides: Sequence[int], indices: Any) -> Any:
    """Elements to these indices of a run of dimensions, innermost first."""
    found = np.zeros_like(indices)
    for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        last = i == len(sizes) - 1
        found = found + (indices if last else indices % size) * stride
        indices = indices // size
    return found


def strides_of(problem: PermuteProblem) -> dict[str, Any]:
    """Sizes of the dimensions of m, of n (innermost first) and of the batch, with strides of x and out."""
    return {
        name: [[of[i] for i in dims] for of in (problem.shape, problem.x_strides, problem.out_strides)]
        for name, dims in (
            ("m", problem.plane.m),
            ("n", problem.plane.n),
            ("batch", problem.plane.batch[::-1]),
        )
    }


def starts(tiling: Tiling, matrix: int, columns: Any) -> Any:
    """The row at which the first whole word of out starts, in each of these columns of a matrix."""
    dims = strides_of(_permute(tiling))
    (batch, _, batch_out), (n, _, n_out) = dims["batch"], dims["n"]
    at = offsets(batch, batch_out, np.asarray(matrix)) + offsets(n, n_out, columns)
    return -at % lanes_of(tiling)


def covered(tiling: Tiling, turn: int) -> tuple[Any, Any]:
    """Rows and columns, both [height, width], of the elements of x in a turn's tile, ends left out."""
    problem, place = _permute(tiling), tiling.place(turn)
    (height, width), whole = tiling.covers, whole_rows(tiling)
    top, left = min(place.row * height, whole - height), min(place.column * width, problem.n - width)
    columns = np.arange(left, left + width)[None, :]
    rows = np.arange(top, top + height)[:, None] + starts(tiling, place.matrix, columns)
    return rows, np.broadcast_to(columns, rows.shape)


def move_of(tiling: Tiling, turn: int) -> Move:
    """What a turn of a permutation moves."""
    problem, config, place = _permute(tiling), tiling.config, tiling.place(turn)
    (height, width), whole = tiling.covers, whole_rows(tiling)
    rows, columns = covered(tiling, turn)
    top, left = min(place.row * height, whole - height), int(columns[0, 0])
    dims, size = strides_of(problem), problem.itemsize
    read, written = (
        (
            offsets(dims["m"][0], dims["m"][i], rows)
            + offsets(dims["n"][0], dims["n"][i], columns)
            + offsets(dims["batch"][0], dims["batch"][i], np.asarray(place.matrix))
        )
        * size
        // SECTOR
        for i in (1, 2)
    )
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
