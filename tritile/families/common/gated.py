"""Gated products: a multiplied by two matrices in one loop, which share each tile of a."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.epilogue import finished
from tritile.families.common.tiles import batch_index, batch_offset, grouped_tile, multiple
from tritile.families.matmul_tile.kernel import compensated_sum, load_tile, rounded_to_tf32
from tritile.families.matmul_tma.kernel import load_operand, store_tile


@triton.jit
def added(acc, lost, a, b, PRECISION: tl.constexpr, COMPENSATED: tl.constexpr):
    """acc + a @ b, and what rounding lost of it where sums are COMPENSATED (see `compensated_sum`)."""
    if COMPENSATED:
        part = tl.dot(a, b, input_precision=PRECISION, out_dtype=acc.dtype)
        acc, lost = compensated_sum(acc, lost, part)
    elif PRECISION == "tf32":
        acc = tl.dot(rounded_to_tf32(a), rounded_to_tf32(b), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc, lost


@triton.jit
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


@triton.jit
def gated_sums(
    a_desc, b_desc, up_desc, outer, inner, m, n, blocks,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, UP_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The products of a's rows from m with columns from n of b, and of up."""
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    tl.assume(blocks > 0)
    for block in range(0, blocks):
        a = load_operand(a_desc, outer, inner, m, block * BLOCK_K, A_ROW)
        b = load_operand(b_desc, outer, inner, block * BLOCK_K, n, B_ROW)
        c = load_operand(up_desc, outer, inner, block * BLOCK_K, n, UP_ROW)
        gate = tl.dot(a, b, gate, input_precision=PRECISION, out_dtype=tl.float32)
        up = tl.dot(a, c, up, input_precision=PRECISION, out_dtype=tl.float32)
    return gate, up


@triton.jit
def gated_descriptor(
    a_desc, b_desc, up_desc, out_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, UP_ROW: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, WAIT: tl.constexpr, FLAT: tl.constexpr, BATCHED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """out[i] = activation(a[i] @ b[i] + bias) * (a[i] @ up[i] + bias_up), tiles by tensor descriptor.

    Parameters are those of `tritile.kernels.descriptor.matmul_descriptor`.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    blocks = tl.cdiv(K, BLOCK_K)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    if PERSISTENT:
        # Not flattened into one loop with that over K: ptxas then serialises the products, as two sums begin
        # anew amid it.
        for index in range(tl.program_id(0), tiles * batch, tl.num_programs(0)):
            outer = index // tiles // inner_batch
            inner = index // tiles % inner_batch
            row, column = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
            m = row * BLOCK_M
            n = column * BLOCK_N
            gate, up = gated_sums(
                a_desc, b_desc, up_desc, outer, inner, m, n, blocks, A_ROW, B_ROW, UP_ROW,
                BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            rows = m + tl.arange(0, BLOCK_M)
            columns = n + tl.arange(0, BLOCK_N)
            made = finished(gate, rows, columns, M, N, (outer, inner), (1, 1), extra, EPILOGUE, up)
            store_tile(
                out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, made,
                None, BY_DESCRIPTOR, SUBTILES, None,
            )  # fmt: skip
    else:
        if FLAT:
            row = tl.program_id(0)
            column = tl.program_id(1)
            matrix = tl.program_id(2)
        else:
            matrix = tl.program_id(0) // tiles
            row, column = grouped_tile(tl.program_id(0) % tiles, tiles_m, tiles_n, GROUP_M)
        outer = row * 0
        inner = row * 0
        if BATCHED:
            outer = matrix // inner_batch
            inner = matrix % inner_batch
        m = row * BLOCK_M
        n = column * BLOCK_N
        gate, up = gated_sums(
            a_desc, b_desc, up_desc, outer, inner, m, n, blocks, A_ROW, B_ROW, UP_ROW,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        rows = m + tl.arange(0, BLOCK_M)
        columns = n + tl.arange(0, BLOCK_N)
        made = finished(gate, rows, columns, M, N, (outer, inner), (1, 1), extra, EPILOGUE, up)
        store_tile(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, made,
            None, BY_DESCRIPTOR, SUBTILES, None,
        )  # fmt: skip
