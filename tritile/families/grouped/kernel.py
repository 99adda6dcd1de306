"""Multiply groups whose sizes only the GPU knows: tiles through pointers, on any GPU."""

import triton
import triton.language as tl

from tritile.families.common.tiles import add_product, grouped_tile, load_tile, multiple
from tritile.families.grouped.groups import ends_of_groups, group_of_tile


@triton.jit(do_not_specialize=("groups", "M"))
def grouped_matmul_tile(
    a_ptr, b_ptr, out_ptr, offs_ptr,
    groups, M, N, K,
    stride_ag, stride_am, stride_ak, stride_bg, stride_bk, stride_bn, stride_og, stride_om, stride_on,
    ALIGN_N: tl.constexpr, ALIGN_K: tl.constexpr,
    ALIGN_A: tl.constexpr, ALIGN_B: tl.constexpr, ALIGN_OUT: tl.constexpr,
    MASK_N: tl.constexpr, MASK_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Make, in each program, one BLOCK_M x BLOCK_N tile of the product of one group.

    out[rows of g] = a[rows of g] @ b[g], where `offs` says before which row each group ends. Rows of no group
    become zero.

    The stride over groups of what has none is 0. ALIGN_* and MASK_* are facts as in `matmul_tile`, with the
    group, row and column strides of an operand. WIDE: offsets within a tile need 64 bits.
    """
    N = multiple(N, ALIGN_N)
    stride_ag = multiple(stride_ag, ALIGN_A[0])
    stride_am = multiple(stride_am, ALIGN_A[1])
    stride_ak = multiple(stride_ak, ALIGN_A[2])
    stride_bg = multiple(stride_bg, ALIGN_B[0])
    stride_bk = multiple(stride_bk, ALIGN_B[1])
    stride_bn = multiple(stride_bn, ALIGN_B[2])
    stride_og = multiple(stride_og, ALIGN_OUT[0])
    stride_om = multiple(stride_om, ALIGN_OUT[1])
    stride_on = multiple(stride_on, ALIGN_OUT[2])
    if WIDE:
        stride_am = tl.cast(stride_am, tl.int64)
        stride_ak = tl.cast(stride_ak, tl.int64)
        stride_bk = tl.cast(stride_bk, tl.int64)
        stride_bn = tl.cast(stride_bn, tl.int64)
        stride_om = tl.cast(stride_om, tl.int64)
        stride_on = tl.cast(stride_on, tl.int64)
    index = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    ends, tile_ends = ends_of_groups(offs_ptr, groups, M, tiles_n, BLOCK_M, BLOCK_G)
    group, first, row_start, row_end = group_of_tile(index, ends, tile_ends, M)
    index -= first
    depth = multiple(tl.where(group < groups, K, 0), ALIGN_K)
    tiles_m = tl.cdiv(row_end - row_start, BLOCK_M)
    if index >= tiles_m * tiles_n:  # there are more programs than tiles, whose number the host does not know
        return
    row, column = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
    m = row_start + row * BLOCK_M
    n = column * BLOCK_N
    in_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    in_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    row_mask = m + in_m[:, None] < row_end
    column_mask = n + in_n[None, :] < N

    in_groups = tl.minimum(group, groups - 1).to(tl.int64)
    a_ptr += in_groups * stride_ag + m.to(tl.int64) * stride_am
    b_ptr += in_groups * stride_bg + n.to(tl.int64) * stride_bn
    out_ptr += in_groups * stride_og + m.to(tl.int64) * stride_om + n.to(tl.int64) * stride_on
    a_ptrs = a_ptr + (in_m[:, None] * stride_am + ks[None, :] * stride_ak)  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + (ks[:, None] * stride_bk + in_n[None, :] * stride_bn)  # [BLOCK_K, BLOCK_N]

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        in_k = ks < depth - k
        a = load_tile(a_ptrs, row_mask, in_k[None, :], True, MASK_K)  # [BLOCK_M, BLOCK_K]
        b = load_tile(b_ptrs, column_mask, in_k[:, None], MASK_N, MASK_K)  # [BLOCK_K, BLOCK_N]
        acc = add_product(acc, a, b, PRECISION, True)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    out_ptrs = out_ptr + (in_m[:, None] * stride_om + in_n[None, :] * stride_on)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)
