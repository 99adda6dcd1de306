"""Multiply matrices as out^T = b^T a^T by specialised warps, on Hopper, and store tiles of out.

Tensor cores take 64 rows at a time, and any multiple of 8 columns. Transposed, 64 columns of the result are
their rows, and its rows, which may be few or just above a multiple of 64, are their columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tritile.families.matmul_wgmma import tma
from tritile.families.matmul_wgmma.kernel import (
    How,
    Operands,
    Result,
    Shared,
    Walk,
    multiply,
    produce,
    store_part,
    tile_at,
    tiles_in_shared_memory,
    tiles_of,
)


@gluon.jit
def consume(WHICH: gl.constexpr, result, shared, walk, how: gl.constexpr):
    """Multiply the rows of each tile of out^T that are consumer WHICH's, and store them as columns of out."""
    COLUMNS: gl.constexpr = how.BLOCK_M // how.CONSUMERS
    MAIN: gl.constexpr = how.MAIN_N
    HALF: gl.constexpr = MAIN // 2
    REST: gl.constexpr = how.BLOCK_N - MAIN
    SOME: gl.constexpr = REST if REST else 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SOME, 16])
    tile = result.tile.index(WHICH)
    stage = 0
    phase = 0
    mine, end, step = tiles_of(walk, how)
    for index in range(mine, end, step):
        outer, inner, column, row = tile_at(index, walk, how)
        acc = gl.zeros((COLUMNS, MAIN), gl.float32, layout)
        rest = gl.zeros((COLUMNS, SOME), gl.float32, rest_layout)
        acc, rest, stage, phase = multiply(WHICH, acc, rest, 0, walk.turns, stage, phase, shared, how)
        m = row * how.BLOCK_N
        n = column * how.BLOCK_M + WHICH * COLUMNS
        if how.SUBTILES == 2:
            upper, lower = acc.reshape((COLUMNS, 2, HALF)).permute((2, 0, 1)).split()
            store_part(result.desc, tile, upper, outer, inner, m, n, result, how)
            store_part(result.desc, tile, lower, outer, inner, m + HALF, n, result, how)
        else:
            store_part(result.desc, tile, acc.permute((1, 0)), outer, inner, m, n, result, how)
        if REST:
            tile_of_rest = result.rest_tile.index(WHICH)
            turned = rest.permute((1, 0))
            store_part(result.rest_desc, tile_of_rest, turned, outer, inner, m + MAIN, n, result, how)
    tma.store_wait(0)


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
    """out[i] = a[i] @ b[i], for a batch of two dimensions; parameters as those of `matmul_warpgroups`.

    Each consumer makes BLOCK_N // CONSUMERS columns. BLOCK_M is MAIN_M rows, a power of two, and maybe a
    smaller power of two, which has descriptors of its own. GROUP_M counts columns of tiles that make a band,
    and SUBTILES the parts in which a tile's first MAIN_M rows pass through shared memory to be stored.
    """
    REST_M: gl.constexpr = BLOCK_M - MAIN_M
    COLUMNS: gl.constexpr = BLOCK_N // CONSUMERS
    dtype: gl.constexpr = a_desc.dtype
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    if B_ROW:
        b_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, BLOCK_K, COLUMNS)
    else:
        b_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, COLUMNS, BLOCK_K)
    if A_ROW:
        a_tiles = tiles_in_shared_memory(dtype, STAGES, MAIN_M, BLOCK_K)
    else:
        a_tiles = tiles_in_shared_memory(dtype, STAGES, BLOCK_K, MAIN_M)
    out_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, MAIN_M // SUBTILES, COLUMNS)
    a_rest_tiles = a_tiles
    out_rest_tiles = out_tiles
    if REST_M:
        if A_ROW:
            a_rest_tiles = tiles_in_shared_memory(dtype, STAGES, REST_M, BLOCK_K)
        else:
            a_rest_tiles = tiles_in_shared_memory(dtype, STAGES, BLOCK_K, REST_M)
        out_rest_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, REST_M, COLUMNS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    operands = Operands(b_desc, a_desc, a_rest_desc)
    shared = Shared(b_tiles, a_tiles, a_rest_tiles, full, empty)
    result = Result(
        out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
        M, N, stride_oo, stride_oi, stride_om, stride_on, None, extra,
    )  # fmt: skip
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    walk = Walk(tiles_n, tiles_m, inner_batch, tiles_m * tiles_n * batch, gl.cdiv(K, BLOCK_K), verdict_ptr)
    how: gl.constexpr = How(
        not B_ROW, not A_ROW, BY_DESCRIPTOR, WAIT, BLOCK_N, BLOCK_M, MAIN_M, BLOCK_K, GROUP_M,
        STAGES, CONSUMERS, SUBTILES, FLAT, BATCHED, EPILOGUE, 0, False, None, VERDICTS,
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (consume, (1, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (consume, (1, result, shared, walk, how)),
            (consume, (2, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
