"""Sum rows and columns of integers, by which products are corrected for zero points."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def sum_block(
    x_ptr, sums_ptr, zero_ptr, block, count, K, stride_v, stride_k, stride_zero,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sums[v] = the sum over k of x[v, k], less K zero[v] where there is a zero, for a block of v."""
    vectors = block * BLOCK_V + tl.arange(0, BLOCK_V)
    ks = tl.arange(0, BLOCK_K)
    inside = vectors < count
    from_rows = x_ptr + vectors[:, None].to(tl.int64) * stride_v
    total = tl.zeros((BLOCK_V, BLOCK_K), tl.int32)
    for k in range(0, K, BLOCK_K):
        offsets = (k + ks)[None, :].to(tl.int64) * stride_k
        part = tl.load(from_rows + offsets, mask=inside[:, None] & ((k + ks)[None, :] < K), other=0)
        total += part.to(tl.int32)
    summed = tl.sum(total, 1)
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + vectors.to(tl.int64) * stride_zero, mask=inside, other=0)
        summed -= K * zero.to(tl.int32)
    tl.store(sums_ptr + vectors, summed, mask=inside)


@triton.jit
def add_up(
    a_ptr, a_sums_ptr, a_count, stride_am, stride_ak,
    b_ptr, b_sums_ptr, b_count, stride_bn, stride_bk, zero_ptr, stride_zero,
    K, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Sums of rows of a and of columns of b, these less K zero_b, in int32; of a count of 0, none.

    *_BLOCK: vectors, and elements of K, that a program takes at once. WAIT: launched before the kernel
    ahead of it is done, so wait for that one.
    """
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    index = tl.program_id(0)
    programs = tl.cdiv(a_count, A_BLOCK[0])
    if index < programs:
        sum_block(
            a_ptr, a_sums_ptr, None, index, a_count, K, stride_am, stride_ak, 0, A_BLOCK[0], A_BLOCK[1]
        )  # fmt: skip
    else:
        sum_block(
            b_ptr, b_sums_ptr, zero_ptr, index - programs, b_count, K, stride_bn, stride_bk, stride_zero,
            B_BLOCK[0], B_BLOCK[1],
        )  # fmt: skip
