"""Make gated products, a program a tile: two products in one loop, which share each tile of a."""

import triton
import triton.language as tl

from tritile.families.common.epilogue import finished
from tritile.families.common.tiles import added, batch_index, batch_offset, grouped_tile, load_tile, multiple


@triton.jit(do_not_specialize=("M",))
def gated_tile(
    a_ptr, b_ptr, up_ptr, out_ptr,
    M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_uk, stride_un, stride_om, stride_on,
    batch, batch_shape, a_batch_strides, b_batch_strides, up_batch_strides, out_batch_strides, extra,
    ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_K: tl.constexpr,
    ALIGN_A: tl.constexpr, ALIGN_B: tl.constexpr, ALIGN_UP: tl.constexpr, ALIGN_OUT: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, COMPENSATED: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[i] = activation(a[i] @ b[i] + bias) * (a[i] @ up[i] + bias_up), a program a tile.

    Parameters are those of `tritile.kernels.matmul.matmul_tile`, and for `up` those of b.
    """
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
    stride_uk = multiple(stride_uk, ALIGN_UP[0])
    stride_un = multiple(stride_un, ALIGN_UP[1])
    stride_om = multiple(stride_om, ALIGN_OUT[0])
    stride_on = multiple(stride_on, ALIGN_OUT[1])
    if WIDE:
        M = tl.cast(M, tl.int64)
        N = tl.cast(N, tl.int64)
        K = tl.cast(K, tl.int64)
        stride_ak = tl.cast(stride_ak, tl.int64)
        stride_bk = tl.cast(stride_bk, tl.int64)
        stride_uk = tl.cast(stride_uk, tl.int64)
    row, column = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    row_mask = rows[:, None] < M
    column_mask = columns[None, :] < N

    a_ptr += batch_offset(matrix, batch_shape, a_batch_strides, ALIGN_A[2])
    b_ptr += batch_offset(matrix, batch_shape, b_batch_strides, ALIGN_B[2])
    up_ptr += batch_offset(matrix, batch_shape, up_batch_strides, ALIGN_UP[2])
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, ALIGN_OUT[2])
    a_ptrs = a_ptr + (rows[:, None] * stride_am + ks[None, :] * stride_ak)  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + (ks[:, None] * stride_bk + columns[None, :] * stride_bn)  # [BLOCK_K, BLOCK_N]
    up_ptrs = up_ptr + (ks[:, None] * stride_uk + columns[None, :] * stride_un)
    out_ptrs = out_ptr + (rows[:, None] * stride_om + columns[None, :] * stride_on)

    if out_ptr.dtype.element_ty == tl.float64:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = gate
    gate_lost = gate
    up_lost = gate
    for k in range(0, K, BLOCK_K):
        in_k = ks < K - k
        a = load_tile(a_ptrs, row_mask, in_k[None, :], MASK_M, MASK_K)  # [BLOCK_M, BLOCK_K]
        b = load_tile(b_ptrs, column_mask, in_k[:, None], MASK_N, MASK_K)  # [BLOCK_K, BLOCK_N]
        c = load_tile(up_ptrs, column_mask, in_k[:, None], MASK_N, MASK_K)
        gate, gate_lost = added(gate, gate_lost, a, b, PRECISION, COMPENSATED)
        up, up_lost = added(up, up_lost, a, c, PRECISION, COMPENSATED)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
        up_ptrs += BLOCK_K * stride_uk
    made = finished(gate, rows, columns, M, N, (matrix,), batch_shape, extra, EPILOGUE, up)
    tl.store(out_ptrs, made.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)
