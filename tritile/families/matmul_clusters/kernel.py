"""Multiply matrices by clusters of two programs, on Hopper: a tile that both need is copied to both at once.

The programs of a cluster make tiles that lie one below the other and share b's columns, or side by side and
share a's rows. Each is made of specialised warps, as in `matmul_wgmma`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritile.families.common.warps.consume import consume, start_warps
from tritile.families.common.warps.facts import How, Operands, Result
from tritile.families.common.warps.order import Walk, counts_of
from tritile.families.common.warps.pipeline import shared_of


@gluon.jit(do_not_specialize=("M", "K"))
def matmul_clusters(
    a_desc, b_desc, b_rest_desc, out_desc, out_rest_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra, verdict_ptr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_N: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    BATCHED: gl.constexpr, EPILOGUE: gl.constexpr, VERDICTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, DOWN: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, SUBTILES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Make out[i] = a[i] @ b[i], for a batch of two dimensions; parameters as those of `matmul_warpgroups`.

    DOWN: 2 where the tiles of a cluster's programs lie one below the other and share tiles of b, 1 where
    they lie side by side and share tiles of a. GROUP_M counts rows of clusters.
    TRANSPOSED: out^T is made, and a, b, blocks and DOWN are those of out^T = a b; M, N, the output's
    descriptors and its strides are those of out.
    """
    how: gl.constexpr = How(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, BLOCK_K, MAIN_N, BLOCK_M // CONSUMERS, MAIN_N,
        GROUP_M, STAGES, CONSUMERS, SUBTILES, FLAT, BATCHED, EPILOGUE, VERDICTS,
        CLUSTER=True, DOWN=DOWN, ACROSS=2 // DOWN, TRANSPOSED=TRANSPOSED,
    )  # fmt: skip
    operands = Operands(a_desc, b_desc, b_rest_desc)
    shared, tile, rest_tile = shared_of(a_desc.dtype, b_desc.dtype, out_ptr.dtype.element_ty, how)
    result = Result(
        out_desc, out_rest_desc, out_ptr, tile, rest_tile,
        M, N, stride_oo, stride_oi, stride_om, stride_on, None, extra,
    )  # fmt: skip
    tiles_m, tiles_n, iterations = counts_of(M, N, K, how)
    tiles = tiles_m * tiles_n * batch
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles, iterations, verdict_ptr, None)
    start_warps(consume, operands, result, shared, walk, REGISTERS, how)
