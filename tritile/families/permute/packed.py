"""Copy short elements, their dimensions in another order, in words of several."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.tiles import batch_index, batch_offset, grouped_tile
from tritile.families.permute.kernel import divided, run_offset, tile_span


@triton.jit
def limited(index, count, UNEVEN: tl.constexpr):
    """`index`; where a tile covers less than its block, threads beyond it do again what the last one does."""
    return tl.minimum(index, (count - 1).to(tl.int32)) if UNEVEN else index


@triton.jit
def packed_column(
    x_ptr, J: tl.constexpr, word, words, column, columns, skew,
    m_digits, n_digits, x_m_strides, x_n_digits, x_n_strides, out_n_strides,
    ALIGN_X: tl.constexpr, ALIGN_OUT: tl.constexpr, UNEVEN_M: tl.constexpr, UNEVEN_N: tl.constexpr,
    WIDE: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Words of out from number `word` on, of column J of each group of a tile: [WORDS, GROUPS]."""
    index = tl.arange(0, WORDS * GROUPS).to(tl.uint32)
    n = column + limited(LANES * (index % GROUPS).to(tl.int32) + J, columns, UNEVEN_N)
    start = -(skew + run_offset(n, n_digits, out_n_strides, ALIGN_OUT)) & (LANES - 1)
    m = LANES * (word + limited((index // GROUPS).to(tl.int32), words, UNEVEN_M)) + start.to(tl.int32)
    if WIDE:
        m = m.to(tl.int64)
    across = run_offset(n, x_n_digits, x_n_strides, ALIGN_X[1])
    at = across + run_offset(m, m_digits, x_m_strides, ALIGN_X[0])
    x_ptrs = x_ptr + at
    packed = tl.load(x_ptrs).to(tl.uint32)
    digit = m - divided(m, m_digits[0]) * m_digits[0][0] if len(x_m_strides) == 2 else m
    for i in tl.static_range(1, LANES):
        if len(x_m_strides) == 1:
            x_ptrs += x_m_strides[0]
        elif len(x_m_strides) == 2:  # to the next row, carrying where the digit was its last
            last = digit == m_digits[0][0] - 1
            at += tl.where(last, x_m_strides[1] - (m_digits[0][0] - 1) * x_m_strides[0], x_m_strides[0])
            digit = tl.where(last, 0, digit + 1)
            x_ptrs = x_ptr + at
        else:
            x_ptrs = x_ptr + (across + run_offset(m + i, m_digits, x_m_strides, ALIGN_X[0]))
        packed |= tl.load(x_ptrs).to(tl.uint32) << (32 // LANES * i)
    return packed.reshape(WORDS, GROUPS)


@triton.jit
def copy_ends(
    x_ptr, out_ptr, column, columns, skew, M, words,
    m_digits, n_digits, x_m_strides, x_n_digits, x_n_strides, out_n_strides,
    ALIGN_X: tl.constexpr, ALIGN_OUT: tl.constexpr, UNEVEN_N: tl.constexpr, WIDE: tl.constexpr,
    FLIP: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy the elements before the first and after the last of `words` words of each column."""
    index = tl.arange(0, 2 * LANES * BLOCK_N).to(tl.uint32)
    n = column + limited((index % BLOCK_N).to(tl.int32), columns, UNEVEN_N)
    m = (index // BLOCK_N).to(tl.int32)
    offset = skew + run_offset(n, n_digits, out_n_strides, ALIGN_OUT)
    m += tl.where(m < (-offset & (LANES - 1)).to(tl.int32), 0, LANES * words)
    if WIDE:
        m = m.to(tl.int64)
    at = run_offset(n, x_n_digits, x_n_strides, ALIGN_X[1]) + run_offset(m, m_digits, x_m_strides, ALIGN_X[0])
    value = tl.load(x_ptr + at, mask=m < M)
    tl.store(out_ptr + (offset + m), value ^ FLIP, mask=m < M)


@triton.jit(
    do_not_specialize=("M", "N"), do_not_specialize_on_alignment=("m_digits", "n_digits", "x_n_digits")
)
def permute_packed(
    x_ptr, out_ptr,
    M, N,
    m_digits, n_digits, x_m_strides, x_n_digits, x_n_strides, out_n_strides,
    batch, batch_shape, x_batch_strides, out_batch_strides,
    ALIGN_X: tl.constexpr, ALIGN_OUT: tl.constexpr, UNEVEN_M: tl.constexpr, UNEVEN_N: tl.constexpr,
    WIDE: tl.constexpr, FLIP_LAST: tl.constexpr, WAIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """`permute_tile` of elements of 1 or 2 bytes, out contiguous along m, in words of 4 bytes.

    A thread reads elements of the rows that make a word and packs them; words, not elements, are transposed
    in shared memory and written. A word starts where memory has one: up to three rows further down,
    another number in each column where rows of out are odd. A group is as many columns as a word has
    elements: over a group these numbers recur, so that threads side by side read one row.
    M is at least twice the elements of a word, less one.
    """
    matrix = batch_index(WIDE)
    if matrix >= batch:
        return
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    LANES: tl.constexpr = 4 // SIZE
    WORDS: tl.constexpr = BLOCK_M // LANES
    GROUPS: tl.constexpr = BLOCK_N // LANES
    ELEMENT: tl.constexpr = tl.uint8 if SIZE == 1 else tl.uint16
    FLIP: tl.constexpr = FLIP_LAST & ((1 << 8 * SIZE) - 1)
    x_ptr = x_ptr.to(tl.pointer_type(ELEMENT), bitcast=True)
    out_ptr = out_ptr.to(tl.pointer_type(ELEMENT), bitcast=True)
    if WIDE:
        M = tl.cast(M, tl.int64)
        N = tl.cast(N, tl.int64)
    all_words = (M - (LANES - 1)) // LANES  # whole ones in every column
    tiles_m = tl.cdiv(all_words, WORDS)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_row, tile_column = grouped_tile(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    word, words = tile_span(tile_row, tiles_m, all_words, 1, WORDS, UNEVEN_M)
    column, columns = tile_span(tile_column, tiles_n, N, 1, BLOCK_N, UNEVEN_N)
    x_ptr += batch_offset(matrix, batch_shape, x_batch_strides, ALIGN_X[2])
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, ALIGN_OUT[2])
    skew = (out_ptr.to(tl.int64) // SIZE % LANES).to(tl.int32)  # elements from a word's start to out
    out_ptr -= skew
    if WAIT:
        gdc_launch_dependents()
        gdc_wait()

    tile = ()
    for J in tl.static_range(LANES):
        tile += (
            packed_column(
                x_ptr, J, word, words, column, columns, skew, m_digits, n_digits, x_m_strides, x_n_digits,
                x_n_strides, out_n_strides, ALIGN_X, ALIGN_OUT[1], UNEVEN_M, UNEVEN_N, WIDE, LANES, WORDS,
                GROUPS,
            ),
        )  # fmt: skip
    if LANES == 2:
        tile = tl.join(tile[0], tile[1])
    else:
        tile = tl.join(tl.join(tile[0], tile[2]), tl.join(tile[1], tile[3]))
    tile = tl.permute(tile.reshape(WORDS, BLOCK_N), (1, 0)).reshape(BLOCK_N * WORDS)

    index = tl.arange(0, BLOCK_N * WORDS).to(tl.uint32)
    n = column + limited((index // WORDS).to(tl.int32), columns, UNEVEN_N)
    first = (skew + run_offset(n, n_digits, out_n_strides, ALIGN_OUT[1]) + (LANES - 1)) >> (LANES // 2)
    at = first + (word + limited((index % WORDS).to(tl.int32), words, UNEVEN_M))
    if FLIP:
        tile ^= FLIP * (0x1010101 if SIZE == 1 else 0x10001)
    tl.store(out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + at, tile)
    if tile_row == 0:
        copy_ends(
            x_ptr, out_ptr, column, columns, skew, M, all_words, m_digits, n_digits, x_m_strides, x_n_digits,
            x_n_strides, out_n_strides, ALIGN_X, ALIGN_OUT[1], UNEVEN_N, WIDE, FLIP, LANES, BLOCK_N,
        )  # fmt: skip
