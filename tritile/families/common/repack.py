"""Copy operands so that their rows start where tensor descriptors can: on 16 bytes."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def copy_tile(
    source, copy, index, inner, rows, columns, stride_so, stride_si, stride_sr, stride_sc, stride_cr,
    GAPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy tile `index` of a batch of matrices into contiguous matrices of rows `stride_cr` apart.

    GAPS: the elements of a row are `stride_sc` apart, and not side by side.

    Rows are filled with zeros to their end, which lets the stores be wide: `stride_cr` is a multiple of
    16 bytes where `columns` is not.
    """
    across = tl.cdiv(columns, BLOCK_C)
    tiles = across * tl.cdiv(rows, BLOCK_R)
    matrix = index // tiles
    row = (index % tiles) // across * BLOCK_R + tl.arange(0, BLOCK_R)
    column = index % across * BLOCK_C + tl.arange(0, BLOCK_C)
    source += (matrix // inner).to(tl.int64) * stride_so + (matrix % inner).to(tl.int64) * stride_si
    copy += matrix.to(tl.int64) * rows * stride_cr
    from_rows = source + row[:, None].to(tl.int64) * stride_sr
    to_rows = copy + row[:, None].to(tl.int64) * stride_cr
    in_rows = row[:, None] < rows
    offsets = column[None, :].to(tl.int64) * stride_sc if GAPS else column[None, :]
    tile = tl.load(from_rows + offsets, mask=in_rows & (column[None, :] < columns), other=0.0)
    tl.store(to_rows + column[None, :], tile, mask=in_rows & (column[None, :] < stride_cr))


@triton.jit(do_not_specialize=("a_rows", "b_rows"))
def repack(
    a_ptr, a_copy, a_batch, a_inner, a_rows, a_columns,
    stride_ao, stride_ai, stride_ar, stride_ac, stride_acr,
    b_ptr, b_copy, b_batch, b_inner, b_rows, b_columns,
    stride_bo, stride_bi, stride_br, stride_bc, stride_bcr,
    ALIGN_C: tl.constexpr, A_GAPS: tl.constexpr, B_GAPS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Copy one operand, or two in one launch; one of batch 0 is left alone.

    Rows of a copy are whole numbers of ALIGN_C elements: 16 bytes.
    WAIT: launched before the kernel ahead of it is done, so wait for that one.
    """
    stride_acr = stride_acr // ALIGN_C * ALIGN_C  # tells the compiler
    stride_bcr = stride_bcr // ALIGN_C * ALIGN_C
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(0)
    a_tiles = a_batch * tl.cdiv(a_rows, BLOCK_R) * tl.cdiv(a_columns, BLOCK_C)
    if index < a_tiles:
        copy_tile(
            a_ptr, a_copy, index, a_inner, a_rows, a_columns,
            stride_ao, stride_ai, stride_ar, stride_ac, stride_acr, A_GAPS, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    else:
        copy_tile(
            b_ptr, b_copy, index - a_tiles, b_inner, b_rows, b_columns,
            stride_bo, stride_bi, stride_br, stride_bc, stride_bcr, B_GAPS, BLOCK_R, BLOCK_C,
        )  # fmt: skip
