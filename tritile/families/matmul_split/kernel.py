"""Multiply matrices by specialised warps that split the last tiles along K, on Hopper.

The last wave of tiles may leave SMs idle: the K of its tiles is split evenly among all programs. The
programs that made a tile's parts sum its rows, some rows each, in the order of K.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.epilogue import finished
from tritile.families.matmul_wgmma import tma
from tritile.families.matmul_wgmma.kernel import (
    How,
    Operands,
    Result,
    Shared,
    Walk,
    fetch,
    multiply,
    store_part,
    tile_at,
    tiles_in_shared_memory,
)

ARRIVAL = gl.constexpr(65536)  # of a part, in a tile's counter
PLACES = gl.constexpr(256)  # for arrivals in a counter: more than a tile has parts
ALL = gl.constexpr(65536 * 256)
POLLS = gl.constexpr(64)  # some 40 us: parts of a tile end closer together


class Tail(NamedTuple):
    """Describe the split tiles: the `rest` tiles after the first `whole`, in `split` parts each.

    `parts` points to a workspace with room for one part of each program. `counters` points to arrival
    counters, one for each tile and consumer.
    """

    parts: Any
    counters: Any
    whole: Any
    rest: Any
    split: Any


@gluon.jit
def pieces_of(tail):
    """How many pieces a program makes: whole tiles, and a part of one of the rest."""
    programs = gl.num_programs(0)
    me = gl.program_id(0)
    return gl.cdiv(gl.maximum(tail.whole - me, 0), programs) + gl.where(me < tail.rest * tail.split, 1, 0)


@gluon.jit
def piece_at(piece, walk, tail):
    """The tile of a program's piece, and its turns: from, to. Parts of a tile lie `rest` programs apart."""
    me = gl.program_id(0)
    own = me + piece * gl.num_programs(0)
    rest = gl.maximum(tail.rest, 1)
    part = me // rest
    split = own >= tail.whole
    start = part * walk.turns // tail.split
    end = (part + 1) * walk.turns // tail.split
    index = gl.where(split, tail.whole + me % rest, own)
    return index, gl.where(split, start, 0), gl.where(split, end, walk.turns)


@gluon.jit
def produce(operands, shared, walk, tail, how: gl.constexpr):
    """Keep the stages of shared memory filled with tiles of a and b, in the order they are consumed."""
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS
    SIZE: gl.constexpr = shared.a.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (how.BLOCK_M + how.BLOCK_N) * how.BLOCK_K * SIZE
    stage = 0
    phase = 1
    if how.WAIT:
        gdc_wait()
    for piece in range(0, pieces_of(tail)):
        index, start, end = piece_at(piece, walk, tail)
        outer, inner, row, column = tile_at(index, walk, how)
        m = row * how.BLOCK_M
        n = column * how.BLOCK_N
        for turn in range(start, end):
            k = turn * how.BLOCK_K
            full = shared.full.index(stage)
            mbarrier.wait(shared.empty.index(stage), phase)
            mbarrier.expect(full, BYTES)
            for i in gl.static_range(how.CONSUMERS):
                tile = shared.a.index(stage * how.CONSUMERS + i)
                fetch(operands.a, outer, inner, m + i * ROWS, k, how.A_ROW, full, tile)
            fetch(operands.b, outer, inner, k, n, how.B_ROW, full, shared.b.index(stage))
            if how.MAIN_N < how.BLOCK_N:
                tile = shared.b_rest.index(stage)
                fetch(operands.b_rest, outer, inner, k, n + how.MAIN_N, how.B_ROW, full, tile)
            stage += 1
            if stage == how.STAGES:
                stage = 0
                phase ^= 1
    if how.WAIT:
        gdc_launch_dependents()


