"""Split float32 matrices into float16 parts whose products tensor cores add up to a float32 product.

Rows run along K. A row that fits into a program's block is split in one launch (ONCE). Otherwise each tile is
split by a program of its own, after a launch that finds the largest magnitude of each row's chunks. Counts
that decide the fallback flag are added up in memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.fallback import A_SPARSE, B_SPARSE, EXTREME, LOSSY, UNFIT
from tritile.families.common.tiles import batch_offset, constant, multiple

STAGES = constant(4)  # of the loop for peaks: with stages, loads in flight take no registers
LEAST_UNIT = constant(4)  # elements copied together for that: copies of 4 bytes are slow
PEAKS = constant(32)  # of a row that a program looks at together
# Exponents of a row's scaled elements: see `tritile.families.fp16x3.lowering`, which derives them.
TOP = constant(14)  # of the largest
SHIFT = constant(6)  # by which cross terms share out their powers of two
# Elements are compared by magnitude, as the bits of fp32.
WHOLE = constant(2.0**-8)  # below it a scaled element's split loses more than its last bit
DENSE = constant(4.0)  # from here on it counts as one of those that make a row dense
LEAST_ROW = constant(-60)  # exponent of a row's largest element, at the least
MOST_ROW = constant(60)  # and at the most: scales and sums then stay within fp32
COUNTED = constant(15)  # bits of a count within a tile
LEAST = constant(2.0**-100)  # smaller elements but 0, and
MOST = constant((127 + 126) << 23)  # those with the bits of 2**126 or more, are for plain fp32


@triton.jit
def magnitude(x):
    """Return the bits of |x|, which order as numbers do; those of infinity and NaN are above all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(exponent):
    """2**exponent as fp32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_rows(
    source, row, column, rows, columns, stride_r, stride_c, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr
):
    """Load a tile of a matrix, zero past its edges.

    UNIT divides the strides that are not 1, and the size of the matrix along the other dimension, the
    contiguous one: rows where it is TRANSPOSED, else columns.
    """
    if TRANSPOSED:
        rows, stride_c = multiple(rows, UNIT), multiple(stride_c, UNIT)
    else:
        columns, stride_r = multiple(columns, UNIT), multiple(stride_r, UNIT)
    at = source + row[:, None].to(tl.int64) * stride_r + column[None, :].to(tl.int64) * stride_c
    return tl.load(at, mask=(row[:, None] < rows) & (column[None, :] < columns), other=0.0)


@triton.jit
def store_parts(to, mask, step, scaled, SECOND: tl.constexpr):
    """hi + lo = `scaled` in fp16, as three parts, `step` apart; SECOND: in the order that fits b, else a."""
    hi = scaled.to(tl.float16)
    wide = hi.to(tl.float32)
    lo = ((scaled - wide) * (1 << SHIFT)).to(tl.float16)
    low = (wide * (1.0 / (1 << SHIFT))).to(tl.float16)
    tl.store(to, low if SECOND else lo, mask=mask)
    tl.store(to + step, lo if SECOND else low, mask=mask)
    tl.store(to + 2 * step, hi, mask=mask)


@triton.jit
def chunk_peaks(
    source, words, index, matrices, batch_shape, batch_strides, rows, columns, stride_r, stride_c, chunks,
    TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return the largest magnitude of BLOCK_R rows within a chunk: every one of `chunks` blocks of columns.

    `words` is [chunks + 2, all rows], in whole blocks of rows: peaks, and two counts, which become 0.
    """
    across = tl.cdiv(rows, BLOCK_R)
    blocks = matrices * across
    block, chunk = index % blocks, index // blocks
    row = block % across * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    column = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    source += batch_offset(block // across, batch_shape, batch_strides, UNIT)
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    DEEP: tl.constexpr = STAGES if UNIT >= LEAST_UNIT else 1
    for start in tl.range(0, columns - chunk * BLOCK_C, chunks * BLOCK_C, num_stages=DEEP):
        x = load_rows(source, row, start + column, rows, columns, stride_r, stride_c, TRANSPOSED, UNIT)
        largest = tl.maximum(largest, magnitude(x))
    of_all = tl.cast(blocks, tl.int64) * BLOCK_R
    place = words + block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    tl.store(place + chunk * of_all, tl.max(largest, 1))
    if chunk == 0:
        none = tl.zeros((BLOCK_R,), tl.int32)
        tl.store(place + chunks * of_all, none)
        tl.store(place + (chunks + 1) * of_all, none)


@triton.jit
def find_peaks(
    a_ptr, a_matrices, a_batch_shape, a_batch_strides, a_rows, stride_ar, stride_ac, a_words, a_chunks,
    b_ptr, b_matrices, b_batch_shape, b_batch_strides, b_rows, stride_br, stride_bc, b_words, b_chunks,
    flag_ptr, words_ptr, columns,
    A_TRANSPOSED: tl.constexpr, A_UNIT: tl.constexpr, A_BLOCK_R: tl.constexpr, A_BLOCK_C: tl.constexpr,
    A_ONCE: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, B_UNIT: tl.constexpr, B_BLOCK_R: tl.constexpr, B_BLOCK_C: tl.constexpr,
    B_ONCE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Find the peaks of the operands that have chunks, and clear the fallback flag.

    Where an operand's words begin is `a_words` and `b_words`.
    WAIT: launched before the kernel ahead of it is done, so wait for that one.
    """
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(0)
    if index == 0:
        tl.store(flag_ptr, 0)
    of_a = a_matrices * tl.cdiv(a_rows, A_BLOCK_R) * a_chunks
    if not A_ONCE:
        if index < of_a:
            chunk_peaks(
                a_ptr, words_ptr + a_words, index, a_matrices, a_batch_shape, a_batch_strides, a_rows,
                columns, stride_ar, stride_ac, a_chunks, A_TRANSPOSED, A_UNIT, A_BLOCK_R, A_BLOCK_C,
            )  # fmt: skip
    if not B_ONCE:
        if index >= of_a:
            chunk_peaks(
                b_ptr, words_ptr + b_words, index - of_a, b_matrices, b_batch_shape, b_batch_strides, b_rows,
                columns, stride_br, stride_bc, b_chunks, B_TRANSPOSED, B_UNIT, B_BLOCK_R, B_BLOCK_C,
            )  # fmt: skip


@triton.jit
def counted(place, count):
    """`count` added to what other tiles of these rows have added so far; 0 where there is nothing to add."""
    before = tl.atomic_add(place, count, mask=count > 0, sem="relaxed")
    return tl.where(count > 0, before + count, 0)


@triton.jit
def split_tile(
    source, flag_ptr, words, index, matrices, batch_shape, batch_strides, rows, columns, part, chunks,
    stride_r, stride_c, parts, scales, stride_pm, stride_pr, stride_pc,
    SECOND: tl.constexpr, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Scale a tile, split it, and say how well that went.

    Rows run along K, `columns` long; in `parts` each is three parts of `part` elements, filled up with zeros.
    What undoes a row's scale goes to `scales`. ONCE: rows are whole. Where they are not, their counts grow
    tile by tile: whichever of them takes one past its limit sets the flag.
    """
    LANE: tl.constexpr = 2 * UNIT  # elements that a thread stores at once; more would scatter its loads
    across = tl.cdiv(rows, BLOCK_R)
    blocks = matrices * across
    block, start = index % blocks, index // blocks * BLOCK_C
    matrix = block // across
    row = block % across * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    column = start + tl.arange(0, BLOCK_C)
    source += batch_offset(matrix, batch_shape, batch_strides, UNIT)
    x = load_rows(source, row, column, rows, columns, stride_r, stride_c, TRANSPOSED, UNIT)

    if ONCE:
        most = tl.max(magnitude(x), 1)  # [BLOCK_R]
    else:
        of_all = tl.cast(blocks, tl.int64) * BLOCK_R
        words += block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        most = tl.zeros((BLOCK_R,), tl.int32)
        for first in range(0, chunks, PEAKS):
            chunk = first + tl.arange(0, PEAKS)[:, None]
            at = words[None, :] + chunk * of_all
            peaks = tl.load(at, mask=chunk < chunks, other=0, cache_modifier=".cg")
            most = tl.maximum(most, tl.max(peaks, 0))
    exponent = (most >> 23) - 127
    in_range = (most == 0) | ((exponent >= LEAST_ROW) & (exponent < MOST_ROW))
    exponent = tl.where(most == 0, TOP, tl.minimum(tl.maximum(exponent, LEAST_ROW), MOST_ROW))
    unscale = row_scale(exponent - TOP)
    tl.store(scales + matrix.to(tl.int64) * rows + row, unscale, mask=(row < rows) & (start == 0))

    size = tl.abs(x)
    scaled = x * row_scale(TOP - exponent)[:, None]
    # The last term is 0, which the compiler does not know: it stores LANE elements at once, and no more.
    to = parts + LANE * tl.program_id(1)
    to += matrix.to(tl.int64) * stride_pm
    to += row[:, None].to(tl.int64) * stride_pr
    to += column[None, :].to(tl.int64) * stride_pc
    # Where rows lie next to each other there is room for whole blocks of them.
    stored = (column[None, :] < part) & (TRANSPOSED | (row[:, None] < rows))
    step = tl.cast(part, tl.int64) * stride_pc
    store_parts(to, stored, step, scaled, SECOND)

    within = tl.minimum(columns - start, BLOCK_C)
    lossy, dense = (size > 0) & (tl.abs(scaled) < WHOLE), tl.abs(scaled) >= DENSE
    both = tl.sum(tl.where(lossy, 1 << COUNTED, dense.to(tl.int32)), 1)  # [BLOCK_R], as none is both
    lost, thin = both >> COUNTED, within - (both & ((1 << COUNTED) - 1))
    tiny = tl.max(((size > 0) & (size < LEAST)).to(tl.int32), 1)
    thin = tl.where(row < rows, thin, 0)
    bits = tl.where(lost > 0, LOSSY, 0)
    if not ONCE:
        thin = counted(words + chunks * of_all, thin)
        lost = counted(words + (chunks + 1) * of_all, lost)
    bits |= tl.where(thin > columns // 16 * 3, B_SPARSE if SECOND else A_SPARSE, 0)
    # Beyond what the other operand makes up for:
    bits |= tl.where(thin > columns - columns // 16 * 5, A_SPARSE | B_SPARSE, 0)
    bits |= tl.where((lost > columns // 64) | (in_range == 0), UNFIT, 0)
    bits |= tl.where((most >= MOST) | (tiny > 0), EXTREME, 0)
    bits = tl.where(row < rows, bits, 0)
    tl.atomic_or(flag_ptr + row * 0, bits, mask=bits != 0, sem="relaxed")


@triton.jit
def split(
    a_ptr, a_matrices, a_batch_shape, a_batch_strides, a_rows, stride_ar, stride_ac, a_words, a_chunks,
    a_parts, a_scales, stride_apm, stride_apr, stride_apc,
    b_ptr, b_matrices, b_batch_shape, b_batch_strides, b_rows, stride_br, stride_bc, b_words, b_chunks,
    b_parts, b_scales, stride_bpm, stride_bpr, stride_bpc,
    flag_ptr, words_ptr, columns, part,
    A_TRANSPOSED: tl.constexpr, A_UNIT: tl.constexpr, A_BLOCK_R: tl.constexpr, A_BLOCK_C: tl.constexpr,
    A_ONCE: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, B_UNIT: tl.constexpr, B_BLOCK_R: tl.constexpr, B_BLOCK_C: tl.constexpr,
    B_ONCE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Split the rows of a and the columns of b, which run along K, in one launch: see `split_tile`.

    The last tiles come first: what `find_peaks` read last, the cache still holds.
    """
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    of_a = a_matrices * tl.cdiv(a_rows, A_BLOCK_R) * tl.cdiv(part, A_BLOCK_C)
    if index < of_a:
        split_tile(
            a_ptr, flag_ptr, words_ptr + a_words, index, a_matrices, a_batch_shape, a_batch_strides,
            a_rows, columns, part, a_chunks, stride_ar, stride_ac,
            a_parts, a_scales, stride_apm, stride_apr, stride_apc,
            False, A_TRANSPOSED, A_UNIT, A_BLOCK_R, A_BLOCK_C, A_ONCE,
        )  # fmt: skip
    else:
        split_tile(
            b_ptr, flag_ptr, words_ptr + b_words, index - of_a, b_matrices, b_batch_shape, b_batch_strides,
            b_rows, columns, part, b_chunks, stride_br, stride_bc,
            b_parts, b_scales, stride_bpm, stride_bpr, stride_bpc,
            True, B_TRANSPOSED, B_UNIT, B_BLOCK_R, B_BLOCK_C, B_ONCE,
        )  # fmt: skip
