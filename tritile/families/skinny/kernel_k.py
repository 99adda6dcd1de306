"""Multiply a few rows x by a matrix w, which is read once in words of 16 bytes, wherever its rows begin.

Rows of w begin anywhere in a word, at a place that repeats every PERIOD rows. A thread multiplies the WORD
elements of a word as it lies by the elements of x that belong to them. Words that lie partly outside of a row
are not read: their elements are read one by one.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.epilogue import finished
from tritile.families.common.tiles import batch_index, batch_offset, compensated_sum, multiple


@triton.jit
def apart(tile, WORD: tl.constexpr):
    """Return the elements of each word of a tile [R, L * WORD]: WORD tensors [R, L], without moving any."""
    R: tl.constexpr = tile.shape[0]
    L: tl.constexpr = tile.shape[1] // WORD
    HALF: tl.constexpr = WORD // 2
    if WORD == 1:
        found = (tile,)
    else:
        low, high = tile.reshape(R, L, 2, HALF).permute(0, 1, 3, 2).split()
        found = apart(low.reshape(R, L * HALF), HALF) + apart(high.reshape(R, L * HALF), HALF)
    return found


@triton.jit
def edges(
    x_ptrs, stride_xk, w_ptrs, K, shift, begin, words, WORD: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Multiply elements before the first whole word of each row, or after the last: [rows, rows, LANES].

    `x_ptrs` and `w_ptrs`: where rows of x and of w begin, as columns.
    """
    lanes = tl.arange(0, LANES)[None, :]
    ks = tl.where(lanes < WORD, 0, begin + words * WORD - WORD) + lanes - shift
    inside = (ks >= 0) & (ks < K) & (lanes < 2 * WORD) & ((lanes >= WORD) | (lanes < begin))
    w = tl.load(w_ptrs + ks, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptrs + ks.to(tl.int64) * stride_xk, mask=inside, other=0.0).to(tl.float32)
    return w[None, :, :] * x[:, None, :]


@triton.jit(do_not_specialize=("M", "N", "K", "stride_xm", "stride_w", "stride_om"))
def skinny_k(
    x_ptr, w_ptr, out_ptr, M, N, K, stride_xm, stride_xk, stride_w, stride_om, stride_on,
    batch, batch_shape, x_batch_strides, w_batch_strides, out_batch_strides, extra,
    PERIOD: tl.constexpr, EDGES: tl.constexpr, X_WORDS: tl.constexpr, WORD: tl.constexpr,
    COMPENSATED: tl.constexpr, WAIT: tl.constexpr, EPILOGUE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[i] = x[i] @ w[i].T, for w [N, K] contiguous along K, rows `stride_w` apart.

    A program takes BLOCK_N rows of w that begin at the same place in a word: every PERIOD-th. EDGES: rows
    begin or end amid a word. X_WORDS: x is read in words too.
    """
    LANES: tl.constexpr = BLOCK_K // WORD
    ALIGN: tl.constexpr = WORD if X_WORDS else 1
    tile = tl.program_id(0)
    first = tile // PERIOD * (BLOCK_N * PERIOD) + tile % PERIOD
    matrix = batch_index(False)
    if (matrix >= batch) | (first >= N):
        return
    rows = first + PERIOD * tl.arange(0, BLOCK_N)
    x_ptr += batch_offset(matrix, batch_shape, x_batch_strides, ALIGN)
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, 1)
    w_ptr += batch_offset(matrix, batch_shape, w_batch_strides, 1) + first.to(tl.int64) * stride_w
    shift = first * 0  # elements of a row's first word before the row
    if EDGES:
        shift = (w_ptr.to(tl.int64) // (16 // WORD) % WORD).to(tl.int32)
    begin = (shift > 0).to(tl.int32) * WORD  # elements from the first word to the first whole one
    words = (tl.maximum(shift + K, begin) - begin) // WORD
    steps = tl.arange(0, BLOCK_N).to(tl.int64) * multiple(tl.cast(stride_w, tl.int64) * PERIOD, WORD)
    # Rows past the last one read the first. Triton 3.9 no longer sees that a choice of multiples is one.
    steps = tl.multiple_of(tl.where(rows < N, steps, 0), WORD)[:, None]
    first_word = tl.multiple_of(w_ptr + (begin - shift), 16) + steps
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    ms = tl.minimum(tl.arange(0, BLOCK_M), M - 1).to(tl.int64)[:, None]  # rows past the last read the last
    x_ptrs = x_ptr + ms * multiple(stride_xm, ALIGN)
    sums = tl.zeros((BLOCK_M, BLOCK_N, LANES), tl.float32)
    lost = sums
    if EDGES:
        sums = edges(x_ptrs, stride_xk, w_ptr + steps, K, shift, begin, words, WORD, LANES)
    along = tl.arange(0, BLOCK_K)[None, :]
    step = tl.cast(stride_xk, tl.int64)
    x_ptrs += (begin - shift + along) * step
    x_next = tl.load(x_ptrs, mask=(along < words * WORD) & (not X_WORDS), other=0.0)
    for block in tl.range(0, tl.cdiv(words, LANES), num_stages=STAGES):
        inside = block * BLOCK_K + along < words * WORD
        w = apart(tl.load(first_word + (block * BLOCK_K + along), mask=inside, other=0.0), WORD)
        if X_WORDS:
            x = apart(tl.load(x_ptrs + block * BLOCK_K, mask=inside, other=0.0), WORD)
        else:  # elements are loaded an iteration ahead
            x = apart(x_next, WORD)
            x_ptrs += BLOCK_K * step
            x_next = tl.load(x_ptrs, mask=(block + 1) * BLOCK_K + along < words * WORD, other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK_N, LANES), tl.float32) if COMPENSATED else sums
        for j in tl.static_range(WORD):
            total += w[j].to(tl.float32)[None, :, :] * x[j].to(tl.float32)[:, None, :]
        if COMPENSATED:
            sums, lost = compensated_sum(sums, lost, total)
        else:
            sums = total
    total = tl.sum(sums, axis=2)
    ms = tl.arange(0, BLOCK_M)
    if EPILOGUE is not None:
        total = finished(total, ms, rows, M, N, (matrix,), batch_shape, extra, EPILOGUE)
    offsets = ms[:, None].to(tl.int64) * stride_om + rows[None, :].to(tl.int64) * stride_on
    inside = (ms[:, None] < M) & (rows[None, :] < N)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)
