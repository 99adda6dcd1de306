"""Lay complex matrices out for a real product, and put its result together."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.tiles import batch_index, batch_offset, multiple


@triton.jit
def plus(total, value, TIMES: tl.constexpr):
    """total + TIMES * value, of a TIMES of 1, -1 or 0."""
    if TIMES == 1:
        total = total + value
    elif TIMES == -1:
        total = total - value
    return total


@triton.jit
def number(re, im, VALUES: tl.constexpr, INDEX: tl.constexpr):
    """Return the number in which an element's parts count VALUES[2 * INDEX] and VALUES[2 * INDEX + 1]."""
    return plus(plus(tl.zeros_like(re), re, VALUES[2 * INDEX]), im, VALUES[2 * INDEX + 1])


@triton.jit
def tile_at(columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the rows and first column of this program's tile, of tiles along grid axis 0, in int64."""
    across = tl.cdiv(columns, BLOCK_C)
    index = tl.program_id(0)
    row = tl.cast(index // across, tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    return row, tl.cast(index % across, tl.int64) * BLOCK_C


@triton.jit
def pairs(stride, BLOCK_C: tl.constexpr, DENSE: tl.constexpr):
    """Return where real and imaginary parts of a row's elements are, `stride` apart, one after the other."""
    word = tl.arange(0, 2 * BLOCK_C)
    return word if DENSE else (word // 2).to(tl.int64) * stride + word % 2


@triton.jit
def lay_out(
    source, copy, rows, columns, stride_sr, stride_sc,
    batch, batch_shape, batch_strides, stride_slot, stride_row, stride_matrix,
    VALUES: tl.constexpr, ACROSS: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr,
    ALIGN_COLUMNS: tl.constexpr, ALIGN_ROWS: tl.constexpr, ALIGN_BATCH: tl.constexpr,
    ALIGN_SCRATCH: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Lay a batch of complex matrices out as real ones, each element as several real numbers.

    VALUES says what the real and the imaginary part of an element count, 1, -1 or 0, in each number that it
    becomes. ACROSS of these lie beside each other, from column ACROSS * c on for column c, in each of several
    slots. Slot i of row r is at i * stride_slot + r * stride_row: the next row, or that row of another plane.

    The source is read as real numbers, two to an element, which its strides count; DENSE: elements of a row
    are side by side. ALIGN_*: facts about the columns and strides (see `multiple`). Rows of the copy are
    whole numbers of ALIGN_SCRATCH, 16 bytes, and what of them is beyond the columns may be written.
    WIDE: there are more matrices than 32 bits count. WAIT: launched before the kernel ahead of it is done.
    """
    matrix = batch_index(WIDE)
    if matrix >= batch:
        return
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    columns = tl.cast(multiple(columns, ALIGN_COLUMNS), tl.int64)
    stride_sr = multiple(stride_sr, ALIGN_ROWS)
    stride_slot = tl.cast(multiple(stride_slot, ALIGN_SCRATCH), tl.int64)
    stride_row = multiple(stride_row, ALIGN_SCRATCH)
    stride_matrix = multiple(stride_matrix, ALIGN_SCRATCH)
    source += batch_offset(matrix, batch_shape, batch_strides, ALIGN_BATCH)
    copy += matrix.to(tl.int64) * stride_matrix
    row, column = tile_at(columns, BLOCK_R, BLOCK_C)
    in_rows = row[:, None] < rows
    from_rows = source + row[:, None] * stride_sr + column * stride_sc
    inside = in_rows & (column * 2 + tl.arange(0, 2 * BLOCK_C)[None, :] < columns * 2)
    words = from_rows + pairs(stride_sc, BLOCK_C, DENSE)[None, :]
    loaded = tl.load(words, mask=inside, other=0.0)  # [BLOCK_R, 2 * BLOCK_C]
    re, im = tl.split(tl.reshape(loaded, (BLOCK_R, BLOCK_C, 2)))
    place = tl.arange(0, ACROSS * BLOCK_C)[None, :] + column * ACROSS
    to_rows = copy + row[:, None] * stride_row
    for i in tl.static_range(len(VALUES) // (2 * ACROSS)):
        made = number(re, im, VALUES, i * ACROSS)
        if ACROSS == 2:
            made = tl.interleave(made, number(re, im, VALUES, i * ACROSS + 1))
        # What is beyond the columns fills the row to a whole unit, so that stores can be wide.
        end = tl.cdiv(columns * ACROSS, ALIGN_SCRATCH) * ALIGN_SCRATCH
        tl.store(to_rows + i * stride_slot + place, made, mask=in_rows & (place < end))


@triton.jit
def put_together(
    source, out, rows, columns, stride_plane, stride_row, stride_matrix, stride_or, stride_oc,
    batch, batch_shape, batch_strides,
    RE: tl.constexpr, IM: tl.constexpr, ACROSS: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr,
    ALIGN_COLUMNS: tl.constexpr, ALIGN_ROWS: tl.constexpr, ALIGN_BATCH: tl.constexpr,
    ALIGN_SCRATCH: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Make a batch of complex matrices of planes of real ones.

    Each plane holds ACROSS numbers for an element, beside each other. RE and IM are what each of them, plane
    by plane, counts in the real and in the imaginary part: 1, -1 or 0. They are added in their order.

    Strides of out count real numbers, two to an element; DENSE, ALIGN_*, WIDE and WAIT: as of `lay_out`.
    Rows of the source are whole numbers of ALIGN_SCRATCH, 16 bytes.
    """
    matrix = batch_index(WIDE)
    if matrix >= batch:
        return
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    columns = tl.cast(multiple(columns, ALIGN_COLUMNS), tl.int64)
    stride_plane = tl.cast(multiple(stride_plane, ALIGN_SCRATCH), tl.int64)
    stride_row = multiple(stride_row, ALIGN_SCRATCH)
    stride_matrix = multiple(stride_matrix, ALIGN_SCRATCH)
    stride_or = multiple(stride_or, ALIGN_ROWS)
    source += matrix.to(tl.int64) * stride_matrix
    out += batch_offset(matrix, batch_shape, batch_strides, ALIGN_BATCH)
    row, column = tile_at(columns, BLOCK_R, BLOCK_C)
    in_rows = row[:, None] < rows
    place = tl.arange(0, ACROSS * BLOCK_C)[None, :] + column * ACROSS
    # To the end of a whole unit, so that loads can be wide: what is beyond the columns goes nowhere.
    end = tl.cdiv(columns * ACROSS, ALIGN_SCRATCH) * ALIGN_SCRATCH
    inside = in_rows & (place < end)
    from_rows = source + row[:, None] * stride_row
    re = tl.zeros((BLOCK_R, BLOCK_C), out.dtype.element_ty)
    im = re
    for plane in tl.static_range(len(RE) // ACROSS):
        tile = tl.load(from_rows + plane * stride_plane + place, mask=inside, other=0.0)
        if ACROSS == 2:
            first, second = tl.split(tl.reshape(tile, (BLOCK_R, BLOCK_C, 2)))
            re = plus(plus(re, first, RE[2 * plane]), second, RE[2 * plane + 1])
            im = plus(plus(im, first, IM[2 * plane]), second, IM[2 * plane + 1])
        else:
            re = plus(re, tile, RE[plane])
            im = plus(im, tile, IM[plane])
    to_rows = out + row[:, None] * stride_or + column * stride_oc
    inside = in_rows & (column * 2 + tl.arange(0, 2 * BLOCK_C)[None, :] < columns * 2)
    tl.store(to_rows + pairs(stride_oc, BLOCK_C, DENSE)[None, :], tl.interleave(re, im), mask=inside)
