"""Multiply a few rows x by a matrix w that is contiguous along N, and is read once, as wide as it is aligned.

A thread multiplies OWN columns of each of its rows of w, LANES threads a whole row. Elements of x are loaded
by each thread that needs them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.epilogue import finished
from tritile.families.common.tiles import batch_index, batch_offset, compensated_sum, multiple


@triton.jit
def block_sums(x_ptrs, w_ptrs, x_inside, w_inside):
    """Multiply x by a block of w, and sum over a thread's rows: [BLOCK_M, COLUMNS, WIDE, ROWS, LANES].

    `x_ptrs` [BLOCK_M, UNROLL, ROWS, LANES], `w_ptrs` [UNROLL, COLUMNS, WIDE, ROWS, LANES]; `x_inside` and
    `w_inside` mask them where the block is not whole, or are None.
    """
    if w_inside is None:
        w = tl.load(w_ptrs)
        x = tl.load(x_ptrs)
    else:
        w = tl.load(w_ptrs, mask=w_inside, other=0.0)
        x = tl.load(x_ptrs, mask=x_inside, other=0.0)
    return tl.sum(w.to(tl.float32)[None] * x.to(tl.float32)[:, :, None, None, :, :], axis=1)


@triton.jit(do_not_specialize=("M", "N", "K", "stride_xm", "stride_xk", "stride_w", "stride_om", "split"))
def skinny_n(
    x_ptr, w_ptr, out_ptr, parts_ptr, M, N, K, stride_xm, stride_xk, stride_w, stride_om, stride_on, split,
    batch, batch_shape, x_batch_strides, w_batch_strides, out_batch_strides, extra,
    WIDE: tl.constexpr, X_WORDS: tl.constexpr, OWN: tl.constexpr, UNROLL: tl.constexpr,
    COMPENSATED: tl.constexpr, WAIT: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[i] = x[i] @ w[i], for w [K, N] contiguous along N, rows `stride_w` apart.

    WIDE: elements of w in a load, which divides N. UNROLL: rows of w that a thread multiplies in a K
    iteration. X_WORDS: x is contiguous along K and aligned. `parts_ptr`: None, or where `split` programs of a
    tile each leave their sums, over every `split`-th block of K, for `sum_parts`.
    """
    ITEMSIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    LANES: tl.constexpr = BLOCK_N // OWN
    COLUMNS: tl.constexpr = OWN // WIDE
    ROWS: tl.constexpr = BLOCK_K // UNROLL
    ALIGN: tl.constexpr = 16 // ITEMSIZE if X_WORDS else 1
    tile = tl.program_id(0) // split
    part = tl.program_id(0) % split
    matrix = batch_index(False)
    if matrix >= batch:
        return
    first = tile * BLOCK_N
    x_ptr += batch_offset(matrix, batch_shape, x_batch_strides, ALIGN)
    w_ptr += batch_offset(matrix, batch_shape, w_batch_strides, WIDE) + first
    w_ptr = tl.multiple_of(w_ptr, WIDE * ITEMSIZE)
    width = multiple(N, WIDE)
    step_w = multiple(tl.cast(stride_w, tl.int64), WIDE)
    step_x = 1 if X_WORDS else tl.cast(stride_xk, tl.int64)
    # A thread's rows of w are neighbours: its elements of x then are too.
    us = tl.arange(0, UNROLL)
    rows = tl.arange(0, ROWS) * UNROLL
    ks_x = us[None, :, None, None] + rows[None, None, :, None]
    ks_w = us[:, None, None, None, None] + rows[None, None, None, :, None]
    columns = tl.arange(0, COLUMNS)[:, None, None, None] * (LANES * WIDE) + tl.arange(0, WIDE)[:, None, None]
    columns = (columns + tl.arange(0, LANES) * WIDE)[None]
    ms = tl.minimum(tl.arange(0, BLOCK_M), M - 1).to(tl.int64)  # rows past the last one read the last
    x_ptrs = x_ptr + ms[:, None, None, None] * multiple(stride_xm, ALIGN) + ks_x * step_x
    x_ptrs += tl.zeros((1, 1, 1, LANES), tl.int32)
    w_ptrs = w_ptr + ks_w * step_w + columns
    sums = tl.zeros((BLOCK_M, COLUMNS, WIDE, ROWS, LANES), tl.float32)
    lost = sums
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    blocks = tl.cdiv(K, BLOCK_K)
    whole = tl.where(first + BLOCK_N <= N, K // BLOCK_K, 0)
    masked = part + tl.cdiv(tl.maximum(whole - part, 0), split) * split
    for MASKED in tl.static_range(2):
        for block in range(masked if MASKED else part, blocks if MASKED else whole, split):
            k = block * BLOCK_K
            x_inside = (ks_x < K - k) if MASKED else None
            w_inside = ((ks_w < K - k) & (columns < width - first)) if MASKED else None
            total = block_sums(x_ptrs + k * step_x, w_ptrs + k * step_w, x_inside, w_inside)
            if COMPENSATED:
                sums, lost = compensated_sum(sums, lost, total)
            else:
                sums += total
    total = tl.sum(sums, axis=3).permute(0, 1, 3, 2).reshape(BLOCK_M, BLOCK_N)
    ms = tl.arange(0, BLOCK_M)
    ns = first + tl.arange(0, BLOCK_N)
    inside = (ms[:, None] < M) & (ns[None, :] < N)
    if parts_ptr is not None:
        across = tl.cdiv(N, BLOCK_N) * BLOCK_N
        row = (part.to(tl.int64) * batch + matrix) * M + ms
        tl.store(parts_ptr + row[:, None] * across + ns[None, :], total, mask=inside)
    else:
        if EPILOGUE is not None:
            total = finished(total, ms, ns, M, N, (matrix,), batch_shape, extra, EPILOGUE)
        offsets = ms[:, None].to(tl.int64) * stride_om + ns[None, :].to(tl.int64) * stride_on
        out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, 1)
        tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("M", "N", "stride_om", "split", "across"))
def sum_parts(
    parts_ptr, out_ptr, M, N, stride_om, stride_on, split, across, batch, batch_shape, out_batch_strides,
    extra, WAIT: tl.constexpr, EPILOGUE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the `split` parts of COLUMNS elements of a row, in one order, and store them.

    Rows of parts are `across` apart. PARTS of them are under way at once.
    """
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    index = batch_index(False)  # of a row of all matrices
    if index >= batch * M:
        return
    matrix = index // M
    ms = index % M + tl.arange(0, 1)
    ns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    parts = tl.arange(0, PARTS)[:, None]
    places = (parts.to(tl.int64) * batch * M + index) * across + ns[None, :]
    sums = tl.zeros((PARTS, COLUMNS), tl.float32)
    lost = sums
    for start in range(0, split, PARTS):
        inside = (start + parts < split) & (ns[None, :] < N)
        part = tl.load(parts_ptr + places, mask=inside, other=0.0)
        sums, lost = compensated_sum(sums, lost, part)
        places += tl.cast(PARTS * batch, tl.int64) * M * across
    total = tl.sum(sums, axis=0)[None, :]
    if EPILOGUE is not None:
        total = finished(total, ms, ns, M, N, (matrix,), batch_shape, extra, EPILOGUE)
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, 1)
    offsets = ms[:, None].to(tl.int64) * stride_om + ns[None, :].to(tl.int64) * stride_on
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=(ns < N)[None, :])
