"""Pieces shared by every tile kernel: the order of tiles, alignment facts and batch offsets."""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The (row, column) of tile `index`, walked down bands of GROUP_M tile rows.

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
    """Which matrix of the batch this program works on: grid axes 1 and 2, as axis 1 ends at 65,535."""
    outer = tl.program_id(2)
    if WIDE:
        outer = outer.to(tl.int64)
    return outer * tl.num_programs(1) + tl.program_id(1)
