"""Matrix product by specialised warps, on Hopper: one feeds shared memory, warpgroups multiply.

Written in Gluon: `tl.dot` has no tiles of 192 rows or 96 columns, and no producer that runs on into the next
tile while the last one is stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def tile_at(index, tiles_m, tiles_n, inner_batch, GROUP_M: gl.constexpr):
    """The matrix (outer, inner), row and column of tile `index`, walked down bands of GROUP_M tile rows."""
    tiles = tiles_m * tiles_n
    matrix = index // tiles
    index = index % tiles
    band = GROUP_M * tiles_n
    first = (index // band) * GROUP_M
    rows = gl.minimum(tiles_m - first, GROUP_M)
    within = index % band
    return matrix // inner_batch, matrix % inner_batch, first + within % rows, within // rows


@gluon.jit
def fetch(desc, outer, inner, row, column, ROW_MAJOR: gl.constexpr, barrier, tile):
    """Start copying the tile at (row, column) to shared memory; not ROW_MAJOR: `desc` sees the transpose."""
    if ROW_MAJOR:
        tma.async_copy_global_to_shared(desc, [outer, inner, row, column], barrier, tile)
    else:
        tma.async_copy_global_to_shared(desc, [outer, inner, column, row], barrier, tile)


@gluon.jit
def produce(
    a_desc, b_desc, b_rest_desc, a_tiles, b_tiles, b_rest_tiles, full, empty,
    tiles_m, tiles_n, inner_batch, tiles, turns,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, WAIT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MAIN_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Keep the stages of shared memory filled with tiles of a and b, in the order they are consumed."""
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * a_desc.dtype.primitive_bitwidth // 8
    stage = 0
    phase = 1
    if WAIT:
        gdc_wait()
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        outer, inner, row, column = tile_at(index, tiles_m, tiles_n, inner_batch, GROUP_M)
        m = row * BLOCK_M
        n = column * BLOCK_N
        for turn in range(turns):
            k = turn * BLOCK_K
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, BYTES)
            for i in gl.static_range(CONSUMERS):
                fetch(
                    a_desc, outer, inner, m + i * ROWS, k, A_ROW, ready, a_tiles.index(stage * CONSUMERS + i)
                )
            fetch(b_desc, outer, inner, k, n, B_ROW, ready, b_tiles.index(stage))
            if MAIN_N < BLOCK_N:
                fetch(b_rest_desc, outer, inner, k, n + MAIN_N, B_ROW, ready, b_rest_tiles.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
    if WAIT:
        gdc_launch_dependents()


@gluon.jit
def flat(tile):
    """A (1, 1, rows, columns) tile in shared memory as (rows, columns)."""
    shape: gl.constexpr = [tile.shape[2], tile.shape[3]]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, tile.dtype)
    return tile._reinterpret(tile.dtype, shape, layout)


@gluon.jit
def operand(tile, ROW_MAJOR: gl.constexpr):
    """A tile in shared memory as tensor cores are to read it."""
    tile = flat(tile)
    if not ROW_MAJOR:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def store_part(
    desc, out_ptr, tile, part, outer, inner, m, n, M, N, stride_oo, stride_oi, stride_om, stride_on,
    BY_DESCRIPTOR: gl.constexpr,
):  # fmt: skip
    """Store through shared memory, once the store before has let go of it; masked where no descriptor can."""
    part = part.to(out_ptr.dtype.element_ty)
    if BY_DESCRIPTOR:
        tma.store_wait(0)
        flat(tile).store(part)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [outer, inner, m, n], tile)
    else:
        ROWS: gl.constexpr = part.shape[0]
        COLUMNS: gl.constexpr = part.shape[1]
        ACROSS: gl.constexpr = 32 if COLUMNS >= 32 else COLUMNS
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
        flat(tile).store(part)
        part = flat(tile).load(layout)
        rows = m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        columns = n + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        matrix = outer.to(gl.int64) * stride_oo + inner.to(gl.int64) * stride_oi
        offsets = rows[:, None].to(gl.int64) * stride_om + columns[None, :].to(gl.int64) * stride_on
        gl.store(out_ptr + matrix + offsets, part, mask=(rows[:, None] < M) & (columns[None, :] < N))


