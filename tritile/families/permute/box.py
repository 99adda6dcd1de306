"""Copy boxes of several dimensions, which are gathered from the order of x into the order of out."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.permute.kernel import divided


@triton.jit
def box_start(box, dims, strides):
    """Elements to the first one of box number `box`; dims have (boxes, magic, shift, side, last start)."""
    offset = tl.zeros((), tl.int64)
    for i in tl.static_range(len(dims)):
        above = divided(box, (dims[i][0], dims[i][1], dims[i][2]))
        start = tl.minimum((box - above * dims[i][0]) * dims[i][3], dims[i][4])
        offset += start.to(tl.int64) * strides[i]
        box = above
    return offset


@triton.jit
def within_box(index, magics, steps, WIDE: tl.constexpr):
    """Elements to `index` of a run of a box's dimensions: a multiplication to divide, and one to add, each.

    A step is that of a dimension less that of the whole dimension before it. index times size is below 2^32.
    """
    offset = index.to(tl.int64) * steps[0] if WIDE else index * steps[0]
    for i in tl.static_range(1, len(steps)):
        index = tl.umulhi(index.to(tl.uint32), tl.cast(magics[i - 1], tl.uint32)).to(tl.int32)
        offset += index.to(tl.int64) * steps[i] if WIDE else index * steps[i]
    return offset


@triton.jit(do_not_specialize=("reads", "pieces", "piece_size"))
def permute_box(
    x_ptr, out_ptr,
    box_dims, x_box_strides, out_box_strides,
    reads, read_magics, read_steps,
    pieces, piece_size, word_magic, piece_magics, piece_places, piece_x_steps, piece_out_steps,
    inner_magics, inner_places, inner_x_steps,
    READ: tl.constexpr, LANES: tl.constexpr, SKEWED: tl.constexpr, ENDS: tl.constexpr, WIDE: tl.constexpr,
    FLIP_LAST: tl.constexpr, WAIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a box of the index space a program; the last box of a side overlaps the one before.

    A box is read in the order of x, READ elements at a time where it starts on as many, and lies in shared
    memory in this order. It is written in the order of out: `pieces` of `piece_size` elements that follow
    each other, LANES of them a word. *_places tell how far an element is from the first in shared memory,
    *_steps in x and in out.
    SKEWED: a piece may start inside a word of memory. All pieces then have as many words as the one that has
    least, and its other elements, fewer than ENDS, are copied singly, from x.
    """
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    x_ptr += box_start(tl.program_id(0), box_dims, x_box_strides)
    out_ptr += box_start(tl.program_id(0), box_dims, out_box_strides)
    index = tl.arange(0, BLOCK)
    read = index // READ
    at = within_box(read, read_magics, read_steps, WIDE) + index % READ
    if WAIT:
        gdc_launch_dependents()
        gdc_wait()
    if x_ptr.to(tl.int64) % (READ * SIZE) == 0:
        x_ptrs = tl.multiple_of(tl.max_contiguous(x_ptr + at, READ), READ * SIZE)
        values = tl.load(x_ptrs, mask=read < reads, other=0)
    else:  # an input, or the last box of a side, that starts elsewhere
        values = tl.load(x_ptr + at, mask=read < reads, other=0)

    words = (piece_size - (LANES - 1 if SKEWED else 0)) // LANES
    word = tl.minimum(index // LANES, words * pieces - 1)
    piece = tl.umulhi(word.to(tl.uint32), tl.cast(word_magic, tl.uint32)).to(tl.int32)
    piece = tl.where(words == 1, word, piece)
    to = within_box(piece, piece_magics, piece_out_steps, WIDE)
    inner = (word - piece * words) * LANES
    if SKEWED:
        skew = out_ptr.to(tl.int64) // SIZE % LANES
        inner += (-(skew + to) & (LANES - 1)).to(tl.int32)
    inner += index % LANES
    place = within_box(piece, piece_magics, piece_places, False)
    place += within_box(inner, inner_magics, inner_places, False)
    values = tl.gather(values, place, 0)
    if FLIP_LAST != 0:
        values ^= tl.full(values.shape, FLIP_LAST, values.dtype)
    out_ptrs = out_ptr + (to + inner)
    out_ptrs = tl.multiple_of(tl.max_contiguous(out_ptrs, LANES), LANES * SIZE)
    tl.store(out_ptrs, values, mask=index // LANES < words * pieces)

    if SKEWED:
        index = tl.arange(0, ENDS)
        piece = index // (2 * LANES)
        to = within_box(piece, piece_magics, piece_out_steps, WIDE)
        inner = index % (2 * LANES)
        inner += tl.where(inner < (-(skew + to) & (LANES - 1)), 0, words * LANES)
        at = within_box(piece, piece_magics, piece_x_steps, WIDE)
        at += within_box(inner, inner_magics, inner_x_steps, WIDE)
        mask = (piece < pieces) & (inner < piece_size)
        values = tl.load(x_ptr + at, mask=mask, other=0)
        if FLIP_LAST != 0:
            values ^= tl.full(values.shape, FLIP_LAST, values.dtype)
        tl.store(out_ptr + (to + inner), values, mask=mask)
