"""Copies whose dimensions lie in another order."""

import triton
import triton.language as tl

from tritile.kernels.tiles import batch_index, batch_offset, grouped_tile, multiple


@triton.jit
def run_offset(index, sizes, strides, ALIGN: tl.constexpr):
    """Elements to `index` of a run of dimensions, innermost first, that has these strides."""
    offset = index * 0
    for i in tl.static_range(len(sizes)):
        if i == len(sizes) - 1:
            offset += index * multiple(strides[i], ALIGN)
        else:
            offset += index % sizes[i] * multiple(strides[i], ALIGN)
            index = index // sizes[i]
    return offset


@triton.jit
def permute_tile(
    x_ptr, out_ptr,
    M, N,
    m_sizes, n_sizes, x_m_strides, stride_xn, stride_om, out_n_strides,
    batch, batch_shape, x_batch_strides, out_batch_strides,
    ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_X: tl.constexpr, ALIGN_OUT: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, WIDE: tl.constexpr,
    LANES: tl.constexpr, FLIP_FIRST: tl.constexpr, FLIP_LAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Copy x[m, n] to out[m, n] tile by tile, where x is densest along n and out along m.

    Both m and n run over one dimension or over several that follow each other without a gap, n in x and m in
    out; in the other tensor each of these has a stride of its own (x_m_strides, out_n_strides).
    The tile is read in the order of x and written in the order of out; the compiler turns it over in
    shared memory between the two. An element is LANES words of 1 to 8 bytes; strides count words.
    ALIGN_*: facts about extents, and about strides of m, n and batch (see `multiple`).
    FLIP_FIRST and FLIP_LAST are xor-ed into the first and the last word of every element: sign bits
    of a lazily conjugated or negated input.
    """
    matrix = batch_index(WIDE)
    if matrix >= batch:
        return
    M = multiple(M, ALIGN_M)
    N = multiple(N, ALIGN_N)
    stride_xn = multiple(stride_xn, ALIGN_X[1])
    stride_om = multiple(stride_om, ALIGN_OUT[0])
    if WIDE:
        M = tl.cast(M, tl.int64)
        N = tl.cast(N, tl.int64)
    row, column = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    lanes = tl.arange(0, LANES)[None, None, :]  # [1, 1, LANES]
    x_ptr += batch_offset(matrix, batch_shape, x_batch_strides, ALIGN_X[2])
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, ALIGN_OUT[2])
    x_rows = run_offset(rows, m_sizes, x_m_strides, ALIGN_X[0])
    out_columns = run_offset(columns, n_sizes, out_n_strides, ALIGN_OUT[1])
    x_ptrs = x_ptr + (x_rows[:, None, None] + columns[None, :, None] * stride_xn + lanes)
    out_ptrs = out_ptr + (out_columns[:, None, None] + rows[None, :, None] * stride_om + lanes)
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


@triton.jit
def transpose_in_place(
    x_ptr, N, stride_m, stride_n, batch, batch_shape, batch_strides, tiles,
    LANES: tl.constexpr, WIDE: tl.constexpr, FLIP_FIRST: tl.constexpr, FLIP_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Transpose N x N matrices where they lie, two mirrored tiles a program.

    Both are read before either is written; no other program touches them.
    """
    matrix = batch_index(WIDE)
    if matrix >= batch:
        return
    row = tl.program_id(0) // tiles
    column = tl.program_id(0) % tiles
    if column < row:
        return
    if WIDE:
        N = tl.cast(N, tl.int64)
        stride_m = tl.cast(stride_m, tl.int64)
        stride_n = tl.cast(stride_n, tl.int64)
    x_ptr += batch_offset(matrix, batch_shape, batch_strides, 1)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    columns = column * BLOCK + tl.arange(0, BLOCK)
    lanes = tl.arange(0, LANES)[None, None, :]
    upper = x_ptr + (rows[:, None, None] * stride_m + columns[None, :, None] * stride_n + lanes)
    lower = x_ptr + (columns[:, None, None] * stride_m + rows[None, :, None] * stride_n + lanes)
    upper_mask = (rows[:, None, None] < N) & (columns[None, :, None] < N)
    lower_mask = (columns[:, None, None] < N) & (rows[None, :, None] < N)
    above = tl.load(upper, mask=upper_mask)
    below = tl.load(lower, mask=lower_mask)
    if FLIP_FIRST != 0 or FLIP_LAST != 0:
        flip = tl.where(lanes == LANES - 1, FLIP_LAST, FLIP_FIRST).to(above.dtype)
        above ^= flip
        below ^= flip
    tl.debug_barrier()  # every thread has read before one of them writes
    tl.store(lower, tl.permute(above, (1, 0, 2)), mask=lower_mask)
    tl.store(upper, tl.permute(below, (1, 0, 2)), mask=upper_mask)