@gluon.jit
def consume(
    WHICH: gl.constexpr, out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
    a_tiles, b_tiles, b_rest_tiles, full, empty, M, N, stride_oo, stride_oi, stride_om, stride_on,
    tiles_m, tiles_n, inner_batch, tiles, turns,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, MAIN_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, SUBTILES: gl.constexpr,
):  # fmt: skip
    """Multiply the rows of each tile that are consumer WHICH's, and store them."""
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    REST_N: gl.constexpr = BLOCK_N - MAIN_N
    HALF: gl.constexpr = MAIN_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN_N, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST_N if REST_N else 16, 16])
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        outer, inner, row, column = tile_at(index, tiles_m, tiles_n, inner_batch, GROUP_M)
        acc = gl.zeros((ROWS, MAIN_N), gl.float32, layout)
        rest = gl.zeros((ROWS, REST_N if REST_N else 16), gl.float32, rest_layout)
        last = 0
        for turn in range(turns):
            mbarrier.wait(full.index(stage), phase)
            a = operand(a_tiles.index(stage * CONSUMERS + WHICH), A_ROW)
            acc = warpgroup_mma(a, operand(b_tiles.index(stage), B_ROW), acc, is_async=True)
            if REST_N:
                rest = warpgroup_mma(a, operand(b_rest_tiles.index(stage), B_ROW), rest, is_async=True)
                acc, rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, rest))
            else:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            if turn > 0:
                mbarrier.arrive(empty.index(last), count=1)
            last = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if REST_N:
            acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(last), count=1)
        m = row * BLOCK_M + WHICH * ROWS
        n = column * BLOCK_N
        tile = out_tiles.index(WHICH)
        if SUBTILES == 2:
            left, right = acc.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
            store_part(
                out_desc, out_ptr, tile, left, outer, inner, m, n, M, N,
                stride_oo, stride_oi, stride_om, stride_on, BY_DESCRIPTOR,
            )  # fmt: skip
            store_part(
                out_desc, out_ptr, tile, right, outer, inner, m, n + HALF, M, N,
                stride_oo, stride_oi, stride_om, stride_on, BY_DESCRIPTOR,
            )  # fmt: skip
        else:
            store_part(
                out_desc, out_ptr, tile, acc, outer, inner, m, n, M, N,
                stride_oo, stride_oi, stride_om, stride_on, BY_DESCRIPTOR,
            )  # fmt: skip
        if REST_N:
            store_part(
                out_rest_desc, out_ptr, out_rest_tiles.index(WHICH), rest, outer, inner, m, n + MAIN_N, M, N,
                stride_oo, stride_oi, stride_om, stride_on, BY_DESCRIPTOR,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def matmul_warpgroups(
    a_desc, b_desc, b_rest_desc, out_desc, out_rest_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_N: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    CONSUMERS: gl.constexpr, PERSISTENT: gl.constexpr, SUBTILES: gl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    CONSUMERS warpgroups of REGISTERS registers a thread share a tile, each with BLOCK_M / CONSUMERS of its
    rows. Where BLOCK_N is no power of two its columns are MAIN_N and the rest, with descriptors of their own.

    PERSISTENT: the grid has fewer programs than there are tiles. SUBTILES: the parts in which a tile's
    columns pass through shared memory to be stored. WAIT: launched before the kernel ahead of it is done,
    so wait for that one before touching memory.
    """
    REST_N: gl.constexpr = BLOCK_N - MAIN_N
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    out_shape: gl.constexpr = [1, 1, ROWS, MAIN_N // SUBTILES]
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(out_shape, out_dtype)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n * batch
    turns = gl.cdiv(K, BLOCK_K)
    a_tiles = gl.allocate_shared_memory(
        a_desc.dtype, [STAGES * CONSUMERS] + a_desc.block_type.shape, a_desc.layout
    )
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    out_tiles = gl.allocate_shared_memory(out_dtype, [CONSUMERS] + out_shape, out_layout)
    if REST_N:
        rest_shape: gl.constexpr = [1, 1, ROWS, REST_N]
        rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(rest_shape, out_dtype)
        b_rest_tiles = gl.allocate_shared_memory(
            b_desc.dtype, [STAGES] + b_rest_desc.block_type.shape, b_rest_desc.layout
        )
        out_rest_tiles = gl.allocate_shared_memory(out_dtype, [CONSUMERS] + rest_shape, rest_layout)
    else:
        b_rest_tiles = b_tiles
        out_rest_tiles = out_tiles
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (
                0, out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
                a_tiles, b_tiles, b_rest_tiles, full, empty, M, N, stride_oo, stride_oi, stride_om, stride_on,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, BY_DESCRIPTOR, BLOCK_M, BLOCK_N, MAIN_N, GROUP_M, STAGES, CONSUMERS, SUBTILES,
            )),
            (produce, (
                a_desc, b_desc, b_rest_desc, a_tiles, b_tiles, b_rest_tiles, full, empty,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, WAIT, BLOCK_M, BLOCK_N, MAIN_N, BLOCK_K, GROUP_M, STAGES, CONSUMERS,
            )),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
                0, out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
                a_tiles, b_tiles, b_rest_tiles, full, empty, M, N, stride_oo, stride_oi, stride_om, stride_on,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, BY_DESCRIPTOR, BLOCK_M, BLOCK_N, MAIN_N, GROUP_M, STAGES, CONSUMERS, SUBTILES,
            )),
            (consume, (
                1, out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
                a_tiles, b_tiles, b_rest_tiles, full, empty, M, N, stride_oo, stride_oi, stride_om, stride_on,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, BY_DESCRIPTOR, BLOCK_M, BLOCK_N, MAIN_N, GROUP_M, STAGES, CONSUMERS, SUBTILES,
            )),
            (produce, (
                a_desc, b_desc, b_rest_desc, a_tiles, b_tiles, b_rest_tiles, full, empty,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, WAIT, BLOCK_M, BLOCK_N, MAIN_N, BLOCK_K, GROUP_M, STAGES, CONSUMERS,
            )),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                0, out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
                a_tiles, b_tiles, b_rest_tiles, full, empty, M, N, stride_oo, stride_oi, stride_om, stride_on,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, BY_DESCRIPTOR, BLOCK_M, BLOCK_N, MAIN_N, GROUP_M, STAGES, CONSUMERS, SUBTILES,
            )),
            (consume, (
                1, out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
                a_tiles, b_tiles, b_rest_tiles, full, empty, M, N, stride_oo, stride_oi, stride_om, stride_on,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, BY_DESCRIPTOR, BLOCK_M, BLOCK_N, MAIN_N, GROUP_M, STAGES, CONSUMERS, SUBTILES,
            )),
            (consume, (
                2, out_desc, out_rest_desc, out_ptr, out_tiles, out_rest_tiles,
                a_tiles, b_tiles, b_rest_tiles, full, empty, M, N, stride_oo, stride_oi, stride_om, stride_on,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, BY_DESCRIPTOR, BLOCK_M, BLOCK_N, MAIN_N, GROUP_M, STAGES, CONSUMERS, SUBTILES,
            )),
            (produce, (
                a_desc, b_desc, b_rest_desc, a_tiles, b_tiles, b_rest_tiles, full, empty,
                tiles_m, tiles_n, inner_batch, tiles, turns,
                A_ROW, B_ROW, WAIT, BLOCK_M, BLOCK_N, MAIN_N, BLOCK_K, GROUP_M, STAGES, CONSUMERS,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