@gluon.jit
def place_of(program, rows, columns, WHICH: gl.constexpr, tail, how: gl.constexpr):
    """Where these rows and columns of a consumer's part lie among the parts.

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
    """The first group of 8 rows of tile `index` that this program is to sum, and the step to the next.

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
        if how.EPILOGUE is not None:
            sums = finished(
                sums, in_rows, in_columns, result.M, result.N, (outer, inner), (1, 1),
                result.extra, how.EPILOGUE,
            )  # fmt: skip
        matrix = outer.to(gl.int64) * result.stride_o + inner.to(gl.int64) * result.stride_i
        by_row = in_rows[:, None].to(gl.int64) * result.stride_m
        offsets = by_row + in_columns[None, :].to(gl.int64) * result.stride_n
        inside = (in_rows[:, None] < result.M) & (in_columns[None, :] < result.N)
        gl.store(result.ptr + matrix + offsets, sums.to(result.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_whole(WHICH: gl.constexpr, acc, rest, outer, inner, m, n, result, how: gl.constexpr):
    """Store what a consumer made of a whole tile."""
    HALF: gl.constexpr = how.MAIN_N // 2
    tile = result.tile.index(WHICH)
    if how.SUBTILES == 2:
        left, right = acc.reshape((acc.shape[0], 2, HALF)).permute((0, 2, 1)).split()
        store_part(result.desc, tile, left, outer, inner, m, n, result, how)
        store_part(result.desc, tile, right, outer, inner, m, n + HALF, result, how)
    else:
        store_part(result.desc, tile, acc, outer, inner, m, n, result, how)
    if how.MAIN_N < how.BLOCK_N:
        tile = result.rest_tile.index(WHICH)
        store_part(result.rest_desc, tile, rest, outer, inner, m, n + how.MAIN_N, result, how)


@gluon.jit
def consume(WHICH: gl.constexpr, result, shared, walk, tail, how: gl.constexpr):
    """Multiply the rows of each piece that are consumer WHICH's, and store what is whole."""
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS
    MAIN_N: gl.constexpr = how.MAIN_N
    REST_N: gl.constexpr = how.BLOCK_N - MAIN_N
    REST: gl.constexpr = REST_N if REST_N else 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN_N, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    stage = 0
    phase = 0
    for piece in range(0, pieces_of(tail)):
        index, start, end = piece_at(piece, walk, tail)
        outer, inner, row, column = tile_at(index, walk, how)
        acc = gl.zeros((ROWS, MAIN_N), gl.float32, layout)
        rest = gl.zeros((ROWS, REST), gl.float32, rest_layout)
        acc, rest, stage, phase = multiply(WHICH, acc, rest, start, end, stage, phase, shared, how)
        m = row * how.BLOCK_M + WHICH * ROWS
        n = column * how.BLOCK_N
        if index < tail.whole:
            store_whole(WHICH, acc, rest, outer, inner, m, n, result, how)
        else:
            leave(acc, 0, WHICH, tail, how)
            if REST_N:
                leave(rest, MAIN_N, WHICH, tail, how)
            mine, step = share_of(index, WHICH, tail, how)
            store_sums(mine, step, index, 0, MAIN_N, outer, inner, m, n, WHICH, result, tail, how)
            if REST_N:
                store_sums(mine, step, index, MAIN_N, REST, outer, inner, m, n, WHICH, result, tail, how)
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
    """out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    `whole`, `rest`, `split`: see `Tail`. Else as `matmul_warpgroups`.
    """
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    REST_N: gl.constexpr = BLOCK_N - MAIN_N
    dtype: gl.constexpr = a_desc.dtype
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    if A_ROW:
        a_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, ROWS, BLOCK_K)
    else:
        a_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, BLOCK_K, ROWS)
    if B_ROW:
        b_tiles = tiles_in_shared_memory(dtype, STAGES, BLOCK_K, MAIN_N)
    else:
        b_tiles = tiles_in_shared_memory(dtype, STAGES, MAIN_N, BLOCK_K)
    out_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, ROWS, MAIN_N // SUBTILES)
    b_rest_tiles = b_tiles
    out_rest_tiles = out_tiles
    if REST_N:
        if B_ROW:
            b_rest_tiles = tiles_in_shared_memory(dtype, STAGES, BLOCK_K, REST_N)
        else:
            b_rest_tiles = tiles_in_shared_memory(dtype, STAGES, REST_N, BLOCK_K)
        out_rest_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, ROWS, REST_N)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    operands = Operands(a_desc, b_desc, b_rest_desc)
    shared = Shared(a_tiles, b_tiles, b_rest_tiles, full, empty)
    result = Result(
        out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
        M, N, stride_oo, stride_oi, stride_om, stride_on, None, extra,
    )  # fmt: skip
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles_m * tiles_n * batch, gl.cdiv(K, BLOCK_K), None)
    tail = Tail(parts_ptr, counters_ptr, whole, rest, split)
    how: gl.constexpr = How(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, MAIN_N, BLOCK_K, GROUP_M,
        STAGES, CONSUMERS, SUBTILES, False, BATCHED, EPILOGUE, 0, False, None, 1,
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, tail, how)),
            (produce, (operands, shared, walk, tail, how)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, tail, how)),
            (consume, (1, result, shared, walk, tail, how)),
            (produce, (operands, shared, walk, tail, how)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, tail, how)),
            (consume, (1, result, shared, walk, tail, how)),
            (consume, (2, result, shared, walk, tail, how)),
            (produce, (operands, shared, walk, tail, how)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
