"""Multiply matrices by specialised warps that split the last tiles along K, on Hopper.

The last wave of tiles may leave SMs idle: the K of its tiles is split evenly among all programs. The last
program to finish a part of a tile sums all parts, in the order of K.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
            stage += 1
            if stage == how.STAGES:
                stage = 0
                phase ^= 1
    if how.WAIT:
        gdc_launch_dependents()


@gluon.jit
def place_of(program, first, part, WHICH: gl.constexpr, tail, how: gl.constexpr):
    """Where elements of `part`, a consumer's columns from `first` on, lie among a program's parts.

    In squares of 8, as many as the threads of a warp hold at once, which lie side by side there.
    """
    ROWS: gl.constexpr = part.shape[0]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, part.type.layout))
    columns = first + gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout))
    start = tail.parts + (program * how.CONSUMERS + WHICH) * (ROWS * how.BLOCK_N)
    by_row = rows // 8 * (8 * how.BLOCK_N) + rows % 8 * 8
    by_column = columns // 8 * 64 + columns % 8
    return start + by_row[:, None] + by_column[None, :]


@gluon.jit
def last_to(index, acc, WHICH: gl.constexpr, tail, how: gl.constexpr):
    """Leave `acc`, a part of tile `index`, and tell whether all others are there.

    A counter holds arrivals from bit 16 on; a launch leaves a multiple of ALL, as `shared_k` does.
    """
    ARRIVAL: gl.constexpr = 65536
    ALL: gl.constexpr = 256 * ARRIVAL
    gl.store(place_of(gl.program_id(0), 0, acc, WHICH, tail, how), acc, cache_modifier=".cg")
    tma.barrier()  # every thread has written before one of them says so
    counter = tail.counters + (index - tail.whole) * how.CONSUMERS + WHICH
    before = gl.atomic_add(counter, ARRIVAL, sem="acq_rel")
    last = before // ARRIVAL % 256 == tail.split - 1
    if last:
        gl.atomic_add(counter, ALL - tail.split * ARRIVAL, sem="relaxed")
    return last


@gluon.jit
def summed(part, first, index, is_split, WHICH: gl.constexpr, tail, how: gl.constexpr):
    """Columns of tile `index` from `first` on: `part`, or of a split tile the sum of all parts, in order."""
    ROWS: gl.constexpr = part.shape[0]
    COLUMNS: gl.constexpr = part.shape[1]
    layout: gl.constexpr = part.type.layout
    if is_split:
        part = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        for i in range(0, tail.split):
            program = index - tail.whole + i * tail.rest
            part += gl.load(place_of(program, first, part, WHICH, tail, how), cache_modifier=".cg")
    return part


@gluon.jit
def consume(WHICH: gl.constexpr, result, shared, walk, tail, how: gl.constexpr):
    """Multiply the rows of each piece that are consumer WHICH's, and store what is whole."""
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS
    COLUMNS: gl.constexpr = how.BLOCK_N
    HALF: gl.constexpr = COLUMNS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    none_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    tile = result.tile.index(WHICH)
    stage = 0
    phase = 0
    for piece in range(0, pieces_of(tail)):
        index, start, end = piece_at(piece, walk, tail)
        outer, inner, row, column = tile_at(index, walk, how)
        acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        none = gl.zeros((ROWS, 16), gl.float32, none_layout)
        acc, none, stage, phase = multiply(WHICH, acc, none, start, end, stage, phase, shared, how)
        is_split = index >= tail.whole
        whole = index < tail.whole
        if is_split:
            whole = last_to(index, acc, WHICH, tail, how)
        if whole:
            m = row * how.BLOCK_M + WHICH * ROWS
            n = column * COLUMNS
            if how.SUBTILES == 2:
                left, right = acc.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
                left = summed(left, 0, index, is_split, WHICH, tail, how)
                store_part(result.desc, tile, left, outer, inner, m, n, result, how)
                right = summed(right, HALF, index, is_split, WHICH, tail, how)
                store_part(result.desc, tile, right, outer, inner, m, n + HALF, result, how)
            else:
                acc = summed(acc, 0, index, is_split, WHICH, tail, how)
                store_part(result.desc, tile, acc, outer, inner, m, n, result, how)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("M", "K", "whole", "rest", "split"))
def matmul_split(
    a_desc, b_desc, out_desc, out_ptr, parts_ptr, counters_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra,
    whole, rest, split,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    REGISTERS: gl.constexpr, STAGES: gl.constexpr, BATCHED: gl.constexpr, EPILOGUE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, SUBTILES: gl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    `whole`, `rest`, `split`: see `Tail`. Else as `matmul_warpgroups`.
    """
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    dtype: gl.constexpr = a_desc.dtype
    if A_ROW:
        a_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, ROWS, BLOCK_K)
    else:
        a_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, BLOCK_K, ROWS)
    if B_ROW:
        b_tiles = tiles_in_shared_memory(dtype, STAGES, BLOCK_K, BLOCK_N)
    else:
        b_tiles = tiles_in_shared_memory(dtype, STAGES, BLOCK_N, BLOCK_K)
    out_tiles = tiles_in_shared_memory(out_ptr.dtype.element_ty, CONSUMERS, ROWS, BLOCK_N // SUBTILES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    operands = Operands(a_desc, b_desc, b_desc)
    shared = Shared(a_tiles, b_tiles, b_tiles, full, empty)
    result = Result(
        out_desc, out_desc, out_ptr, out_tiles, out_tiles,
        M, N, stride_oo, stride_oi, stride_om, stride_on, None, extra,
    )  # fmt: skip
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles_m * tiles_n * batch, gl.cdiv(K, BLOCK_K), None)
    tail = Tail(parts_ptr, counters_ptr, whole, rest, split)
    how: gl.constexpr = How(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, BLOCK_N, BLOCK_K, GROUP_M,
        STAGES, CONSUMERS, SUBTILES, False, BATCHED, EPILOGUE, 0, False, None, 1,
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, tail, how)),
            (produce, (operands, shared, walk, tail, how)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, tail, how)),
            (consume, (1, result, shared, walk, tail, how)),
            (produce, (operands, shared, walk, tail, how)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
