"""Copy tensors whose dimensions lie in another order."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.tiles import batch_index, batch_offset, grouped_tile, multiple


@triton.jit
def divided(index, digit):
    """`index`, from 0 to 2^31 - 1, by the size of a digit, which is (size, magic, shift) as from `work.tile`.

    Division by a constant as a multiplication: Granlund and Montgomery, "Division by Invariant Integers
    using Multiplication", 1994. 64-bit indices are divided as they are.
    """
    if index.dtype.primitive_bitwidth == 64:
        quotient = index // digit[0]
    else:
        high = tl.umulhi(index.to(tl.uint32), tl.cast(digit[1], tl.uint32))
        quotient = (high >> digit[2]).to(tl.int32)
    return quotient


@triton.jit
def run_offset(index, digits, strides, ALIGN: tl.constexpr):
    """Elements to `index` of a run of dimensions, innermost first, that has these strides."""
    offset = index * 0
    for i in tl.static_range(len(strides)):
        if i == len(strides) - 1:
            offset += index * multiple(strides[i], ALIGN)
        else:
            above = divided(index, digits[i])
            offset += (index - above * digits[i][0]) * multiple(strides[i], ALIGN)
            index = above
    return offset


@triton.jit
def tile_span(index, tiles, extent, ALIGN: tl.constexpr, BLOCK: tl.constexpr, UNEVEN: tl.constexpr):
    """Return where tile `index` of `tiles` begins, and how much of `extent` it covers.

    The last tile ends where the extent does and overlaps the one before: what two of them copy, both copy
    alike, and a whole tile needs no masks. UNEVEN: so much would overlap that each covers less than BLOCK.
    """
    unit: tl.constexpr = min(ALIGN, BLOCK)
    covered = tl.cdiv(tl.cdiv(extent, tiles), unit) * unit if UNEVEN else BLOCK
    return multiple(tl.minimum(index * covered, extent - covered), unit), covered


@triton.jit
def within(m, n, height, width, UNEVEN_M: tl.constexpr, UNEVEN_N: tl.constexpr):
    """Mask the elements that a tile covers. The compiler leaves out a mask that is true throughout."""
    mask = tl.full(m.shape, True, tl.int1)
    if UNEVEN_M:
        mask &= m < height
    if UNEVEN_N:
        mask &= n < width
    return mask


@triton.jit(
    do_not_specialize=("M", "N"), do_not_specialize_on_alignment=("m_digits", "n_digits", "x_n_digits")
)
def permute_tile(
    x_ptr, out_ptr,
    M, N,
    m_digits, n_digits, x_m_strides, x_n_digits, x_n_strides, stride_om, out_n_strides,
    batch, batch_shape, x_batch_strides, out_batch_strides,
    ALIGN_M: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_X: tl.constexpr, ALIGN_OUT: tl.constexpr,
    UNEVEN_M: tl.constexpr, UNEVEN_N: tl.constexpr, WIDE: tl.constexpr, TURN: tl.constexpr,
    LANES: tl.constexpr, FLIP_FIRST: tl.constexpr, FLIP_LAST: tl.constexpr, WAIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Copy x[m, n] to out[m, n] tile by tile, where x is densest along n and out along m.

    Both m and n run over one dimension or over several. Those of m follow each other without a gap in
    out, and have a stride each in x (x_m_strides); those of n have one in out (out_n_strides), and in x
    as few as their gaps let them (x_n_strides).
    The tile is read in the order of x and written in the order of out. Where these differ (TURN: out is
    denser along m than along n) the compiler turns it over in shared memory between the two. Both times
    it is a vector of words, so that it is this order, and nothing that the compiler thinks of two
    dimensions, by which threads take them. An element is LANES words of 1 to 8 bytes; strides count words.
    ALIGN_*: facts about extents, and about strides of m, n and batch (see `multiple`).
    UNEVEN_*: see `tile_span`. WAIT: launched before the kernel ahead of it is done, so wait for that one.
    FLIP_FIRST and FLIP_LAST are xor-ed into the first and the last word of every element: sign bits
    of a lazily conjugated or negated input.
    """
    matrix = batch_index(WIDE)
    if matrix >= batch:
        return
    M = multiple(M, ALIGN_M)
    N = multiple(N, ALIGN_N)
    stride_om = multiple(stride_om, ALIGN_OUT[0])
    if WIDE:
        M = tl.cast(M, tl.int64)
        N = tl.cast(N, tl.int64)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_row, tile_column = grouped_tile(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    row, height = tile_span(tile_row, tiles_m, M, ALIGN_M, BLOCK_M, UNEVEN_M)
    column, width = tile_span(tile_column, tiles_n, N, ALIGN_N, BLOCK_N, UNEVEN_N)
    x_ptr += batch_offset(matrix, batch_shape, x_batch_strides, ALIGN_X[2])
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, ALIGN_OUT[2])
    index = tl.arange(0, BLOCK_M * BLOCK_N * LANES).to(tl.uint32)
    lane = (index % LANES).to(tl.int32)

    m = (index // (LANES * BLOCK_N)).to(tl.int32)
    n = (index // LANES % BLOCK_N).to(tl.int32)
    at = run_offset(row + m, m_digits, x_m_strides, ALIGN_X[0])
    at += run_offset(column + n, x_n_digits, x_n_strides, ALIGN_X[1]) + lane
    if WAIT:
        gdc_launch_dependents()
        gdc_wait()
    words = tl.load(x_ptr + at, mask=within(m, n, height, width, UNEVEN_M, UNEVEN_N))
    if FLIP_FIRST != 0 or FLIP_LAST != 0:
        words ^= tl.where(lane == LANES - 1, FLIP_LAST, FLIP_FIRST).to(words.dtype)
    if TURN:
        words = tl.permute(words.reshape(BLOCK_M, BLOCK_N, LANES), (1, 0, 2))
        words = words.reshape(BLOCK_M * BLOCK_N * LANES)
        m = (index // LANES % BLOCK_M).to(tl.int32)
        n = (index // (LANES * BLOCK_M)).to(tl.int32)
    at = run_offset(column + n, n_digits, out_n_strides, ALIGN_OUT[1]) + (row + m) * stride_om + lane
    tl.store(out_ptr + at, words, mask=within(m, n, height, width, UNEVEN_M, UNEVEN_N))


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
