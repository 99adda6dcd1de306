"""Store what consumers made, through shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tritile.families.common.epilogue import finished
from tritile.families.common.warps import exchange, tma
from tritile.families.common.warps.pipeline import flat


@gluon.constexpr_function
def cluster_basis(down, across):
    """Return where the second program's rows and columns begin, in parts; nothing for one program."""
    return [[down - 1, across - 1]] if down * across > 1 else []


@gluon.constexpr_function
def by_rows(columns, down, across):
    """Return the layout of rows in which a warp reads up to 32 columns of a program at once."""
    wide = min(columns // across, 32)
    return gl.BlockedLayout([1, 1], [32 // wide, wide], [4, 1], [1, 0], cluster_basis(down, across))


@gluon.jit
def fused(sums, rows, columns, outer, inner, result, how: gl.constexpr):
    """Return the sums of these rows and columns with the epilogue applied."""
    if how.EPILOGUE is not None:
        sums = finished(
            sums, rows, columns, result.M, result.N, (outer, inner), (1, 1), result.extra, how.EPILOGUE
        )
    return sums


@gluon.jit
def converted(sums, outer, inner, m, n, result, how: gl.constexpr):
    """Return the sums of a tile at (m, n) as they are stored."""
    rows = m + gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    columns = n + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    return fused(sums, rows, columns, outer, inner, result, how).to(result.ptr.dtype.element_ty)


@gluon.jit
def store_masked(part, rows, columns, outer, inner, result):
    """Store by pointers what of rows and columns is inside the result."""
    matrix = outer.to(gl.int64) * result.stride_o + inner.to(gl.int64) * result.stride_i
    by_row = rows[:, None].to(gl.int64) * result.stride_m
    offsets = by_row + columns[None, :].to(gl.int64) * result.stride_n
    inside = (rows[:, None] < result.M) & (columns[None, :] < result.N)
    gl.store(result.ptr + matrix + offsets, part.to(result.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_part(desc, tile, part, outer, inner, m, n, result, how: gl.constexpr):
    """Store through shared memory, once the store before has let go of it; masked where no descriptor can.

    TRANSPOSED: `part`, m and n are of out^T.
    """
    DOWN: gl.constexpr = how.ACROSS if how.TRANSPOSED else how.DOWN
    ACROSS: gl.constexpr = how.DOWN if how.TRANSPOSED else how.ACROSS
    if how.TRANSPOSED:
        part = part.permute((1, 0))
        m, n = n, m
    part = converted(part, outer, inner, m, n, result, how)
    if how.BY_DESCRIPTOR:
        tma.store_wait(0)
        flat(tile).store(part)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [outer, inner, m, n], tile)
    else:
        layout: gl.constexpr = by_rows(part.shape[1], DOWN, ACROSS)
        flat(tile).store(part)
        part = flat(tile).load(layout)
        rows = m + gl.arange(0, part.shape[0], gl.SliceLayout(1, layout))
        columns = n + gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
        store_masked(part, rows, columns, outer, inner, result)


@gluon.jit
def columns_between(how: gl.constexpr):
    """Return how many columns the second program's half of a subtile lies further on than its place says."""
    skipped = 0
    if how.ACROSS == 2:
        skipped = exchange.rank() * (how.MAIN_N // 2)
    return skipped


@gluon.jit
def store_tile(WHICH: gl.constexpr, acc, rest, outer, inner, m, n, skipped, result, how: gl.constexpr):
    """Store what a consumer made of a tile, in SUBTILES parts. `skipped`: what `columns_between` returned."""
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = how.MAIN_N // 2
    tile = result.tile.index(WHICH)
    if how.SUBTILES == 2:
        halves = acc.reshape((ROWS, how.ACROSS, 2, HALF)).permute((0, 1, 3, 2))
        left, right = halves.split()
        left = left.reshape((ROWS, how.ACROSS * HALF))
        right = right.reshape((ROWS, how.ACROSS * HALF))
        store_part(result.desc, tile, left, outer, inner, m, n + skipped, result, how)
        store_part(result.desc, tile, right, outer, inner, m, n + skipped + HALF, result, how)
    else:
        store_part(result.desc, tile, acc, outer, inner, m, n, result, how)
    if how.MAIN_N < how.BLOCK_N:
        tile = result.rest_tile.index(WHICH)
        n_rest = n + how.MAIN_N * how.ACROSS
        store_part(result.rest_desc, tile, rest, outer, inner, m, n_rest, result, how)
