"""Multiply matrices through pointers, a program a tile."""

import triton
import triton.language as tl

from tritile.families.common.epilogue import finished
from tritile.families.common.fallback import is_enabled
from tritile.families.common.tiles import (
    added,
    batch_index,
    batch_offset,
    carried_sum,
    grouped_tile,
    load_tile,
    multiple,
)


@triton.jit(do_not_specialize=("M",))
def matmul_tile(
    a_ptr, b_ptr, out_ptr,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_on,
    batch, batch_shape, a_batch_strides, b_batch_strides, out_batch_strides, extra, flag_ptr,
    ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_K: tl.constexpr,
    ALIGN_A: tl.constexpr, ALIGN_B: tl.constexpr, ALIGN_OUT: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, COMPENSATED: tl.constexpr,
    PROMOTE: tl.constexpr, FLAGS: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i]: each program makes one BLOCK_M x BLOCK_N tile of one product of the batch.

    Loads past an edge are masked and read as zero, stores past an edge are masked away; MASK_* say
    which edges the tiles overhang. ALIGN_* are facts about extents, and about the row, column and
    batch strides of an operand (see `multiple`).
    WIDE: offsets or sizes need 64 bits. COMPENSATED: sum each BLOCK_K of K apart and add the sums by Kahan's
    method, so that the rounding error does not grow with K. EPILOGUE, `extra`: what is done to the sums,
    and with what (see `finished`).
    PROMOTE: in the last third of K the sum of each block goes from tensor cores to a total in fp32 (see
    `carried_sum`).
    `flag_ptr`, FLAGS: None, or the fallback flag and what it says where there is something to do (see
    `is_enabled`).
    """
    if flag_ptr is not None:
        if not is_enabled(flag_ptr, FLAGS):
            return
    matrix = batch_index(WIDE)
    if matrix >= batch:
        return
    M = multiple(M, ALIGN_M)
    N = multiple(N, ALIGN_N)
    K = multiple(K, ALIGN_K)
    stride_am = multiple(stride_am, ALIGN_A[0])
    stride_ak = multiple(stride_ak, ALIGN_A[1])
    stride_bk = multiple(stride_bk, ALIGN_B[0])
    stride_bn = multiple(stride_bn, ALIGN_B[1])
    stride_om = multiple(stride_om, ALIGN_OUT[0])
    stride_on = multiple(stride_on, ALIGN_OUT[1])
    if WIDE:
        M = tl.cast(M, tl.int64)
        N = tl.cast(N, tl.int64)
        K = tl.cast(K, tl.int64)
        stride_ak = tl.cast(stride_ak, tl.int64)
        stride_bk = tl.cast(stride_bk, tl.int64)
    row, column = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    row_mask = rows[:, None] < M
    column_mask = columns[None, :] < N

    a_ptr += batch_offset(matrix, batch_shape, a_batch_strides, ALIGN_A[2])
    b_ptr += batch_offset(matrix, batch_shape, b_batch_strides, ALIGN_B[2])
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, ALIGN_OUT[2])
    a_ptrs = a_ptr + (rows[:, None] * stride_am + ks[None, :] * stride_ak)  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + (ks[:, None] * stride_bk + columns[None, :] * stride_bn)  # [BLOCK_K, BLOCK_N]
    out_ptrs = out_ptr + (rows[:, None] * stride_om + columns[None, :] * stride_on)

    if out_ptr.dtype.element_ty == tl.float64:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
    elif a_ptr.dtype.element_ty == tl.int8:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    lost = acc
    for last_third in tl.static_range(2 if PROMOTE else 1):
        start = K // 3 * 2 // BLOCK_K * BLOCK_K if last_third else 0
        end = K // 3 * 2 // BLOCK_K * BLOCK_K if PROMOTE and not last_third else K
        for k in range(start, end, BLOCK_K):
            in_k = ks < K - k
            a = load_tile(a_ptrs, row_mask, in_k[None, :], MASK_M, MASK_K)  # [BLOCK_M, BLOCK_K]
            b = load_tile(b_ptrs, column_mask, in_k[:, None], MASK_N, MASK_K)  # [BLOCK_K, BLOCK_N]
            if last_third:
                acc, lost = carried_sum(acc, tl.dot(a, b, lost))
            else:
                acc, lost = added(acc, lost, a, b, PRECISION, COMPENSATED)
            a_ptrs += BLOCK_K * stride_ak
            b_ptrs += BLOCK_K * stride_bk
    if EPILOGUE is not None:
        acc = finished(acc, rows, columns, M, N, (matrix,), batch_shape, extra, EPILOGUE)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)
