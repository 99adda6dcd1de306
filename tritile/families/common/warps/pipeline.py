"""Fill stages of shared memory with tiles of a and b, and multiply from them: the main loop of both sides.

A stage is full when its copies by TMA have arrived, and empty when all consumers have read it. In a cluster
of two programs a tile that both need is copied to both at once: a stage is empty when both have read it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.warps import exchange, tma
from tritile.families.common.warps.facts import Shared
from tritile.families.common.warps.order import piece_at, pieces_of, tile_at


@gluon.constexpr_function
def swizzled(shape, dtype, down, across, cluster):
    """Return the layout in shared memory of a tile; in a cluster its rows and columns have so many parts."""
    begins = [0, 0, down - 1, across - 1]  # where the second program's part begins, in parts
    more = {"cga_layout": [begins]} if cluster else {}
    return gl.NVMMASharedLayout.get_default_for(shape, dtype, **more)


@gluon.constexpr_function
def flat_layout(tile):
    """Return the layout of a (1, 1, rows, columns) tile in shared memory, as (rows, columns)."""
    shared_by = [basis[2:] for basis in tile.layout.cga_layout or []]
    more = {"cga_layout": shared_by} if shared_by else {}
    return gl.NVMMASharedLayout.get_default_for(tile.shape[2:], tile.dtype, **more)


@gluon.jit
def room(
    dtype, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr,
    DOWN: gl.constexpr, ACROSS: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """Allocate COUNT tiles of a batch of two dimensions; not ROW: they hold the transpose.

    ROWS and COLUMNS are those of a program of DOWN x ACROSS.
    """
    if ROW:
        shape: gl.constexpr = [1, 1, ROWS * DOWN, COLUMNS * ACROSS]
        layout: gl.constexpr = swizzled(shape, dtype, DOWN, ACROSS, CLUSTER)
    else:
        shape: gl.constexpr = [1, 1, COLUMNS * ACROSS, ROWS * DOWN]
        layout: gl.constexpr = swizzled(shape, dtype, ACROSS, DOWN, CLUSTER)
    return gl.allocate_shared_memory(dtype, [COUNT] + shape, layout)


@gluon.jit
def barriers(how: gl.constexpr):
    """Allocate the barriers of full and of empty stages, and say what they wait for."""
    if how.CLUSTER:
        full = tma.allocate_mbarrier(batch=how.STAGES)
        for i in gl.static_range(how.STAGES):
            mbarrier.init(full.index(i), count=1)
        empty = exchange.reserve()
        exchange.init(empty, how.STAGES, 4 * how.CONSUMERS)
        tma.fence_init_release_cluster()
    else:
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
    PART: gl.constexpr = how.COLUMNS // how.SUBTILES
    OUT_ROW: gl.constexpr = not how.TRANSPOSED
    DOWN: gl.constexpr = how.DOWN
    ACROSS: gl.constexpr = how.ACROSS
    a = room(a_dtype, how.STAGES * HIGH, how.ROWS, how.BLOCK_K, how.A_ROW, DOWN, 1, how.CLUSTER)
    b = room(b_dtype, how.STAGES * WIDE, how.BLOCK_K, how.COLUMNS, how.B_ROW, 1, ACROSS, how.CLUSTER)
    out = room(out_dtype, HIGH * WIDE, how.ROWS, PART, OUT_ROW, DOWN, ACROSS, how.CLUSTER)
    b_rest = b
    out_rest = out
    if REST:
        b_rest = room(b_dtype, how.STAGES, how.BLOCK_K, REST, how.B_ROW, 1, ACROSS, how.CLUSTER)
        out_rest = room(out_dtype, HIGH, how.ROWS, REST, OUT_ROW, DOWN, ACROSS, how.CLUSTER)
    full, empty = barriers(how)
    return Shared(a, b, b_rest, full, empty), out, out_rest


@gluon.jit
def flat(tile):
    """View a (1, 1, rows, columns) tile in shared memory as (rows, columns)."""
    shape: gl.constexpr = [tile.shape[2], tile.shape[3]]
    layout: gl.constexpr = flat_layout(tile)
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
def wait_empty(shared, stage, phase, how: gl.constexpr):
    """Wait until all that read this program's copies to `stage` have done so."""
    if how.CLUSTER:
        exchange.wait(shared.empty, stage, phase)
    else:
        mbarrier.wait(shared.empty.index(stage), phase)


