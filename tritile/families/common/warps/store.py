"""Store what consumers made, through shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tritile.families.common.epilogue import finished
from tritile.families.common.warps import tma
from tritile.families.common.warps.pipeline import flat


@gluon.constexpr_function
def by_rows(columns):
    """Return the layout of rows in which a warp reads up to 32 columns at once."""
    wide = min(columns, 32)
    return gl.BlockedLayout([1, 1], [32 // wide, wide], [4, 1], [1, 0])


@gluon.jit
def converted(sums, outer, inner, m, n, result, how: gl.constexpr):
    """Return the sums of a tile at (m, n) as they are stored."""
    rows = m + gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
    columns = n + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    if how.EPILOGUE is not None:
        sums = finished(
            sums, rows, columns, result.M, result.N, (outer, inner), (1, 1), result.extra, how.EPILOGUE
        )
    return sums.to(result.ptr.dtype.element_ty)


@gluon.jit
def store_part(desc, tile, part, outer, inner, m, n, result, how: gl.constexpr):
    """Store through shared memory, once the store before has let go of it; masked where no descriptor can."""
    part = converted(part, outer, inner, m, n, result, how)
    if how.BY_DESCRIPTOR:
        tma.store_wait(0)
        flat(tile).store(part)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [outer, inner, m, n], tile)
    else:
        layout: gl.constexpr = by_rows(part.shape[1])
        flat(tile).store(part)
        part = flat(tile).load(layout)
        rows = m + gl.arange(0, part.shape[0], gl.SliceLayout(1, layout))
        columns = n + gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
        matrix = outer.to(gl.int64) * result.stride_o + inner.to(gl.int64) * result.stride_i
        by_row = rows[:, None].to(gl.int64) * result.stride_m
        offsets = by_row + columns[None, :].to(gl.int64) * result.stride_n
        inside = (rows[:, None] < result.M) & (columns[None, :] < result.N)
        gl.store(result.ptr + matrix + offsets, part, mask=inside)


@gluon.jit
def store_tile(WHICH: gl.constexpr, acc, rest, outer, inner, m, n, result, how: gl.constexpr):
    """Store what a consumer made of a tile, in SUBTILES parts."""
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = how.MAIN_N // 2
    tile = result.tile.index(WHICH)
    if how.SUBTILES == 2:
        left, right = acc.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
        store_part(result.desc, tile, left, outer, inner, m, n, result, how)
        store_part(result.desc, tile, right, outer, inner, m, n + HALF, result, how)
    else:
        store_part(result.desc, tile, acc, outer, inner, m, n, result, how)
    if how.MAIN_N < how.BLOCK_N:
        tile = result.rest_tile.index(WHICH)
        store_part(result.rest_desc, tile, rest, outer, inner, m, n + how.MAIN_N, result, how)
