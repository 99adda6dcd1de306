"""Copy matrices whose columns are contiguous into matrices whose rows are."""

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.repack import copy_tile
from tritile.families.common.tiles import batch_offset


@triton.jit
def lay_rows(
    source, copy, batch_shape, batch_strides, rows, columns, stride_sr, stride_sc, stride_cr,
    ALIGN_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Copy a tile of a matrix of a batch into a contiguous batch of matrices of rows `stride_cr` apart.

    Rows of the copy are whole numbers of ALIGN_C elements, and filled with zeros to their end.
    WAIT: launched before the kernel ahead of it is done, so wait for that one.
    """
    stride_cr = stride_cr // ALIGN_C * ALIGN_C  # tells the compiler
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(0)
    tiles = tl.cdiv(rows, BLOCK_R) * tl.cdiv(columns, BLOCK_C)
    matrix = index // tiles
    source += batch_offset(matrix, batch_shape, batch_strides, 1)
    copy += matrix.to(tl.int64) * rows * stride_cr
    copy_tile(
        source, copy, index % tiles, 1, rows, columns, 0, 0, stride_sr, stride_sc, stride_cr,
        True, BLOCK_R, BLOCK_C,
    )  # fmt: skip
