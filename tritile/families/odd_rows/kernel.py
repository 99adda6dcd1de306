"""Multiply few rows x by a matrix w that is read once in words of 16 bytes, wherever its rows begin.

Rows of w begin anywhere in a word, at a place that repeats every PERIOD rows. A program takes rows that begin
alike, from their first whole word on, and a copy of x that begins with the same element. What lies before the
first whole word, and after the last, is read element by element.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.shared_k import share_parts, store_part
from tritile.families.common.tiles import multiple


@triton.jit
def whole_words(row_ptr, K, WORD: tl.constexpr):
    """Return the elements of a row before its first whole word of WORD elements, and its whole words."""
    shift = (row_ptr.to(tl.int64) // (16 // WORD) % WORD).to(tl.int32)
    begin = (WORD - shift) % WORD
    return begin, tl.maximum(K - begin, 0) // WORD


@triton.jit(
    do_not_specialize=("M", "K", "stride_w", "stride_cm"), do_not_specialize_on_alignment=("stride_xm",)
)
def copy_shifted(
    x_ptr, w_ptr, copies_ptr, M, K, stride_xm, stride_xk, stride_w, stride_cm,
    WORD: tl.constexpr, WAIT: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK elements of ROWS rows of x [M, K] for rows of w that begin like row `program_id(2)`.

    A copy begins with the element that belongs to the first whole word of such a row. Past the last whole
    word it is zero, to the end of the copy's row, which has a whole number of ROW elements.
    """
    residue = tl.program_id(2)
    ms = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    begin, words = whole_words(w_ptr + residue * tl.cast(stride_w, tl.int64), K, WORD)
    ks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    source = x_ptr + ms * tl.cast(stride_xm, tl.int64) + (begin + ks) * tl.cast(stride_xk, tl.int64)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(source, mask=(ms < M) & (ks < words * WORD), other=0.0)
    stride_cm = multiple(stride_cm, ROW)
    rows = (residue * M + ms).to(tl.int64) * stride_cm
    tl.store(copies_ptr + rows + ks, x, mask=(ms < M) & (ks < stride_cm))


@triton.jit
def edge_product(x_ptrs, stride_xk, w_ptrs, x_mask, K, begin, words, WORD: tl.constexpr):
    """Return the product of what lies before the first whole word of each row, and after the last.

    `x_ptrs` and `w_ptrs`: where rows of x and of w begin, as columns.
    """
    lanes = tl.arange(0, 2 * WORD)[None, :]
    ks = tl.where(lanes < WORD, lanes, begin + words * WORD + lanes - WORD)
    inside = ((lanes >= WORD) | (ks < begin)) & (ks < K)
    x = tl.load(x_ptrs + ks * tl.cast(stride_xk, tl.int64), mask=inside & x_mask, other=0.0)
    w = tl.load(w_ptrs + ks, mask=inside, other=0.0)
    return tl.dot(x, w.T)


@triton.jit(
    do_not_specialize=("M", "N", "K", "stride_w", "stride_cm"),
    do_not_specialize_on_alignment=("stride_xm", "stride_om"),
)
def odd_rows(
    x_ptr, w_ptr, out_ptr, copies_ptr, parts_ptr, counters_ptr, M, N, K, stride_xm, stride_xk, stride_w,
    stride_om, stride_on, stride_cm, extra,
    PERIOD: tl.constexpr, WORD: tl.constexpr, WAIT: tl.constexpr, EPILOGUE: tl.constexpr,
    POLLS: tl.constexpr, STAGES: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = x @ w.T, for w [N, K] contiguous along K, rows `stride_w` apart, and x [M, K], M <= BLOCK_M.

    A program takes BLOCK_N rows of w that begin at the same place in a word: every PERIOD-th. SPLIT_K of
    them share K; each takes blocks of K that follow one another (see `share_parts`).
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    residue = tile % PERIOD
    first = tile // PERIOD * (BLOCK_N * PERIOD) + residue
    if first >= N:
        return
    w_ptr += first * tl.cast(stride_w, tl.int64)
    begin, words = whole_words(w_ptr, K, WORD)
    rows = first + PERIOD * tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_N).to(tl.int64) * multiple(tl.cast(stride_w, tl.int64) * PERIOD, WORD)
    # Rows past the last one read the first. Triton 3.9 no longer sees that a choice of multiples is one.
    steps = tl.multiple_of(tl.where(rows < N, steps, 0), WORD)[:, None]
    ms = tl.arange(0, BLOCK_M)[:, None]
    w_ptrs = tl.multiple_of(w_ptr + begin, 16) + steps
    x_ptrs = copies_ptr + (residue * M + ms).to(tl.int64) * multiple(stride_cm, BLOCK_K)
    along = tl.arange(0, BLOCK_K)[None, :]
    blocks = tl.cdiv(words * WORD, BLOCK_K)
    share = tl.cdiv(blocks, SPLIT_K)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if part == 0:
        x_rows = x_ptr + ms * tl.cast(stride_xm, tl.int64)
        acc = edge_product(x_rows, stride_xk, w_ptr + steps, ms < M, K, begin, words, WORD)
    for block in tl.range(part * share, tl.minimum(part * share + share, blocks), num_stages=STAGES):
        ks = block * BLOCK_K + along
        w = tl.load(w_ptrs + ks, mask=ks < words * WORD, other=0.0)
        x = tl.load(x_ptrs + ks, mask=ms < M, other=0.0)
        acc = tl.dot(x, w.T, acc)
    if SPLIT_K > 1:
        share_parts(
            parts_ptr, counters_ptr, acc, tile, part, out_ptr, 0, 0, stride_om, stride_on, tile * 0, tile * 0,
            0, first, M, N, extra, SPLIT_K, POLLS, EPILOGUE, PERIOD,
        )  # fmt: skip
    elif BLOCK_M * BLOCK_N < 32768:
        store_part(
            None, out_ptr, 0, 0, stride_om, stride_on, tile * 0, tile * 0, 0, first, M, N, acc, extra,
            False, EPILOGUE, PERIOD,
        )  # fmt: skip
    else:
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).trans(0, 2, 1).split()
        store_part(
            None, out_ptr, 0, 0, stride_om, stride_on, tile * 0, tile * 0, 0, first, M, N, left, extra,
            False, EPILOGUE, PERIOD,
        )  # fmt: skip
        store_part(
            None, out_ptr, 0, 0, stride_om, stride_on, tile * 0, tile * 0, 0, first + PERIOD * (BLOCK_N // 2),
            M, N, right, extra, False, EPILOGUE, PERIOD,
        )  # fmt: skip
