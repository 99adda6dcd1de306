"""Multiply matrices as out^T = b^T a^T by specialised warps, on Hopper, and store tiles of out.

Tensor cores take 64 rows at a time, and any multiple of 8 columns. Transposed, 64 columns of the result are
their rows, and its rows, which may be few or just above a multiple of 64, are their columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritile.families.common.warps.consume import consume, start_warps
from tritile.families.common.warps.facts import How, Operands, Result
from tritile.families.common.warps.order import Walk, counts_of
from tritile.families.common.warps.pipeline import shared_of


@gluon.jit(do_not_specialize=("M", "K"))
def matmul_transposed(
    a_desc, a_rest_desc, b_desc, out_desc, out_rest_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra, verdict_ptr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_M: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    BATCHED: gl.constexpr, EPILOGUE: gl.constexpr, VERDICTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, SUBTILES: gl.constexpr,
):  # fmt: skip
    """Make out[i] = a[i] @ b[i], for a batch of two dimensions; parameters as those of `matmul_warpgroups`.

    Each consumer makes BLOCK_N // CONSUMERS columns. BLOCK_M is MAIN_M rows, a power of two, and maybe a
    smaller power of two, which has descriptors of its own. GROUP_M counts columns of tiles that make a band,
    and SUBTILES the parts in which a tile's first MAIN_M rows pass through shared memory to be stored.
    """
    how: gl.constexpr = How(
        not B_ROW, not A_ROW, BY_DESCRIPTOR, WAIT, BLOCK_N, BLOCK_M, BLOCK_K, MAIN_M,
        BLOCK_N // CONSUMERS, MAIN_M, GROUP_M, STAGES, CONSUMERS, SUBTILES, FLAT, BATCHED, EPILOGUE,
        VERDICTS, TRANSPOSED=True,
    )  # fmt: skip
    operands = Operands(b_desc, a_desc, a_rest_desc)  # those of out^T
    shared, tile, rest_tile = shared_of(b_desc.dtype, a_desc.dtype, out_ptr.dtype.element_ty, how)
    result = Result(
        out_desc, out_rest_desc, out_ptr, tile, rest_tile,
        M, N, stride_oo, stride_oi, stride_om, stride_on, None, extra,
    )  # fmt: skip
    tiles_m, tiles_n, iterations = counts_of(M, N, K, how)
    tiles = tiles_m * tiles_n * batch
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles, iterations, verdict_ptr, None)
    start_warps(consume, operands, result, shared, walk, REGISTERS, how)
