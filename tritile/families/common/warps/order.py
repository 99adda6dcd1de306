"""Which tiles a program makes, and in which order."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from tritile.families.common.verdict import wanted


class Walk(NamedTuple):
    """Hold the numbers of tiles and of K iterations; `flag` is None, or the fallback flag that skips them."""

    tiles_m: Any
    tiles_n: Any
    inner_batch: Any
    tiles: Any
    iterations: Any
    flag: Any


@gluon.jit
def counts_of(M, N, K, how: gl.constexpr):
    """Return rows and columns of tiles, and K iterations."""
    tiles_m = gl.cdiv(M, how.BLOCK_M)
    tiles_n = gl.cdiv(N, how.BLOCK_N)
    iterations = gl.cdiv(K, how.BLOCK_K)
    return tiles_m, tiles_n, iterations


@gluon.jit
def tiles_of(walk, how: gl.constexpr):
    """Return first, end and step of the tiles that a program makes."""
    if how.FLAT:
        first = gl.program_id(0) * 0
        step = first + 1
        end = step
    else:
        first = gl.program_id(0)
        step = gl.num_programs(0)
        end = walk.tiles
    if walk.flag is not None:
        if how.WAIT:
            gdc_wait()
        end = gl.where(wanted(walk.flag, how.VERDICTS), end, 0)
    return first, end, step


@gluon.jit
def tile_at(index, walk, how: gl.constexpr):
    """Return matrix (outer, inner), row and column of tile `index`, walked down bands of GROUP_M tile rows.

    FLAT: of the program's only tile, by its place in the grid. A division takes some 0.1 us, which small
    products feel. Not BATCHED: there is one matrix.
    """
    matrix = gl.program_id(2)
    row = gl.program_id(0)
    column = gl.program_id(1)
    if not how.FLAT:
        tiles = walk.tiles_m * walk.tiles_n
        if how.BATCHED:
            matrix = index // tiles
            index = index % tiles
        band = how.GROUP_M * walk.tiles_n
        first = (index // band) * how.GROUP_M
        rows = gl.minimum(walk.tiles_m - first, how.GROUP_M)
        within = index % band
        row = first + within % rows
        column = within // rows
    outer = matrix * 0
    inner = outer
    if how.BATCHED:
        outer = matrix // walk.inner_batch
        inner = matrix % walk.inner_batch
    return outer, inner, row, column


@gluon.jit
def corner_of(WHICH: gl.constexpr, row, column, how: gl.constexpr):
    """Return the first row and column of consumer WHICH's part of the tile at (row, column)."""
    m = row * how.BLOCK_M + WHICH * (how.BLOCK_M // how.CONSUMERS)
    n = column * how.BLOCK_N
    return m, n
