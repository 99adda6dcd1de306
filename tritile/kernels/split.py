"""Splitting float32 matrices into float16 parts whose products tensor cores add up to a float32 product."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.kernels.tiles import batch_offset
from tritile.kernels.verdict import A_SPARSE, B_SPARSE, EXTREME, LOSSY, UNFIT

STAGES = tl.constexpr(4)  # of loops along rows: loads under way then take no registers
# Exponents of a row's scaled elements: see `tritile.work.lower.fp16x3`, which derives them.
TOP = tl.constexpr(14)  # of the largest
SHIFT = tl.constexpr(6)  # by which cross terms share out their powers of two
# Elements are told from each other by magnitude, as the bits of fp32.
WHOLE = tl.constexpr(2.0**-8)  # below it a scaled element's split loses more than its last bit
DENSE = tl.constexpr(4.0)  # from here on it counts as one of those that make a row dense
LEAST_ROW = tl.constexpr(-60)  # exponent of a row's largest element, at the least
MOST_ROW = tl.constexpr(60)  # and at the most: scales and sums then stay within fp32
LEAST = tl.constexpr(2.0**-100)  # smaller elements but 0, and
MOST = tl.constexpr((127 + 126) << 23)  # those with the bits of 2**126 or more, are for plain fp32


@triton.jit
def magnitude(x):
    """The bits of |x|, which order as the numbers do; those of infinity and NaN are above all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(exponent):
    """2**exponent as fp32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_part(from_rows, in_rows, column, columns, stride_c):
    """A tile of a matrix, zero past its edges."""
    mask = in_rows & (column[None, :] < columns)
    return tl.load(from_rows + column[None, :].to(tl.int64) * stride_c, mask=mask, other=0.0)


@triton.jit
def store_parts(to_rows, in_rows, column, part, stride_pc, scaled, SECOND: tl.constexpr):
    """hi + lo = `scaled` in fp16, as three parts along K; SECOND: in the order that fits b, else a."""
    hi = scaled.to(tl.float16)
    wide = hi.to(tl.float32)
    lo = ((scaled - wide) * (1 << SHIFT)).to(tl.float16)
    low = (wide * (1.0 / (1 << SHIFT))).to(tl.float16)
    mask = in_rows & (column[None, :] < part)
    to = to_rows + column[None, :].to(tl.int64) * stride_pc
    step = tl.cast(part, tl.int64) * stride_pc
    tl.store(to, low if SECOND else lo, mask=mask)
    tl.store(to + step, lo if SECOND else low, mask=mask)
    tl.store(to + 2 * step, hi, mask=mask)


@triton.jit
def split_rows(
    source, parts, scales, verdict_ptr, index, batch_shape, batch_strides, rows, columns, part,
    stride_sr, stride_sc, stride_pm, stride_pr, stride_pc,
    SECOND: tl.constexpr, ONCE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Scale BLOCK_R rows of a matrix of the batch, split them, and say how well that went.

    Rows run along K, `columns` long; in `parts` each is three parts of `part` elements, filled up with zeros.
    What undoes a row's scale goes to `scales`. ONCE: a row is one block, and read once; else twice.
    """
    across = tl.cdiv(rows, BLOCK_R)
    matrix = index // across
    row = index % across * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    in_rows = row[:, None] < rows
    column = tl.arange(0, BLOCK_C)
    source += batch_offset(matrix, batch_shape, batch_strides, 1)
    from_rows = source + row[:, None].to(tl.int64) * stride_sr
    to_rows = parts + matrix.to(tl.int64) * stride_pm + row[:, None].to(tl.int64) * stride_pr

    x = load_part(from_rows, in_rows, column, columns, stride_sc)  # [BLOCK_R, BLOCK_C]
    largest = magnitude(x)
    if not ONCE:
        for start in tl.range(BLOCK_C, columns, BLOCK_C, num_stages=STAGES):
            tile = load_part(from_rows, in_rows, start + column, columns, stride_sc)
            largest = tl.maximum(largest, magnitude(tile))
    most = tl.max(largest, 1)  # [BLOCK_R]
    exponent = (most >> 23) - 127
    in_range = (most == 0) | ((exponent >= LEAST_ROW) & (exponent < MOST_ROW))
    exponent = tl.where(most == 0, TOP, tl.minimum(tl.maximum(exponent, LEAST_ROW), MOST_ROW))
    scale = row_scale(TOP - exponent)[:, None]
    tl.store(scales + matrix.to(tl.int64) * rows + row, row_scale(exponent - TOP), mask=row < rows)

    lossy = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    dense = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    tiny = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for start in tl.range(0, 1 if ONCE else part, BLOCK_C, num_stages=STAGES):
        if not ONCE:
            x = load_part(from_rows, in_rows, start + column, columns, stride_sc)
        size = tl.abs(x)
        scaled = x * scale
        lossy += ((size > 0) & (tl.abs(scaled) < WHOLE)).to(tl.int32)
        dense += (tl.abs(scaled) >= DENSE).to(tl.int32)
        tiny |= ((size > 0) & (size < LEAST)).to(tl.int32)
        store_parts(to_rows, in_rows, start + column, part, stride_pc, scaled, SECOND)

    lost = tl.sum(lossy, 1)  # [BLOCK_R]
    kept = tl.sum(dense, 1)
    bits = tl.where(lost > 0, LOSSY, 0)
    bits |= tl.where(kept < columns - columns // 16 * 3, B_SPARSE if SECOND else A_SPARSE, 0)
    bits |= tl.where(kept < columns // 16 * 5, A_SPARSE | B_SPARSE, 0)  # beyond what the other makes up for
    bits |= tl.where((lost > columns // 64) | (in_range == 0), UNFIT, 0)
    bits |= tl.where((most >= MOST) | (tl.max(tiny, 1) > 0), EXTREME, 0)
    bits = tl.where(row < rows, bits, 0)
    tl.atomic_or(verdict_ptr + row * 0, bits, mask=bits != 0, sem="relaxed")


@triton.jit
def split(
    a_ptr, a_parts, a_scales, a_batch, a_batch_shape, a_batch_strides, a_rows,
    stride_ar, stride_ac, stride_apm, stride_apr, stride_apc,
    b_ptr, b_parts, b_scales, b_batch, b_batch_shape, b_batch_strides, b_rows,
    stride_br, stride_bc, stride_bpm, stride_bpr, stride_bpc,
    verdict_ptr, columns, part,
    A_ONCE: tl.constexpr, A_BLOCK_R: tl.constexpr, A_BLOCK_C: tl.constexpr,
    B_ONCE: tl.constexpr, B_BLOCK_R: tl.constexpr, B_BLOCK_C: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Split the rows of a and the columns of b, which run along K, in one launch: see `split_rows`.

    WAIT: launched before the kernel ahead of it is done, so wait for that one.
    """
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(0)
    of_a = a_batch * tl.cdiv(a_rows, A_BLOCK_R)
    if index < of_a:
        split_rows(
            a_ptr, a_parts, a_scales, verdict_ptr, index, a_batch_shape, a_batch_strides, a_rows, columns,
            part, stride_ar, stride_ac, stride_apm, stride_apr, stride_apc,
            False, A_ONCE, A_BLOCK_R, A_BLOCK_C,
        )  # fmt: skip
    else:
        split_rows(
            b_ptr, b_parts, b_scales, verdict_ptr, index - of_a, b_batch_shape, b_batch_strides, b_rows,
            columns, part, stride_br, stride_bc, stride_bpm, stride_bpr, stride_bpc,
            True, B_ONCE, B_BLOCK_R, B_BLOCK_C,
        )  # fmt: skip
