"""Multiply matrices by specialised warps that split the last tiles along K, on Hopper.

The last wave of tiles may leave SMs idle: the K of its tiles is split evenly among all programs. The
programs that made a tile's parts sum its rows, some rows each, in the order of K.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritile.families.common.warps import tma
from tritile.families.common.warps.consume import no_sums, start_warps
from tritile.families.common.warps.facts import How, Operands, Result
from tritile.families.common.warps.order import Tail, Walk, corner_of, counts_of, piece_at, pieces_of, tile_at
from tritile.families.common.warps.pipeline import multiply, shared_of
from tritile.families.common.warps.store import fused, store_masked, store_tile

ARRIVAL = gl.constexpr(65536)  # of a part, in a tile's counter
PLACES = gl.constexpr(256)  # for arrivals in a counter: more than a tile has parts
ALL = gl.constexpr(65536 * 256)
POLLS = gl.constexpr(64)  # some 40 us: parts of a tile end closer together


@gluon.jit
def place_of(program, rows, columns, WHICH: gl.constexpr, tail, how: gl.constexpr):
    """Return where these rows and columns of a consumer's part lie among the parts.

    In squares of 8, as many as the threads of a warp hold at once, which lie side by side there.
    """
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS
    start = tail.parts + (program * how.CONSUMERS + WHICH) * (ROWS * how.BLOCK_N)
    by_row = rows // 8 * (8 * how.BLOCK_N) + rows % 8 * 8
    by_column = columns // 8 * 64 + columns % 8
    return start + by_row[:, None] + by_column[None, :]


@gluon.jit
def leave(part, first, WHICH: gl.constexpr, tail, how: gl.constexpr):
    """Leave `part`, a consumer's columns from `first` on, among the parts."""
    rows = gl.arange(0, part.shape[0], gl.SliceLayout(1, part.type.layout))
    columns = first + gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout))
    place = place_of(gl.program_id(0), rows, columns, WHICH, tail, how)
    gl.store(place, part, cache_modifier=".cg")


@gluon.jit
def share_of(index, WHICH: gl.constexpr, tail, how: gl.constexpr):
    """Return the first group of 8 rows of tile `index` that this program is to sum, and the step to the next.

    This program's part was left. None needs another to be running: a program that has looked POLLS times
    whether all parts are there says that it gives up, and sums nothing; then the last to arrive sums all
    groups, and no other program any. A tile's counter holds, below bit 16, programs that gave up; from bit 16
    on, arrivals; and from bit 24 on, a number that a launch moves on by 1, or by 2 if any gave up.
    """
    tma.barrier()  # every thread has written before one of them says so
    counter = tail.counters + (index - tail.whole) * how.CONSUMERS + WHICH
    before = gl.atomic_add(counter, ARRIVAL, sem="acq_rel")
    launch = before // ALL
    first = gl.program_id(0) // gl.maximum(tail.rest, 1)
    step = tail.split
    if before // ARRIVAL % PLACES == tail.split - 1:
        wanted = before + ARRIVAL
        moved = launch + gl.where(wanted % ARRIVAL > 0, 2, 1)
        seen = gl.atomic_cas(counter, wanted, moved * ALL, sem="acq_rel")
        while seen != wanted:  # a program gave up meanwhile
            wanted = seen
            moved = launch + gl.where(wanted % ARRIVAL > 0, 2, 1)
            seen = gl.atomic_cas(counter, wanted, moved * ALL, sem="acq_rel")
        if wanted % ARRIVAL > 0:
            first = first * 0
            step = first + 1
    else:
        seen = gl.atomic_add(counter, 0, sem="acquire")
        polls = 1
        while (seen // ALL == launch) & (polls < POLLS):
            seen = gl.atomic_add(counter, 0, sem="acquire")
            polls += 1
        if seen // ALL == launch:
            seen = gl.atomic_add(counter, 1, sem="acq_rel")
            if seen // ALL != launch:  # the last came before that
                gl.atomic_add(counter, -1, sem="relaxed")
        if seen // ALL != launch + 1:
            first = first + how.BLOCK_M
    return first, step


@gluon.jit
def store_sums(
    mine, step, index, start, COLUMNS: gl.constexpr, outer, inner, m, n,
    WHICH: gl.constexpr, result, tail, how: gl.constexpr,
):  # fmt: skip
    """Store a program's groups of rows, of a consumer's COLUMNS columns from `start` on: sums of all parts.

    Parts are summed in the order of K, several under way at a time. (m, n): where the consumer's rows begin.
    """
    GROUPS: gl.constexpr = how.BLOCK_M // how.CONSUMERS // 8
    AT_ONCE: gl.constexpr = 8 if COLUMNS <= 128 else 4
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 4], [1, 0])
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    all_of_group = (rows[:, None] >= 0) & (columns[None, :] >= 0)
    for group in range(mine, GROUPS, step):
        own = group * 8 + rows
        sums = gl.zeros((8, COLUMNS), gl.float32, layout)
        for after in range(0, tail.split, AT_ONCE):
            for i in gl.static_range(AT_ONCE):
                program = index - tail.whole + (after + i) * tail.rest
                place = place_of(program, own, start + columns, WHICH, tail, how)
                there = all_of_group & (after + i < tail.split)
                sums += gl.load(place, mask=there, other=0.0, cache_modifier=".cg")
        in_rows = m + own
        in_columns = n + start + columns
        sums = fused(sums, in_rows, in_columns, outer, inner, result, how)
        store_masked(sums, in_rows, in_columns, outer, inner, result)


