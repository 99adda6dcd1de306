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


@triton.jit
def read_box(
    x_ptr, run, rows, read_digits,
    READ: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Read a box as it lies in x, in words of READ elements, and return [BLOCK] and the place of its first.

    read_digits: of each dimension across the runs of x, outermost first, (pitch, magic, side, step): its
    neighbours are `pitch` elements apart here, and `step` more in x, which is a multiple of READ. Digit CUT
    has at most `rows`. The words that a run begins and ends in may hold other elements as well.
    """
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    first = (x_ptr.to(tl.int64) // SIZE % READ).to(tl.int32)
    at = tl.arange(0, BLOCK // READ) * READ - first
    rest = at + (READ - 1)
    here = rest < BLOCK + READ
    offset = at.to(tl.int64) if WIDE else at
    above = rest
    for i in tl.static_range(len(read_digits)):
        digit = tl.umulhi(rest.to(tl.uint32), tl.cast(read_digits[i][1], tl.uint32)).to(tl.int32)
        rest -= digit * read_digits[i][0]
        offset += digit.to(tl.int64) * read_digits[i][3] if WIDE else digit * read_digits[i][3]
        if i != SPLIT:  # which counts LANES of what the next digit does
            row = above * LANES + digit if i == SPLIT + 1 and i > 0 else digit
            here &= row < (tl.minimum(read_digits[i][2], rows) if i == CUT else read_digits[i][2])
        above = digit
    here &= rest < run + (READ - 1)
    words = tl.multiple_of(x_ptr + offset, READ * SIZE)
    values = tl.load(words[:, None] + tl.arange(0, READ)[None, :], mask=here[:, None])
    return values.reshape(BLOCK), first


@triton.jit
def copy_singly(
    x_ptr, out_ptr, length, pieces, single, single_magic,
    piece_magics, piece_x_steps, piece_out_steps, inner_magics, inner_x_steps,
    WIDE: tl.constexpr, FLIP_LAST: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Copy the first `single` elements of each piece, as far as its line goes, one by one."""
    for start in range(0, pieces * single, EACH):
        index = start + tl.arange(0, EACH)
        piece = tl.umulhi((2 * index).to(tl.uint32), tl.cast(single_magic, tl.uint32)).to(tl.int32)
        inner = index - piece * single
        mask = (piece < pieces) & (inner < length)
        at = within_box(piece, piece_magics, piece_x_steps, WIDE)
        at += within_box(inner, inner_magics, inner_x_steps, WIDE)
        to = within_box(piece, piece_magics, piece_out_steps, WIDE) + inner
        values = tl.load(x_ptr + at, mask=mask)
        if FLIP_LAST != 0:
            values ^= tl.full(values.shape, FLIP_LAST, values.dtype)
        tl.store(out_ptr + to, values, mask=mask)


@triton.jit
def copy_ends(
    x_ptr, out_ptr, skew, begins, length, pieces, piece_size,
    piece_magics, piece_x_steps, piece_out_steps, inner_magics, inner_x_steps,
    LANES: tl.constexpr, ENDS: tl.constexpr, WIDE: tl.constexpr, FLIP_LAST: tl.constexpr,
):  # fmt: skip
    """Copy what is before the first whole word of each line and after its last, if it is this box's."""
    index = tl.arange(0, ENDS)
    piece = index // (2 * LANES)
    to = within_box(piece, piece_magics, piece_out_steps, WIDE)
    inner = index % (2 * LANES)
    start = -(skew + to.to(tl.int32)) & (LANES - 1)
    end = start + (length - start) // LANES * LANES
    ahead = inner < LANES
    inner += tl.where(ahead, 0, end - LANES)
    ours = tl.where(ahead, begins & (inner < start), (length <= piece_size) & (inner >= start))
    mask = ours & (inner < length) & (piece < pieces)
    at = within_box(piece, piece_magics, piece_x_steps, WIDE)
    at += within_box(inner, inner_magics, inner_x_steps, WIDE)
    values = tl.load(x_ptr + at, mask=mask)
    if FLIP_LAST != 0:
        values ^= tl.full(values.shape, FLIP_LAST, values.dtype)
    tl.store(out_ptr + (to + inner), values, mask=mask)


@triton.jit
def gather_box(
    x_ptr, out_ptr, row, rows, run, run_step, read_digits,
    pieces, words, word_magic, last_word, piece_size, row_size,
    piece_magics, piece_places, piece_x_steps, piece_out_steps,
    inner_magics, inner_places, inner_x_steps, jump,
    READ: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, SKEWED: tl.constexpr,
    WHOLE: tl.constexpr, SHARED: tl.constexpr, SEVERAL: tl.constexpr, ENDS: tl.constexpr,
    WIDE: tl.constexpr, FLIP_LAST: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy a box by words: see `permute_box`."""
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    run = tl.where(run_step > 0, tl.minimum(run, rows * run_step), run)
    values, first = read_box(x_ptr, run, rows, read_digits, READ, CUT, SPLIT, LANES, WIDE, BLOCK_X)

    number = tl.arange(0, BLOCK // LANES)
    lane = tl.arange(0, LANES)[None, :]
    word = tl.minimum(number, words * pieces - 1)
    inner = word * LANES
    place = tl.zeros_like(word) + first
    to = tl.zeros_like(word)
    if SEVERAL:
        piece = tl.umulhi((2 * word).to(tl.uint32), tl.cast(word_magic, tl.uint32)).to(tl.int32)
        inner -= piece * words * LANES
        place += within_box(piece, piece_magics, piece_places, False)
        to = within_box(piece, piece_magics, piece_out_steps, WIDE)
    mask = number < words * pieces
    if SKEWED:
        skew = (out_ptr.to(tl.int64) // SIZE % LANES).to(tl.int32)
        inner += -(skew + to.to(tl.int32)) & (LANES - 1)
        mask &= inner <= rows * row_size - LANES
    if not WHOLE:
        mask &= inner < piece_size
    out_ptrs = tl.multiple_of(out_ptr + (to + inner), LANES * SIZE)
    if SKEWED:
        inner = tl.minimum(inner, last_word)  # where nothing is written, nothing beyond the box is gathered
    if SHARED:
        place += within_box(inner, inner_magics, inner_places, False)
        if SPLIT >= 0:
            place += inner // LANES * jump
        place = place[:, None] + lane * inner_places[0]
    else:
        inner = inner[:, None] + lane
        place = place[:, None] + within_box(inner, inner_magics, inner_places, False)
        if SPLIT >= 0:
            place += inner // LANES * jump
    values = tl.gather(values, place.reshape(BLOCK), 0).reshape(BLOCK // LANES, LANES)
    if FLIP_LAST != 0:
        values ^= tl.full(values.shape, FLIP_LAST, values.dtype)
    tl.store(out_ptrs[:, None] + lane, values, mask=mask[:, None])

    if SKEWED:
        if (row == 0) | (rows * row_size <= piece_size):
            copy_ends(
                x_ptr, out_ptr, skew, row == 0, rows * row_size, pieces, piece_size,
                piece_magics, piece_x_steps, piece_out_steps, inner_magics, inner_x_steps,
                LANES, ENDS, WIDE, FLIP_LAST,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=(
        "span", "reach", "far", "row_step", "run", "run_step", "pieces", "words", "last_word", "piece_size",
        "single", "line", "jump",
    )
)  # fmt: skip
def permute_box(
    x_ptr, out_ptr,
    box_dims, x_box_strides, out_box_strides,
    span, reach, far, row_step, run, run_step, read_digits,
    pieces, words, word_magic, last_word, piece_size, single, single_magic, row_size, line,
    piece_magics, piece_places, piece_x_steps, piece_out_steps,
    inner_magics, inner_places, inner_x_steps, jump,
    READ: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, SLANTED: tl.constexpr,
    SKEWED: tl.constexpr, WHOLE: tl.constexpr, SHARED: tl.constexpr, SEVERAL: tl.constexpr,
    ENDS: tl.constexpr, WIDE: tl.constexpr, FLIP_LAST: tl.constexpr, WAIT: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Copy a box of the index space a program; the last box of a side overlaps the one before.

    A box is read as it lies in x (see `read_box`), and in shared memory as it was read. It is written in the
    order of out: `pieces` of `piece_size` elements that follow each other, LANES of them a word, from places
    in shared memory. *_places tell how far an element is from the first there, *_steps in x and in out. In
    shared memory LANES rows of the innermost dimension of out are followed by `jump` elements of nothing
    (SPLIT), so that what a warp gathers at once lies in different banks.
    A piece is part of a line of `line` rows of `row_size` elements.
    SKEWED: pieces may start inside a word of memory. SLANTED: a box then has the words that begin in its
    pieces, so it reads more rows than it has. What is left of each line is copied singly, from x.
    WHOLE: pieces have whole words. SHARED: all elements of a word differ in the innermost dimension alone.
    Elements of x are among `span` from the first. Those of a box are `reach` from its first at most, and
    `row_step` more for each of `far` rows of the line, if it has as many. A box whose words may begin before
    x does, or end after it, is copied element by element, EACH at once.
    """
    SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    box = tl.program_id(0)
    before = box_start(box, box_dims, x_box_strides)
    x_ptr += before
    out_ptr += box_start(box, box_dims, out_box_strides)
    row = box * 0
    if SLANTED:
        row = tl.minimum(box % box_dims[0][0] * box_dims[0][3], box_dims[0][4])
    rows = tl.minimum(line - row, far)  # of the line that follow, as far as a box reads
    if WAIT:
        gdc_launch_dependents()
        gdc_wait()
    end = before + reach + (rows - 1).to(tl.int64) * row_step + READ
    if (before >= x_ptr.to(tl.int64) // SIZE % READ) & (end <= span):
        gather_box(
            x_ptr, out_ptr, row, rows, run, run_step, read_digits,
            pieces, words, word_magic, last_word, piece_size, row_size,
            piece_magics, piece_places, piece_x_steps, piece_out_steps,
            inner_magics, inner_places, inner_x_steps, jump,
            READ, CUT, SPLIT, LANES, SKEWED, WHOLE, SHARED, SEVERAL, ENDS, WIDE, FLIP_LAST, BLOCK_X, BLOCK,
        )  # fmt: skip
    else:
        copy_singly(
            x_ptr, out_ptr, rows * row_size, pieces, single, single_magic,
            piece_magics, piece_x_steps, piece_out_steps, inner_magics, inner_x_steps,
            WIDE, FLIP_LAST, EACH,
        )  # fmt: skip