@gluon.jit
def release(shared, stage, how: gl.constexpr):
    """Say that this consumer has read `stage`. In a cluster `shared` is as `met` returns it."""
    if how.CLUSTER:
        exchange.arrive(shared.empty, stage)
    else:
        mbarrier.arrive(shared.empty.index(stage), count=1)


@gluon.jit
def met(shared, how: gl.constexpr):
    """Return `shared` as a consumer uses it.

    In a cluster wait for both programs; `empty` is then where the consumer's threads release stages.
    """
    if how.CLUSTER:
        exchange.meet()
        places = exchange.addressed(shared.empty)
        shared = Shared(shared.a, shared.b, shared.b_rest, shared.full, places)
    return shared


@gluon.jit
def fetch(
    desc, outer, inner, row, column, ROW: gl.constexpr, TO_BOTH: gl.constexpr, barrier, tile,
):  # fmt: skip
    """Start copying the tile at (row, column) to shared memory; not ROW: `desc` sees the transpose.

    TO_BOTH: the first program of a cluster copies it to both.
    """
    at = [outer, inner, row, column] if ROW else [outer, inner, column, row]
    if TO_BOTH:
        tma.async_copy_global_to_shared(desc, at, barrier, tile, multicast=True)
    else:
        tma.async_copy_global_to_shared(desc, at, barrier, tile)


@gluon.jit
def produce(operands, shared, walk, how: gl.constexpr):
    """Keep the stages of shared memory filled with tiles of a and b, in the order they are consumed."""
    HIGH: gl.constexpr = how.BLOCK_M // how.ROWS
    WIDE: gl.constexpr = how.MAIN_N // how.COLUMNS
    SIZE: gl.constexpr = shared.a.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (how.BLOCK_M + how.BLOCK_N) * how.BLOCK_K * SIZE
    A_TO_BOTH: gl.constexpr = how.ACROSS == 2
    B_TO_BOTH: gl.constexpr = how.DOWN == 2
    stage = 0
    phase = 1
    if how.CLUSTER:
        exchange.meet()
    if how.WAIT:
        gdc_wait()
    first, last, step = pieces_of(walk, how)
    for piece in range(first, last, step):
        index, start, end = piece_at(piece, walk)
        outer, inner, row, column = tile_at(index, walk, how)
        m = row * how.BLOCK_M * how.DOWN
        n = column * how.BLOCK_N * how.ACROSS
        for iteration in range(start, end):
            k = iteration * how.BLOCK_K
            full = shared.full.index(stage)
            wait_empty(shared, stage, phase, how)
            mbarrier.expect(full, BYTES)
            for i in gl.static_range(HIGH):
                tile = shared.a.index(stage * HIGH + i)
                at_m = m + i * how.ROWS * how.DOWN
                fetch(operands.a, outer, inner, at_m, k, how.A_ROW, A_TO_BOTH, full, tile)
            for i in gl.static_range(WIDE):
                tile = shared.b.index(stage * WIDE + i)
                at_n = n + i * how.COLUMNS
                fetch(operands.b, outer, inner, k, at_n, how.B_ROW, B_TO_BOTH, full, tile)
            if how.MAIN_N < how.BLOCK_N:
                tile = shared.b_rest.index(stage)
                at_n = n + how.MAIN_N * how.ACROSS
                fetch(operands.b_rest, outer, inner, k, at_n, how.B_ROW, B_TO_BOTH, full, tile)
            stage, phase = following(stage, phase, how)
    if how.WAIT:
        gdc_launch_dependents()
    if how.CLUSTER:
        for _ in range(how.STAGES):  # the other program's warps arrive here: its barriers must not go before
            wait_empty(shared, stage, phase, how)
            stage, phase = following(stage, phase, how)


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
            release(shared, last, how)
        last = stage
        stage, phase = following(stage, phase, how)
    if how.MAIN_N < how.BLOCK_N:
        acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    release(shared, last, how)
    return acc, rest, stage, phase
