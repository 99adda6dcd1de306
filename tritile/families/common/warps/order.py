"""Tell which tiles a program makes, and which part of their K."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from tritile.families.common.verdict import wanted


class Tail(NamedTuple):
    """Describe the split tiles: the `rest` tiles after the first `whole`, in `split` parts each.

    `parts` points to a workspace with room for one part of each program. `counters` points to arrival
    counters, one for each tile and consumer.
    """

    parts: Any
    counters: Any
    whole: Any
    rest: Any
    split: Any


class Walk(NamedTuple):
    """Hold the numbers of tiles and of K iterations; `flag` is None, or the fallback flag that skips them.

    `tail`: a `Tail` where the last tiles are split along K, else None.
    """

    tiles_m: Any
    tiles_n: Any
    inner_batch: Any
    tiles: Any
    iterations: Any
    flag: Any
    tail: Any


@gluon.jit
def counts_of(M, N, K, how: gl.constexpr):
    """Return rows and columns of tiles, of clusters where there are any, and K iterations."""
    tiles_m = gl.cdiv(N if how.TRANSPOSED else M, how.BLOCK_M * how.DOWN)
    tiles_n = gl.cdiv(M if how.TRANSPOSED else N, how.BLOCK_N * how.ACROSS)
    iterations = gl.cdiv(K, how.BLOCK_K)
    return tiles_m, tiles_n, iterations


@gluon.jit
def pieces_of(walk, how: gl.constexpr):
    """Return first, end and step of the pieces that a program makes: tiles, or parts of one."""
    if walk.tail is not None:
        step = gl.num_programs(0)
        me = gl.program_id(0)
        tail = walk.tail
        end = gl.cdiv(gl.maximum(tail.whole - me, 0), step) + gl.where(me < tail.rest * tail.split, 1, 0)
        first = 0
        step = 1
    elif how.FLAT:
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
def piece_at(piece, walk):
    """Return the tile of a program's piece, and its K iterations: from, to.

    Parts of a split tile lie `rest` programs apart.
    """
    index = piece
    start = 0
    end = walk.iterations
    if walk.tail is not None:
        tail = walk.tail
        me = gl.program_id(0)
        own = me + piece * gl.num_programs(0)
        rest = gl.maximum(tail.rest, 1)
        part = me // rest
        is_part = own >= tail.whole
        start = part * walk.iterations // tail.split
        end = (part + 1) * walk.iterations // tail.split
        index = gl.where(is_part, tail.whole + me % rest, own)
        start = gl.where(is_part, start, 0)
        end = gl.where(is_part, end, walk.iterations)
    return index, start, end


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
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS * how.DOWN
    m = row * how.BLOCK_M * how.DOWN + WHICH * ROWS
    n = column * how.BLOCK_N * how.ACROSS
    return m, n
