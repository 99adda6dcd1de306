"""Find on the GPU which rows belong to a group, or to none, and which group a tile belongs to."""

import triton
import triton.language as tl


@triton.jit
def larger(end_a, start_a, end_b, start_b):
    """Return the larger of two ends, and of two starts: so far along the groups."""
    return tl.maximum(end_a, end_b), tl.maximum(start_a, start_b)


@triton.jit
def cut_offsets(offs_ptr, index, groups, total):
    """Return the offsets at these places, cut to 0..total; 0 ahead of the first one and past the last."""
    offs = tl.load(offs_ptr + index, mask=(index >= 0) & (index < groups), other=0)
    return tl.minimum(tl.maximum(offs, 0), total)


@triton.jit
def ends_of_groups(offs_ptr, groups, total, tiles_n, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return where each group of rows ends, and its last tile: both [BLOCK_G], counted over all before.

    An offset below an earlier one counts as that one, so that groups never overlap, whatever the offsets.
    Lanes past the last group hold what its own does.
    """
    index = tl.arange(0, BLOCK_G)
    own = cut_offsets(offs_ptr, index, groups, total)
    ends, starts = tl.associative_scan((own, cut_offsets(offs_ptr, index - 1, groups, total)), 0, larger)
    starts = tl.where(index < groups, starts, ends)
    return ends, tl.cumsum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0) * tiles_n


@triton.jit
def placed(group_a, first_a, start_a, end_a, group_b, first_b, start_b, end_b):
    """Join what two parts of the groups know of a tile's place: see `group_of_tile`."""
    first = tl.maximum(first_a, first_b)
    return group_a + group_b, first, tl.maximum(start_a, start_b), tl.minimum(end_a, end_b)


@triton.jit
def group_of_tile(index, ends, tile_ends, total):
    """Return the group of tile `index`, its first tile, and its rows, from `start` to before `end`.

    For tiles past those of all groups: a group past the last, and the rows from its end on.
    """
    before = tile_ends <= index  # groups whose tiles all come before this one
    return tl.reduce(
        (
            before.to(tl.int32),
            tl.where(before, tile_ends, 0),
            tl.where(before, ends, 0),
            tl.where(before, total, ends),
        ),
        0,
        placed,
    )


@triton.jit(do_not_specialize=("groups", "rows", "stride"))
def zero_rows(out_ptr, ends_ptr, groups, rows, N, stride, BLOCK: tl.constexpr):
    """Zero the rows of out, of N contiguous elements each, from where the last group ends."""
    end = tl.load(ends_ptr + groups - 1).to(tl.int64)
    blocks = tl.cdiv(N, BLOCK)
    zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    for index in range(tl.program_id(0), (rows - end) * blocks, tl.num_programs(0)):
        column = index % blocks * BLOCK + tl.arange(0, BLOCK)
        tl.store(out_ptr + (end + index // blocks) * stride + column, zeros, mask=column < N)
