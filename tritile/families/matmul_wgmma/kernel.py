"""Multiply matrices by specialised warps, on Hopper: one feeds shared memory, warpgroups multiply.

Written in Gluon: `tl.dot` has no tiles of 192 rows or 96 columns, and no producer that runs on into the next
tile while the last one is stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritile.families.common.warps.consume import consume, start_warps
from tritile.families.common.warps.facts import How, Operands, Result
from tritile.families.common.warps.order import Walk, counts_of
from tritile.families.common.warps.pipeline import shared_of


@gluon.jit(do_not_specialize=("M", "K"))
def matmul_warpgroups(
    a_desc, b_desc, b_rest_desc, out_desc, out_rest_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, scales, extra, verdict_ptr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_N: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    BATCHED: gl.constexpr, SCALE_BLOCKS: gl.constexpr, EPILOGUE: gl.constexpr, PROMOTE: gl.constexpr,
    IN_PARTS: gl.constexpr, VERDICTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, PERSISTENT: gl.constexpr, SUBTILES: gl.constexpr,
):  # fmt: skip
    """Make out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    CONSUMERS warpgroups of REGISTERS registers a thread share a tile, each with BLOCK_M / CONSUMERS of its
    rows. Where BLOCK_N is no power of two its columns are MAIN_N and the rest, with descriptors of their own.

    PERSISTENT: the grid has fewer programs than there are tiles. SUBTILES: the parts in which a tile's
    columns pass through shared memory to be stored. WAIT: launched before the kernel ahead of it is done,
    so wait for that one before touching memory. FLAT: the grid has an axis each for rows and columns of
    tiles, and one for matrices. BATCHED: there are several of these.
    EPILOGUE, `extra`: what is done to the sums, and with what (see `finished`).
    PROMOTE: 0, or after how many K iterations sums go from tensor cores to a total in fp32; IN_PARTS: in the
    last third of K. SCALE_BLOCKS, `scales`: as they go, they are multiplied by scales of their own.
    `verdict_ptr`, VERDICTS: None, or the fallback flag that says whether there is anything to do (see
    `wanted`).
    """
    how: gl.constexpr = How(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, BLOCK_K, MAIN_N, BLOCK_M // CONSUMERS, MAIN_N,
        GROUP_M, STAGES, CONSUMERS, SUBTILES, FLAT, BATCHED, EPILOGUE, VERDICTS,
        PROMOTE, IN_PARTS, SCALE_BLOCKS,
    )  # fmt: skip
    operands = Operands(a_desc, b_desc, b_rest_desc)
    shared, tile, rest_tile = shared_of(a_desc.dtype, b_desc.dtype, out_ptr.dtype.element_ty, how)
    result = Result(
        out_desc, out_rest_desc, out_ptr, tile, rest_tile,
        M, N, stride_oo, stride_oi, stride_om, stride_on, scales, extra,
    )  # fmt: skip
    tiles_m, tiles_n, iterations = counts_of(M, N, K, how)
    tiles = tiles_m * tiles_n * batch
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles, iterations, verdict_ptr)
    start_warps(consume, operands, result, shared, walk, REGISTERS, how)
