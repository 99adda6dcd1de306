"""Zero the rows of a result that belong to no group."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("groups", "rows", "stride"))
def zero_rows(out_ptr, ends_ptr, groups, rows, N, stride, BLOCK: tl.constexpr):
    """Zero the rows of out, of N contiguous elements each, from where the last group ends."""
    end = tl.load(ends_ptr + groups - 1).to(tl.int64)
    blocks = tl.cdiv(N, BLOCK)
    zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    for index in range(tl.program_id(0), (rows - end) * blocks, tl.num_programs(0)):
        column = index % blocks * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + (end + index // blocks) * stride + column, zeros, mask=column < N)
