"""Share pieces among tile kernels: the order of tiles, alignment facts and batch offsets."""

from typing import Any

import triton
import triton.language as tl


def constant(value: Any) -> Any:
    """Return a constexpr for kernels to read; in the interpreter, which adds none to a tensor, the value."""
    return value if triton.knobs.runtime.interpret else tl.constexpr(value)


@triton.jit
def grouped_tile(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the (row, column) of tile `index`, walked down bands of GROUP_M tile rows.

    Programs that run at the same time then share rows of A and columns of B through the L2 cache.
    """
    band = GROUP_M * tiles_n
    first = (index // band) * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    within = index % band
    return first + within % rows, within // rows


@triton.jit
def multiple(value, UNIT: tl.constexpr):
    """`value`, which the caller knows to be a multiple of UNIT, in a form that tells the compiler so.

    Triton specialises integers on divisibility by 16 only. A row of 1000 two-byte elements is
    still a whole number of 16-byte words, and this lets loads of it be that wide.
    """
    if UNIT > 1:
        value = value // UNIT * UNIT
    return value


@triton.jit
def batch_offset(index, shape, strides, ALIGN: tl.constexpr):
    """Elements from the first matrix to matrix `index` of a batch of any rank, in int64."""
    offset = tl.zeros((), tl.int64)
    for i in tl.static_range(len(shape)):
        size = shape[len(shape) - 1 - i]
        offset += (index % size).to(tl.int64) * multiple(strides[len(shape) - 1 - i], ALIGN)
        index = index // size
    return offset


@triton.jit
def batch_index(WIDE: tl.constexpr):
    """Return the matrix of the batch that this program makes: on grid axes 1 and 2, as 1 ends at 65,535."""
    outer = tl.program_id(2)
    if WIDE:
        outer = outer.to(tl.int64)
    return outer * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def load_tile(ptrs, outer_mask, inner_mask, MASK_OUTER: tl.constexpr, MASK_INNER: tl.constexpr):
    """Load a tile of an operand, zero past edges that MASK_* say it overhangs; others cost no mask."""
    if MASK_OUTER and MASK_INNER:
        tile = tl.load(ptrs, mask=outer_mask & inner_mask, other=0.0)
    elif MASK_OUTER:
        tile = tl.load(ptrs, mask=outer_mask, other=0.0)
    elif MASK_INNER:
        tile = tl.load(ptrs, mask=inner_mask, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def compensated_sum(total, lost, part):
    """total + part, and what rounding lost of it: Kahan's summation, which infinities pass unharmed."""
    corrected = part - lost
    summed = total + corrected
    finite = tl.abs(summed) < float("inf")
    return summed, tl.where(finite, (summed - total) - corrected, 0.0)


@triton.jit
def carried_sum(total, part):
    """total + part of finite numbers, and what rounding lost of it, from which the next part starts.

    This is Kahan's summation with no registers of its own: tensor cores add the next part to what was lost.
    """
    added = (total + part) - total
    return total + added, part - added


@triton.jit
def rounded_to_tf32(x):
    """fp32 rounded to the nearest TF32, ties to even, where tensor cores would cut it."""
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    nearest = (bits + (0xFFF + ((bits >> 13) & 1))) & -0x2000
    return tl.where(finite, nearest, bits).to(tl.float32, bitcast=True)


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr, ROUND: tl.constexpr):
    """Return acc + a @ b. ROUND: round fp32 to TF32, where PRECISION is that and no copy has done so."""
    if a.dtype.is_fp8() and PRECISION != "fast":
        # The fp8 tensor cores of Hopper keep 14 bits of a sum: move it to fp32 after each block of K.
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=a.shape[1], out_dtype=acc.dtype)
    elif a.dtype.is_fp8():
        acc = tl.dot(a, b, acc, out_dtype=acc.dtype)
    elif PRECISION == "tf32" and ROUND:
        acc = tl.dot(rounded_to_tf32(a), rounded_to_tf32(b), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc


@triton.jit
def added(acc, lost, a, b, PRECISION: tl.constexpr, COMPENSATED: tl.constexpr):
    """Return acc + a @ b, and what rounding lost of it where COMPENSATED (see `compensated_sum`)."""
    if COMPENSATED:
        part = tl.dot(a, b, input_precision=PRECISION, out_dtype=acc.dtype)
        acc, lost = compensated_sum(acc, lost, part)
    else:
        acc = add_product(acc, a, b, PRECISION, True)
    return acc, lost
