"""Fill stages of shared memory with tiles of a and b, and multiply from them: the main loop of both sides.

A stage is full when its copies by TMA have arrived, and empty when all consumers have read it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.warps import tma
from tritile.families.common.warps.facts import Shared
from tritile.families.common.warps.order import tile_at, tiles_of


@gluon.jit
def room(dtype, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr):
    """Allocate COUNT tiles of a batch of two dimensions; not ROW: they hold the transpose."""
    shape: gl.constexpr = [1, 1, ROWS, COLUMNS] if ROW else [1, 1, COLUMNS, ROWS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return gl.allocate_shared_memory(dtype, [COUNT] + shape, layout)


@gluon.jit
def barriers(how: gl.constexpr):
    """Allocate the barriers of full and of empty stages, and say what they wait for."""
    full = gl.allocate_shared_memory(gl.int64, [how.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [how.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(how.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=how.CONSUMERS)
    return full, empty


@gluon.jit
def shared_of(a_dtype, b_dtype, out_dtype, how: gl.constexpr):
    """Allocate the stages and their barriers, and tiles through which consumers store, and store the rest."""
    HIGH: gl.constexpr = how.BLOCK_M // how.ROWS
    WIDE: gl.constexpr = how.MAIN_N // how.COLUMNS
    REST: gl.constexpr = how.BLOCK_N - how.MAIN_N
    a = room(a_dtype, how.STAGES * HIGH, how.ROWS, how.BLOCK_K, how.A_ROW)
    b = room(b_dtype, how.STAGES * WIDE, how.BLOCK_K, how.COLUMNS, how.B_ROW)
    out = room(out_dtype, HIGH * WIDE, how.ROWS, how.COLUMNS // how.SUBTILES, True)
    b_rest = b
    out_rest = out
    if REST:
        b_rest = room(b_dtype, how.STAGES, how.BLOCK_K, REST, how.B_ROW)
        out_rest = room(out_dtype, HIGH, how.ROWS, REST, True)
    full, empty = barriers(how)
    return Shared(a, b, b_rest, full, empty), out, out_rest


@gluon.jit
def flat(tile):
    """View a (1, 1, rows, columns) tile in shared memory as (rows, columns)."""
    shape: gl.constexpr = [tile.shape[2], tile.shape[3]]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, tile.dtype)
    tile = tma.reinterpret(tile, tile.dtype, shape, layout)
    return tile


@gluon.jit
def operand(tile, ROW: gl.constexpr):
    """View a tile in shared memory as tensor cores are to read it."""
    tile = flat(tile)
    if not ROW:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def following(stage, phase, how: gl.constexpr):
    """Return the next stage, and its phase."""
    stage += 1
    if stage == how.STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def fetch(desc, outer, inner, row, column, ROW: gl.constexpr, barrier, tile):
    """Start copying the tile at (row, column) to shared memory; not ROW: `desc` sees the transpose."""
    at = [outer, inner, row, column] if ROW else [outer, inner, column, row]
    tma.async_copy_global_to_shared(desc, at, barrier, tile)


@gluon.jit
def produce(operands, shared, walk, how: gl.constexpr):
    """Keep the stages of shared memory filled with tiles of a and b, in the order they are consumed."""
    HIGH: gl.constexpr = how.BLOCK_M // how.ROWS
    WIDE: gl.constexpr = how.MAIN_N // how.COLUMNS
    SIZE: gl.constexpr = shared.a.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (how.BLOCK_M + how.BLOCK_N) * how.BLOCK_K * SIZE
    stage = 0
    phase = 1
    if how.WAIT:
        gdc_wait()
    first, last, step = tiles_of(walk, how)
    for index in range(first, last, step):
        outer, inner, row, column = tile_at(index, walk, how)
        m = row * how.BLOCK_M
        n = column * how.BLOCK_N
        for iteration in range(walk.iterations):
            k = iteration * how.BLOCK_K
            full = shared.full.index(stage)
            mbarrier.wait(shared.empty.index(stage), phase)
            mbarrier.expect(full, BYTES)
            for i in gl.static_range(HIGH):
                tile = shared.a.index(stage * HIGH + i)
                fetch(operands.a, outer, inner, m + i * how.ROWS, k, how.A_ROW, full, tile)
            for i in gl.static_range(WIDE):
                tile = shared.b.index(stage * WIDE + i)
                fetch(operands.b, outer, inner, k, n + i * how.COLUMNS, how.B_ROW, full, tile)
            if how.MAIN_N < how.BLOCK_N:
                tile = shared.b_rest.index(stage)
                fetch(operands.b_rest, outer, inner, k, n + how.MAIN_N, how.B_ROW, full, tile)
            stage, phase = following(stage, phase, how)
    if how.WAIT:
        gdc_launch_dependents()


@gluon.jit
def multiply(WHICH: gl.constexpr, acc, rest, start, end, stage, phase, shared, how: gl.constexpr):
    """Return acc and rest plus products of iterations `start` to `end`, at least one, and the next stage."""
    last = 0
    for iteration in range(start, end):
        mbarrier.wait(shared.full.index(stage), phase)
        a = operand(shared.a.index(stage * how.CONSUMERS + WHICH), how.A_ROW)
        acc = warpgroup_mma(a, operand(shared.b.index(stage), how.B_ROW), acc, is_async=True)
        if how.MAIN_N < how.BLOCK_N:
            b_rest = operand(shared.b_rest.index(stage), how.B_ROW)
            rest = warpgroup_mma(a, b_rest, rest, is_async=True)
            acc, rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if iteration > start:
            mbarrier.arrive(shared.empty.index(last), count=1)
        last = stage
        stage, phase = following(stage, phase, how)
    if how.MAIN_N < how.BLOCK_N:
        acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(shared.empty.index(last), count=1)
    return acc, rest, stage, phase
