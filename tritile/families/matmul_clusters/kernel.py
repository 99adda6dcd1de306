"""Multiply matrices by clusters of two programs, on Hopper: a tile that both need is copied to both at once.

The programs of a cluster make tiles that lie one below the other and share b's columns, or side by side and
share a's rows. Each is made of specialised warps, as in `matmul_wgmma`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.epilogue import finished
from tritile.families.matmul_clusters import exchange
from tritile.families.matmul_wgmma import tma
from tritile.families.matmul_wgmma.kernel import Operands, Result, Shared, Walk, tile_at, tiles_of


class How(NamedTuple):
    """Hold the compile-time parameters of `matmul_clusters`.

    DOWN and ACROSS: how many tiles of a cluster lie one below the other, and side by side: 2 and 1, or 1
    and 2. BLOCK_M and BLOCK_N are those of a program. TRANSPOSED: all this is of out^T.
    """

    A_ROW: Any
    B_ROW: Any
    BY_DESCRIPTOR: Any
    WAIT: Any
    BLOCK_M: Any
    BLOCK_N: Any
    MAIN_N: Any
    BLOCK_K: Any
    GROUP_M: Any
    STAGES: Any
    CONSUMERS: Any
    SUBTILES: Any
    DOWN: Any
    ACROSS: Any
    FLAT: Any
    BATCHED: Any
    EPILOGUE: Any
    VERDICTS: Any
    TRANSPOSED: Any


@gluon.constexpr_function
def spread(DOWN, ACROSS):
    """Return where in a tensor of rows and columns the second program's part begins, in parts."""
    return [[DOWN - 1, ACROSS - 1]]


@gluon.constexpr_function
def swizzled(tile):
    """Return the layout of a (1, 1, rows, columns) tile in shared memory, as (rows, columns)."""
    shared_by = [basis[2:] for basis in tile.layout.cga_layout]
    return gl.NVMMASharedLayout.get_default_for(tile.shape[2:], tile.dtype, cga_layout=shared_by)


@gluon.jit
def flat(tile):
    """A (1, 1, rows, columns) tile in shared memory as (rows, columns)."""
    shape: gl.constexpr = [tile.shape[2], tile.shape[3]]
    layout: gl.constexpr = swizzled(tile)
    tile = tma.reinterpret(tile, tile.dtype, shape, layout)
    return tile


@gluon.jit
def operand(tile, ROW: gl.constexpr):
    """A tile in shared memory as tensor cores are to read it."""
    tile = flat(tile)
    if not ROW:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def fetch(desc, outer, inner, row, column, ROW: gl.constexpr, SHARED: gl.constexpr, barrier, tile):
    """Start copying the tile at (row, column); not ROW: `desc` sees the transpose.

    SHARED: the first program copies it to both.
    """
    if ROW:
        tma.async_copy_global_to_shared(desc, [outer, inner, row, column], barrier, tile, multicast=SHARED)
    else:
        tma.async_copy_global_to_shared(desc, [outer, inner, column, row], barrier, tile, multicast=SHARED)


@gluon.jit
def produce(operands, shared, walk, how: gl.constexpr):
    """Keep the stages of shared memory filled with tiles of a and b, in the order they are consumed."""
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS * how.DOWN
    SIZE: gl.constexpr = shared.a.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (how.BLOCK_M + how.BLOCK_N) * how.BLOCK_K * SIZE
    SHARED_A: gl.constexpr = how.ACROSS == 2
    SHARED_B: gl.constexpr = how.DOWN == 2
    stage = 0
    phase = 1
    exchange.meet()
    if how.WAIT:
        gdc_wait()
    mine, end, step = tiles_of(walk, how)
    for index in range(mine, end, step):
        outer, inner, row, column = tile_at(index, walk, how)
        m = row * how.BLOCK_M * how.DOWN
        n = column * how.BLOCK_N * how.ACROSS
        for turn in range(walk.turns):
            k = turn * how.BLOCK_K
            full = shared.full.index(stage)
            exchange.wait(shared.empty, stage, phase)
            mbarrier.expect(full, BYTES)
            for i in gl.static_range(how.CONSUMERS):
                tile = shared.a.index(stage * how.CONSUMERS + i)
                fetch(operands.a, outer, inner, m + i * ROWS, k, how.A_ROW, SHARED_A, full, tile)
            fetch(operands.b, outer, inner, k, n, how.B_ROW, SHARED_B, full, shared.b.index(stage))
            if how.MAIN_N < how.BLOCK_N:
                tile = shared.b_rest.index(stage)
                rest = n + how.MAIN_N * how.ACROSS
                fetch(operands.b_rest, outer, inner, k, rest, how.B_ROW, SHARED_B, full, tile)
            stage += 1
            if stage == how.STAGES:
                stage = 0
                phase ^= 1
    if how.WAIT:
        gdc_launch_dependents()
    for _ in range(how.STAGES):  # the other program's warps arrive here: its barriers must not go before
        exchange.wait(shared.empty, stage, phase)
        stage += 1
        if stage == how.STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def multiply(WHICH: gl.constexpr, acc, rest, turns, stage, phase, shared, places, how: gl.constexpr):
    """acc and rest plus the products of all turns, at least one; and the stage that is next."""
    last = 0
    for turn in range(turns):
        mbarrier.wait(shared.full.index(stage), phase)
        a = operand(shared.a.index(stage * how.CONSUMERS + WHICH), how.A_ROW)
        acc = warpgroup_mma(a, operand(shared.b.index(stage), how.B_ROW), acc, is_async=True)
        if how.MAIN_N < how.BLOCK_N:
            b_rest = operand(shared.b_rest.index(stage), how.B_ROW)
            rest = warpgroup_mma(a, b_rest, rest, is_async=True)
            acc, rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if turn > 0:
            exchange.arrive(places, last)
        last = stage
        stage += 1
        if stage == how.STAGES:
            stage = 0
            phase ^= 1
    if how.MAIN_N < how.BLOCK_N:
        acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    exchange.arrive(places, last)
    return acc, rest, stage, phase