@gluon.jit
def consume(WHICH: gl.constexpr, result, shared, walk, how: gl.constexpr):
    """Multiply the rows of each piece that are consumer WHICH's, and store what is whole."""
    MAIN_N: gl.constexpr = how.MAIN_N
    REST: gl.constexpr = how.BLOCK_N - MAIN_N
    stage = 0
    phase = 0
    tail = walk.tail
    first, last, step = pieces_of(walk, how)
    for piece in range(first, last, step):
        index, start, end = piece_at(piece, walk)
        outer, inner, row, column = tile_at(index, walk, how)
        acc, rest = no_sums(shared, how)
        acc, rest, stage, phase = multiply(WHICH, acc, rest, start, end, stage, phase, shared, how)
        m, n = corner_of(WHICH, row, column, how)
        if index < tail.whole:
            store_tile(WHICH, acc, rest, outer, inner, m, n, 0, result, how)
        else:
            leave(acc, 0, WHICH, tail, how)
            if REST:
                leave(rest, MAIN_N, WHICH, tail, how)
            mine, by = share_of(index, WHICH, tail, how)
            store_sums(mine, by, index, 0, MAIN_N, outer, inner, m, n, WHICH, result, tail, how)
            if REST:
                store_sums(mine, by, index, MAIN_N, REST, outer, inner, m, n, WHICH, result, tail, how)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("M", "K", "whole", "rest", "split"))
def matmul_split(
    a_desc, b_desc, b_rest_desc, out_desc, out_rest_desc, out_ptr, parts_ptr, counters_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra,
    whole, rest, split,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_N: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, BATCHED: gl.constexpr,
    EPILOGUE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, SUBTILES: gl.constexpr,
):  # fmt: skip
    """Make out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    `whole`, `rest`, `split`: see `Tail`. Else as `matmul_warpgroups`.
    """
    how: gl.constexpr = How(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, BLOCK_K, MAIN_N, BLOCK_M // CONSUMERS, MAIN_N,
        GROUP_M, STAGES, CONSUMERS, SUBTILES, False, BATCHED, EPILOGUE,
    )  # fmt: skip
    operands = Operands(a_desc, b_desc, b_rest_desc)
    shared, tile, rest_tile = shared_of(a_desc.dtype, b_desc.dtype, out_ptr.dtype.element_ty, how)
    result = Result(
        out_desc, out_rest_desc, out_ptr, tile, rest_tile,
        M, N, stride_oo, stride_oi, stride_om, stride_on, None, extra,
    )  # fmt: skip
    tail = Tail(parts_ptr, counters_ptr, whole, rest, split)
    tiles_m, tiles_n, iterations = counts_of(M, N, K, how)
    tiles = tiles_m * tiles_n * batch
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles, iterations, None, tail)
    start_warps(consume, operands, result, shared, walk, REGISTERS, how)
