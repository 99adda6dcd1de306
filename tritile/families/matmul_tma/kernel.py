"""Multiply matrices by tiles that travel by tensor descriptor (TMA), on GPUs from Hopper on."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.fallback import is_enabled
from tritile.families.common.shared_k import share_parts, store_part
from tritile.families.common.tiles import add_product, carried_sum, grouped_tile


@triton.jit
def load_operand(desc, outer, inner, row, column, ROW_MAJOR: tl.constexpr):
    """Return the tile at (row, column) of a matrix of the batch; not ROW_MAJOR: `desc` sees its transpose."""
    if ROW_MAJOR:
        tile = desc.load([outer, inner, row, column])
        tile = tile.reshape(tile.shape[2], tile.shape[3])
    else:
        tile = desc.load([outer, inner, column, row])
        tile = tile.reshape(tile.shape[2], tile.shape[3]).T
    return tile


@triton.jit
def multiply(
    a_desc, b_desc, acc, outer, inner, m, n, part, blocks,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PRECISION: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """acc plus the product of a's rows from m and b's columns from n, over every SPLIT_K-th block of K.

    Programs that share a tile then read side by side in memory, and not each in a far place of its own.
    There is a block for each of them. Unless told so, ptxas serialises the products of some layouts.
    PROMOTE: in the last third the sum of each block goes from tensor cores to a total in fp32 (see
    `carried_sum`).
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    tl.assume(blocks > part)
    lost = tl.zeros((BLOCK_M, BLOCK_N), acc.dtype)
    for last_third in tl.static_range(2 if PROMOTE else 1):
        small = (blocks * 2 - 2) // 3  # blocks before the last third, none of it among them
        start = part
        end = blocks
        if last_third:
            start = part + tl.cdiv(tl.maximum(small - part, 0), SPLIT_K) * SPLIT_K
        elif PROMOTE:
            end = small
        for block in range(start, end, SPLIT_K):
            a = load_operand(a_desc, outer, inner, m, block * BLOCK_K, A_ROW)
            b = load_operand(b_desc, outer, inner, block * BLOCK_K, n, B_ROW)
            if last_third:
                acc, lost = carried_sum(acc, tl.dot(a, b, lost))
            else:
                acc = add_product(acc, a, b, PRECISION, False)
    return acc


@triton.jit
def store_tile(
    out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc, extra,
    BY_DESCRIPTOR: tl.constexpr, SUBTILES: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Store a tile, in SUBTILES parts of its columns: shared memory then holds one part at a time."""
    if SUBTILES == 2:
        HALF: tl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, left,
            extra, BY_DESCRIPTOR, EPILOGUE,
        )  # fmt: skip
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n + HALF, M, N,
            right, extra, BY_DESCRIPTOR, EPILOGUE,
        )  # fmt: skip
    else:
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
            extra, BY_DESCRIPTOR, EPILOGUE,
        )  # fmt: skip


@triton.jit(do_not_specialize=("M", "K"))
def matmul_descriptor(
    a_desc, b_desc, out_desc, out_ptr, parts_ptr, counters_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra, flag_ptr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
    WAIT: tl.constexpr, POLLS: tl.constexpr, FLAT: tl.constexpr, BATCHED: tl.constexpr,
    PROMOTE: tl.constexpr, FLAGS: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr, SPLIT_K: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    PERSISTENT: a program makes tile after tile, so that one's epilogue runs beside the next one's loads.
    SPLIT_K > 1: that many programs share a tile, each with a part of K, and the sum of the parts; the answer
    is the same however they raced. POLLS: how often each looks whether the others have come.
    FLAT: the grid has an axis each for rows and columns of tiles, and one for matrices or parts of K.
    BATCHED: there are several matrices.
    WAIT: launched before the kernel ahead of it is done, so wait for that one before touching memory.
    EPILOGUE, `extra`: what is done to the sums, and with what (see `finished`).
    PROMOTE: see `multiply`.
    `flag_ptr`, FLAGS: None, or the fallback flag and what it says where there is something to do (see
    `is_enabled`).
    """
    if a_desc.dtype == tl.int8:
        DTYPE: tl.constexpr = tl.int32
    else:
        DTYPE: tl.constexpr = tl.float32
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    blocks = tl.cdiv(K, BLOCK_K)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    if flag_ptr is not None:
        if not is_enabled(flag_ptr, FLAGS):
            return
    if PERSISTENT:
        for index in tl.range(tl.program_id(0), tiles * batch, tl.num_programs(0), flatten=True):
            outer = index // tiles // inner_batch
            inner = index // tiles % inner_batch
            row, column = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
            m = row * BLOCK_M
            n = column * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
            acc = multiply(
                a_desc, b_desc, acc, outer, inner, m, n, 0, blocks, A_ROW, B_ROW, BLOCK_K, 1, PRECISION,
                PROMOTE,
            )  # fmt: skip
            store_tile(
                out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
                extra, BY_DESCRIPTOR, SUBTILES, EPILOGUE,
            )  # fmt: skip
    else:
        if FLAT:
            row = tl.program_id(0)
            column = tl.program_id(1)
            matrix = tl.program_id(2) if BATCHED else 0
            part = 0 if BATCHED else tl.program_id(2)
            index = (matrix * tiles_n + column) * tiles_m + row
        else:
            index = tl.program_id(0)
            part = tl.program_id(1)
            matrix = index // tiles
            row, column = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
        outer = row * 0
        inner = row * 0
        if BATCHED:
            outer = matrix // inner_batch
            inner = matrix % inner_batch
        m = row * BLOCK_M
        n = column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        acc = multiply(
            a_desc, b_desc, acc, outer, inner, m, n, part, blocks, A_ROW, B_ROW, BLOCK_K, SPLIT_K, PRECISION,
            PROMOTE,
        )  # fmt: skip
        if SPLIT_K > 1:
            share_parts(
                parts_ptr, counters_ptr, acc, index, part,
                out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, extra, SPLIT_K,
                POLLS, EPILOGUE,
            )  # fmt: skip
        else:
            store_tile(
                out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
                extra, BY_DESCRIPTOR, SUBTILES, EPILOGUE,
            )  # fmt: skip
