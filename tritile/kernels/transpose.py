"""Transposing copy kernels."""

import triton
import triton.language as tl

from tritile.kernels.tiles import batch_index, batch_offset, grouped_tile, multiple


@triton.jit
def transpose_tile(
    x_ptr, out_ptr,
    M, N,
    stride_xm, stride_xn, stride_om, stride_on,
    batch, batch_shape, x_batch_strides, out_batch_strides,
    ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_X: tl.constexpr, ALIGN_OUT: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, WIDE: tl.constexpr,
    LANES: tl.constexpr, FLIP_FIRST: tl.constexpr, FLIP_LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Copy x[m, n] to out[m, n] tile by tile, where x is contiguous along n and out along m.

    The tile is read in the order of x and written in the order of out; the compiler turns it over in
    shared memory between the two. An element is LANES words of 1 to 8 bytes; strides count words.
    FLIP_FIRST and FLIP_LAST are xor-ed into the first and the last word of every element: sign bits
    of a lazily conjugated or negated input.
    """
    matrix = batch_index(WIDE)
    if matrix >= batch:
        return
    M = multiple(M, ALIGN_M)
    N = multiple(N, ALIGN_N)
    stride_xm = multiple(stride_xm, ALIGN_X[0])
    stride_xn = multiple(stride_xn, ALIGN_X[1])
    stride_om = multiple(stride_om, ALIGN_OUT[0])
    stride_on = multiple(stride_on, ALIGN_OUT[1])
    if WIDE:
        M = tl.cast(M, tl.int64)
        N = tl.cast(N, tl.int64)
    row, column = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    lanes = tl.arange(0, LANES)[None, None, :]  # [1, 1, LANES]
    x_ptr += batch_offset(matrix, batch_shape, x_batch_strides, ALIGN_X[2])
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, ALIGN_OUT[2])
    x_ptrs = x_ptr + (rows[:, None, None] * stride_xm + columns[None, :, None] * stride_xn + lanes)
    out_ptrs = out_ptr + (columns[:, None, None] * stride_on + rows[None, :, None] * stride_om + lanes)
    if MASK_M and MASK_N:
        x_mask = (rows[:, None, None] < M) & (columns[None, :, None] < N)
        out_mask = (columns[:, None, None] < N) & (rows[None, :, None] < M)
        words = tl.load(x_ptrs, mask=x_mask)  # [BLOCK_M, BLOCK_N, LANES]
    elif MASK_M:
        out_mask = rows[None, :, None] < M
        words = tl.load(x_ptrs, mask=rows[:, None, None] < M)
    elif MASK_N:
        out_mask = columns[:, None, None] < N
        words = tl.load(x_ptrs, mask=columns[None, :, None] < N)
    else:
        out_mask = None
        words = tl.load(x_ptrs)
    if FLIP_FIRST != 0 or FLIP_LAST != 0:
        words ^= tl.where(lanes == LANES - 1, FLIP_LAST, FLIP_FIRST).to(words.dtype)
    tl.store(out_ptrs, tl.permute(words, (1, 0, 2)), mask=out_mask)  # [BLOCK_N, BLOCK_M, LANES]