@gluon.jit
def store_part(desc, tile, part, outer, inner, m, n, result, how: gl.constexpr):
    """Store through shared memory, once the store before has let go of it; masked where no descriptor can.

    TRANSPOSED: `part`, m and n are of out^T.
    """
    DOWN: gl.constexpr = how.ACROSS if how.TRANSPOSED else how.DOWN
    ACROSS: gl.constexpr = how.DOWN if how.TRANSPOSED else how.ACROSS
    if how.TRANSPOSED:
        part = part.permute((1, 0))
        m, n = n, m
    if how.EPILOGUE is not None:
        rows_of_part = m + gl.arange(0, part.shape[0], gl.SliceLayout(1, part.type.layout))
        columns_of_part = n + gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout))
        part = finished(
            part, rows_of_part, columns_of_part, result.M, result.N, (outer, inner), (1, 1),
            result.extra, how.EPILOGUE,
        )  # fmt: skip
    part = part.to(result.ptr.dtype.element_ty)
    if how.BY_DESCRIPTOR:
        tma.store_wait(0)
        flat(tile).store(part)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [outer, inner, m, n], tile)
    else:
        ROWS: gl.constexpr = part.shape[0]
        COLUMNS: gl.constexpr = part.shape[1]
        AT_ONCE: gl.constexpr = 32 if COLUMNS // ACROSS >= 32 else COLUMNS // ACROSS
        layout: gl.constexpr = gl.BlockedLayout(
            [1, 1], [32 // AT_ONCE, AT_ONCE], [4, 1], [1, 0], spread(DOWN, ACROSS)
        )
        flat(tile).store(part)
        part = flat(tile).load(layout)
        rows = m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = n + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        matrix = outer.to(gl.int64) * result.stride_o + inner.to(gl.int64) * result.stride_i
        by_row = rows[:, None].to(gl.int64) * result.stride_m
        offsets = by_row + columns[None, :].to(gl.int64) * result.stride_n
        inside = (rows[:, None] < result.M) & (columns[None, :] < result.N)
        gl.store(result.ptr + matrix + offsets, part, mask=inside)


@gluon.jit
def consume(WHICH: gl.constexpr, result, shared, walk, how: gl.constexpr):
    """Multiply the rows of each tile that are consumer WHICH's, and store them."""
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS * how.DOWN
    MAIN_N: gl.constexpr = how.MAIN_N * how.ACROSS
    REST_N: gl.constexpr = (how.BLOCK_N - how.MAIN_N) * how.ACROSS
    REST: gl.constexpr = REST_N if REST_N else 16 * how.ACROSS
    HALF: gl.constexpr = MAIN_N // 2
    DEPTH: gl.constexpr = 256 // shared.a.dtype.primitive_bitwidth
    cga: gl.constexpr = spread(how.DOWN, how.ACROSS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.MAIN_N, DEPTH], cga)
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, REST // how.ACROSS, DEPTH], cga
    )
    stage = 0
    phase = 0
    exchange.meet()
    places = exchange.addressed(shared.empty)
    skipped = 0
    if how.ACROSS == 2:
        skipped = exchange.rank() * (how.MAIN_N // 2)  # columns between the programs' halves
    mine, end, step = tiles_of(walk, how)
    for index in range(mine, end, step):
        outer, inner, row, column = tile_at(index, walk, how)
        acc = gl.zeros((ROWS, MAIN_N), gl.float32, layout)
        rest = gl.zeros((ROWS, REST), gl.float32, rest_layout)
        acc, rest, stage, phase = multiply(
            WHICH, acc, rest, walk.turns, stage, phase, shared, places, how
        )  # fmt: skip
        m = row * how.BLOCK_M * how.DOWN + WHICH * ROWS
        n = column * how.BLOCK_N * how.ACROSS
        tile = result.tile.index(WHICH)
        if how.SUBTILES == 2:
            parts = acc.reshape((ROWS, how.ACROSS, 2, how.MAIN_N // 2)).permute((0, 1, 3, 2))
            left, right = parts.split()
            left = left.reshape((ROWS, HALF))
            right = right.reshape((ROWS, HALF))
            store_part(result.desc, tile, left, outer, inner, m, n + skipped, result, how)
            n_right = n + skipped + how.MAIN_N // 2
            store_part(result.desc, tile, right, outer, inner, m, n_right, result, how)
        else:
            store_part(result.desc, tile, acc, outer, inner, m, n, result, how)
        if REST_N:
            tile = result.rest_tile.index(WHICH)
            store_part(result.rest_desc, tile, rest, outer, inner, m, n + MAIN_N, result, how)
    tma.store_wait(0)


@gluon.jit
def idle():
    """Take part in the cluster's barrier: it counts warps that do nothing."""
    exchange.meet()


@gluon.jit
def tiles_in_shared_memory(
    dtype, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    DOWN: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Room for so many tiles, of a cluster's rows and columns, as tensor cores read them."""
    shape: gl.constexpr = [1, 1, ROWS * DOWN, COLUMNS * ACROSS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        shape, dtype, cga_layout=[[0, 0, DOWN - 1, ACROSS - 1]]
    )
    return gl.allocate_shared_memory(dtype, [COUNT] + shape, layout)


@gluon.jit
def run(operands, shared, result, walk, REGISTERS: gl.constexpr, how: gl.constexpr):
    """Start the specialised warps: consumers, the producer, and as many idle ones as fill a warpgroup."""
    if how.CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
            (idle, ()), (idle, ()),
        ], [1, 1, 2], [24, 24, 24])  # fmt: skip
    elif how.CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (consume, (1, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
            (idle, ()), (idle, ()),
        ], [4, 1, 1, 2], [REGISTERS, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (consume, (1, result, shared, walk, how)),
            (consume, (2, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
            (idle, ()), (idle, ()),
        ], [4, 4, 1, 1, 2], [REGISTERS, REGISTERS, 24, 24, 24])  # fmt: skip


@gluon.jit(do_not_specialize=("M", "K"))
def matmul_clusters(
    a_desc, b_desc, b_rest_desc, out_desc, out_rest_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra, verdict_ptr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_N: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    BATCHED: gl.constexpr, EPILOGUE: gl.constexpr, VERDICTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, DOWN: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, SUBTILES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i], for a batch of two dimensions; parameters as those of `matmul_warpgroups`.

    DOWN: 2 where the tiles of a cluster's programs lie one below the other and share tiles of b, 1 where
    they lie side by side and share tiles of a. GROUP_M counts rows of clusters.
    TRANSPOSED: out^T is made, and a, b, blocks and DOWN are those of out^T = a b; M, N, the output's
    descriptors and its strides are those of out.
    """
    ACROSS: gl.constexpr = 2 // DOWN
    REST_N: gl.constexpr = BLOCK_N - MAIN_N
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    dtype: gl.constexpr = a_desc.dtype
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    if A_ROW:
        a_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, ROWS, BLOCK_K, DOWN, 1)
    else:
        a_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, BLOCK_K, ROWS, 1, DOWN)
    if B_ROW:
        b_tiles = tiles_in_shared_memory(dtype, STAGES, BLOCK_K, MAIN_N, 1, ACROSS)
    else:
        b_tiles = tiles_in_shared_memory(dtype, STAGES, MAIN_N, BLOCK_K, ACROSS, 1)
    if TRANSPOSED:
        out_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, MAIN_N // SUBTILES, ROWS, ACROSS, DOWN)
    else:
        out_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, ROWS, MAIN_N // SUBTILES, DOWN, ACROSS)
    b_rest_tiles = b_tiles
    out_rest_tiles = out_tiles
    if REST_N:
        if B_ROW:
            b_rest_tiles = tiles_in_shared_memory(dtype, STAGES, BLOCK_K, REST_N, 1, ACROSS)
        else:
            b_rest_tiles = tiles_in_shared_memory(dtype, STAGES, REST_N, BLOCK_K, ACROSS, 1)
        if TRANSPOSED:
            out_rest_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, REST_N, ROWS, ACROSS, DOWN)
        else:
            out_rest_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, ROWS, REST_N, DOWN, ACROSS)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    empty = exchange.reserve()
    exchange.init(empty, STAGES, 4 * CONSUMERS)
    mbarrier.fence_init_release_cluster()
    operands = Operands(a_desc, b_desc, b_rest_desc)
    shared = Shared(a_tiles, b_tiles, b_rest_tiles, full, empty)
    result = Result(
        out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
        M, N, stride_oo, stride_oi, stride_om, stride_on, None, extra,
    )  # fmt: skip
    tiles_m = gl.cdiv(N if TRANSPOSED else M, BLOCK_M * DOWN)
    tiles_n = gl.cdiv(M if TRANSPOSED else N, BLOCK_N * ACROSS)
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles_m * tiles_n * batch, gl.cdiv(K, BLOCK_K), verdict_ptr)
    how: gl.constexpr = How(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, MAIN_N, BLOCK_K, GROUP_M,
        STAGES, CONSUMERS, SUBTILES, DOWN, ACROSS, FLAT, BATCHED, EPILOGUE, VERDICTS, TRANSPOSED,
    )  # fmt: skip
    run(operands, shared, result, walk, REGISTERS, how)
