"""Multiply by specialised warps, on Hopper: one loads tiles, 1 to 3 warpgroups multiply and store.

Written in Gluon: `tl.dot` has no tiles of 192 rows or 96 columns, and no producer that runs on into the next
tile while the last one is stored.

A stage of shared memory holds a tile of a, [BLOCK_M, BLOCK_K], as CONSUMERS tiles of rows, and one of b,
[BLOCK_K, BLOCK_N]. It is full once its copies by TMA have arrived, and empty once every consumer has read it.
Where BLOCK_N is no power of two, its columns are MAIN_N and the rest, with accumulators, descriptors and
shared memory of their own: `rest`.
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
from tritile.families.common.fallback import is_enabled
from tritile.families.common.tiles import carried_sum
from tritile.families.matmul_wgmma import tma


class Operands(NamedTuple):
    """Hold descriptors of the operands; `b_rest` sees tiles of the columns beyond MAIN_N."""

    a: Any
    b: Any
    b_rest: Any


class Stages(NamedTuple):
    """Hold tiles in shared memory, and the barriers that tell which stages are full or empty."""

    a: Any
    b: Any
    b_rest: Any
    full: Any
    empty: Any


class Result(NamedTuple):
    """Describe where the result goes: by descriptor, or by pointer and strides, through shared memory."""

    desc: Any
    rest_desc: Any
    ptr: Any
    tile: Any
    rest_tile: Any
    M: Any
    N: Any
    stride_o: Any
    stride_i: Any
    stride_m: Any
    stride_n: Any
    extra: Any


class Grid(NamedTuple):
    """Hold the numbers of tiles and of K iterations; `flag_ptr` is None, or the fallback flag."""

    tiles_m: Any
    tiles_n: Any
    inner_batch: Any
    tiles: Any
    iterations: Any
    flag_ptr: Any


class Meta(NamedTuple):
    """Hold the compile-time parameters of `matmul_warpgroups`."""

    A_ROW: Any
    B_ROW: Any
    BY_DESCRIPTOR: Any
    WAIT: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    MAIN_N: Any
    GROUP_M: Any
    STAGES: Any
    CONSUMERS: Any
    SUBTILES: Any
    FLAT: Any
    BATCHED: Any
    EPILOGUE: Any
    FLAGS: Any
    PROMOTE: Any
    IN_PARTS: Any


# --- Which tiles a program makes, and in which order. ---


@gluon.jit
def tiles_of(grid, meta: gl.constexpr):
    """Return first, end and step of the tiles that a program makes."""
    if meta.FLAT:
        first = gl.program_id(0) * 0
        step = first + 1
        end = step
    else:
        first = gl.program_id(0)
        step = gl.num_programs(0)
        end = grid.tiles
    if grid.flag_ptr is not None:
        if meta.WAIT:
            gdc_wait()
        end = gl.where(is_enabled(grid.flag_ptr, meta.FLAGS), end, 0)
    return first, end, step


@gluon.jit
def tile_at(index, grid, meta: gl.constexpr):
    """Return matrix (outer, inner), row and column of tile `index`, walked down bands of GROUP_M tile rows.

    FLAT: of the program's only tile, by its place in the grid. A division takes some 0.1 us, which small
    products feel. Not BATCHED: there is one matrix.
    """
    matrix = gl.program_id(2)
    row = gl.program_id(0)
    column = gl.program_id(1)
    if not meta.FLAT:
        tiles = grid.tiles_m * grid.tiles_n
        if meta.BATCHED:
            matrix = index // tiles
            index = index % tiles
        band = meta.GROUP_M * grid.tiles_n
        first = (index // band) * meta.GROUP_M
        rows = gl.minimum(grid.tiles_m - first, meta.GROUP_M)
        within = index % band
        row = first + within % rows
        column = within // rows
    outer = matrix * 0
    inner = outer
    if meta.BATCHED:
        outer = matrix // grid.inner_batch
        inner = matrix % grid.inner_batch
    return outer, inner, row, column


# --- Shared memory. ---


@gluon.jit
def allocate_tiles(dtype, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr):
    """Allocate COUNT tiles of a batch of two dimensions; not ROW: they hold the transpose."""
    shape: gl.constexpr = [1, 1, ROWS, COLUMNS] if ROW else [1, 1, COLUMNS, ROWS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return gl.allocate_shared_memory(dtype, [COUNT] + shape, layout)


@gluon.jit
def allocate(a_dtype, b_dtype, out_dtype, meta: gl.constexpr):
    """Allocate the stages and their barriers, and the tiles through which consumers store."""
    ROWS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS
    REST: gl.constexpr = meta.BLOCK_N - meta.MAIN_N
    a = allocate_tiles(a_dtype, meta.STAGES * meta.CONSUMERS, ROWS, meta.BLOCK_K, meta.A_ROW)
    b = allocate_tiles(b_dtype, meta.STAGES, meta.BLOCK_K, meta.MAIN_N, meta.B_ROW)
    out = allocate_tiles(out_dtype, meta.CONSUMERS, ROWS, meta.MAIN_N // meta.SUBTILES, True)
    b_rest = b
    out_rest = out
    if REST:
        b_rest = allocate_tiles(b_dtype, meta.STAGES, meta.BLOCK_K, REST, meta.B_ROW)
        out_rest = allocate_tiles(out_dtype, meta.CONSUMERS, ROWS, REST, True)
    full = gl.allocate_shared_memory(gl.int64, [meta.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [meta.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(meta.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=meta.CONSUMERS)
    return Stages(a, b, b_rest, full, empty), out, out_rest


@gluon.jit
def matrix_view(tile):
    """View a (1, 1, rows, columns) tile in shared memory as (rows, columns)."""
    shape: gl.constexpr = [tile.shape[2], tile.shape[3]]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, tile.dtype)
    tile = tma.reinterpret(tile, tile.dtype, shape, layout)
    return tile


@gluon.jit
def operand(tile, ROW: gl.constexpr):
    """View a tile in shared memory as tensor cores are to read it."""
    tile = matrix_view(tile)
    if not ROW:
        tile = tile.permute((1, 0))
    return tile


@gluon.jit
def next_stage(stage, phase, meta: gl.constexpr):
    """Return the next stage, and its phase: the parity that a wait for its barriers is for."""
    stage += 1
    if stage == meta.STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


# --- The producer. ---


@gluon.jit
def fetch(desc, outer, inner, row, column, ROW: gl.constexpr, barrier, tile):
    """Start copying the tile at (row, column) to shared memory; not ROW: `desc` sees the transpose."""
    at = [outer, inner, row, column] if ROW else [outer, inner, column, row]
    tma.async_copy_global_to_shared(desc, at, barrier, tile)


@gluon.jit
def produce(operands, stages, grid, meta: gl.constexpr):
    """Keep the stages of shared memory filled with tiles of a and b, in the order they are consumed."""
    ROWS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS
    SIZE: gl.constexpr = stages.a.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (meta.BLOCK_M + meta.BLOCK_N) * meta.BLOCK_K * SIZE
    stage = 0
    phase = 1  # of a wait that a new barrier passes: all stages are empty
    if meta.WAIT:
        gdc_wait()
    first, end, step = tiles_of(grid, meta)
    for index in range(first, end, step):
        outer, inner, row, column = tile_at(index, grid, meta)
        m = row * meta.BLOCK_M
        n = column * meta.BLOCK_N
        for iteration in range(grid.iterations):
            k = iteration * meta.BLOCK_K
            full = stages.full.index(stage)
            mbarrier.wait(stages.empty.index(stage), phase)
            mbarrier.expect(full, BYTES)
            for i in gl.static_range(meta.CONSUMERS):
                tile = stages.a.index(stage * meta.CONSUMERS + i)
                fetch(operands.a, outer, inner, m + i * ROWS, k, meta.A_ROW, full, tile)
            fetch(operands.b, outer, inner, k, n, meta.B_ROW, full, stages.b.index(stage))
            if meta.MAIN_N < meta.BLOCK_N:
                tile = stages.b_rest.index(stage)
                fetch(operands.b_rest, outer, inner, k, n + meta.MAIN_N, meta.B_ROW, full, tile)
            stage, phase = next_stage(stage, phase, meta)
    if meta.WAIT:
        gdc_launch_dependents()


# --- A consumer: the main loop, totals in fp32, the way out. ---


@gluon.jit
def multiply(WHICH: gl.constexpr, acc, rest, start, end, stage, phase, stages, meta: gl.constexpr):
    """Return acc and rest plus products of iterations `start` to `end`, at least one, and the next stage.

    One iteration's products are under way while the next are issued: a stage is empty an iteration later.
    """
    last = 0
    for iteration in range(start, end):
        mbarrier.wait(stages.full.index(stage), phase)
        a = operand(stages.a.index(stage * meta.CONSUMERS + WHICH), meta.A_ROW)
        acc = warpgroup_mma(a, operand(stages.b.index(stage), meta.B_ROW), acc, is_async=True)
        if meta.MAIN_N < meta.BLOCK_N:
            b_rest = operand(stages.b_rest.index(stage), meta.B_ROW)
            rest = warpgroup_mma(a, b_rest, rest, is_async=True)
            acc, rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if iteration > start:
            mbarrier.arrive(stages.empty.index(last), count=1)
        last = stage
        stage, phase = next_stage(stage, phase, meta)
    if meta.MAIN_N < meta.BLOCK_N:
        acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(stages.empty.index(last), count=1)
    return acc, rest, stage, phase


@gluon.constexpr_function
def sums_layout(columns, bits):
    """Return the layout of sums of so many columns, of operands of so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.jit
def zeros(stages, meta: gl.constexpr):
    """Return zeros: a consumer's sums of MAIN_N columns, and those of the rest."""
    BITS: gl.constexpr = stages.a.dtype.primitive_bitwidth
    ROWS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS
    REST: gl.constexpr = meta.BLOCK_N - meta.MAIN_N if meta.MAIN_N < meta.BLOCK_N else 16
    acc = gl.zeros((ROWS, meta.MAIN_N), gl.float32, sums_layout(meta.MAIN_N, BITS))
    rest = gl.zeros((ROWS, REST), gl.float32, sums_layout(REST, BITS))
    return acc, rest


@gluon.jit
def promoted(WHICH: gl.constexpr, acc, rest, stage, phase, stages, grid, meta: gl.constexpr):
    """Return acc and rest plus the products of all K, and the next stage.

    Sums go from tensor cores, which truncate, to these totals every PROMOTE iterations; IN_PARTS: in the last
    third of K, with what rounding loses carried on (see `carried_sum`).
    """
    REST: gl.constexpr = meta.MAIN_N < meta.BLOCK_N
    lost, rest_lost = zeros(stages, meta)  # by rounding, of the total: the next sum starts from it
    small = grid.iterations * 0
    if meta.IN_PARTS:
        small = gl.maximum((grid.iterations * 2 - 2) // 3, 1)
        acc, rest, stage, phase = multiply(WHICH, acc, rest, 0, small, stage, phase, stages, meta)
    for first in range(small, grid.iterations, meta.PROMOTE):
        end = gl.minimum(first + meta.PROMOTE, grid.iterations)
        sums, rest_sums, stage, phase = multiply(
            WHICH, lost, rest_lost, first, end, stage, phase, stages, meta
        )
        if meta.IN_PARTS:
            acc, lost = carried_sum(acc, sums)
            if REST:
                rest, rest_lost = carried_sum(rest, rest_sums)
        else:
            acc += sums
            if REST:
                rest += rest_sums
    return acc, rest, stage, phase


@gluon.constexpr_function
def by_rows(columns):
    """Return the layout of rows in which a warp reads up to 32 columns at once."""
    wide = min(columns, 32)
    return gl.BlockedLayout([1, 1], [32 // wide, wide], [4, 1], [1, 0])


@gluon.jit
def store_part(desc, tile, part, outer, inner, m, n, result, meta: gl.constexpr):
    """Store the sums of a part of a tile through shared memory, once the store before has let go of it.

    By pointers, masked, where no descriptor can: TMA cuts a store off at 16 bytes, not at the element.
    """
    if meta.EPILOGUE is not None:
        rows = m + gl.arange(0, part.shape[0], gl.SliceLayout(1, part.type.layout))
        columns = n + gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout))
        part = finished(
            part, rows, columns, result.M, result.N, (outer, inner), (1, 1), result.extra, meta.EPILOGUE
        )
    part = part.to(result.ptr.dtype.element_ty)
    if meta.BY_DESCRIPTOR:
        tma.store_wait(0)
        matrix_view(tile).store(part)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [outer, inner, m, n], tile)
    else:
        layout: gl.constexpr = by_rows(part.shape[1])
        matrix_view(tile).store(part)
        part = matrix_view(tile).load(layout)
        rows = m + gl.arange(0, part.shape[0], gl.SliceLayout(1, layout))
        columns = n + gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
        matrix = outer.to(gl.int64) * result.stride_o + inner.to(gl.int64) * result.stride_i
        by_row = rows[:, None].to(gl.int64) * result.stride_m
        offsets = by_row + columns[None, :].to(gl.int64) * result.stride_n
        inside = (rows[:, None] < result.M) & (columns[None, :] < result.N)
        gl.store(result.ptr + matrix + offsets, part, mask=inside)


@gluon.jit
def store_tile(WHICH: gl.constexpr, acc, rest, outer, inner, m, n, result, meta: gl.constexpr):
    """Store what a consumer made of a tile, in SUBTILES parts."""
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = meta.MAIN_N // 2
    tile = result.tile.index(WHICH)
    if meta.SUBTILES == 2:
        left, right = acc.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
        store_part(result.desc, tile, left, outer, inner, m, n, result, meta)
        store_part(result.desc, tile, right, outer, inner, m, n + HALF, result, meta)
    else:
        store_part(result.desc, tile, acc, outer, inner, m, n, result, meta)
    if meta.MAIN_N < meta.BLOCK_N:
        tile = result.rest_tile.index(WHICH)
        store_part(result.rest_desc, tile, rest, outer, inner, m, n + meta.MAIN_N, result, meta)


@gluon.jit
def consume(WHICH: gl.constexpr, stages, grid, result, meta: gl.constexpr):
    """Multiply the rows of each tile that are consumer WHICH's, and store them."""
    stage = 0
    phase = 0
    first, end, step = tiles_of(grid, meta)
    for index in range(first, end, step):
        outer, inner, row, column = tile_at(index, grid, meta)
        acc, rest = zeros(stages, meta)
        if meta.PROMOTE:
            acc, rest, stage, phase = promoted(WHICH, acc, rest, stage, phase, stages, grid, meta)
        else:
            acc, rest, stage, phase = multiply(
                WHICH, acc, rest, 0, grid.iterations, stage, phase, stages, meta
            )
        m = row * meta.BLOCK_M + WHICH * (meta.BLOCK_M // meta.CONSUMERS)
        n = column * meta.BLOCK_N
        store_tile(WHICH, acc, rest, outer, inner, m, n, result, meta)
    tma.store_wait(0)


@gluon.jit
def run(WHICH: gl.constexpr, operands, stages, grid, result, meta: gl.constexpr):
    """Be consumer WHICH, or after the last one the producer."""
    if WHICH < meta.CONSUMERS:
        consume(WHICH, stages, grid, result, meta)
    else:
        produce(operands, stages, grid, meta)


@gluon.jit(do_not_specialize=("M", "K"))
def matmul_warpgroups(
    a_desc, b_desc, b_rest_desc, out_desc, out_rest_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra, flag_ptr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_N: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    BATCHED: gl.constexpr, EPILOGUE: gl.constexpr, PROMOTE: gl.constexpr, IN_PARTS: gl.constexpr,
    FLAGS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, PERSISTENT: gl.constexpr, SUBTILES: gl.constexpr,
):  # fmt: skip
    """Make out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    CONSUMERS warpgroups of REGISTERS registers a thread share a tile, each with BLOCK_M / CONSUMERS of its
    rows. Where BLOCK_N is no power of two its columns are MAIN_N and the rest, with descriptors of their own.

    PERSISTENT: the grid has fewer programs than there are tiles. SUBTILES: the parts in which a tile's
    columns pass through shared memory to be stored. WAIT: launched before the kernel ahead of it is done,
    so wait for that one before touching memory. FLAT: the grid has an axis each for rows and columns of
    tiles, and one for matrices. BATCHED: there are several of these.
    EPILOGUE, `extra`: what is done to the sums, and with what (see `finished`).
    PROMOTE: 0, or after how many K iterations sums go from tensor cores to a total in fp32; IN_PARTS: in the
    last third of K.
    `flag_ptr`, FLAGS: None, or the fallback flag and what it says where there is something to do (see
    `is_enabled`).
    """
    meta: gl.constexpr = Meta(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, BLOCK_K, MAIN_N, GROUP_M, STAGES, CONSUMERS,
        SUBTILES, FLAT, BATCHED, EPILOGUE, FLAGS, PROMOTE, IN_PARTS,
    )  # fmt: skip
    operands = Operands(a_desc, b_desc, b_rest_desc)
    stages, tile, rest_tile = allocate(a_desc.dtype, b_desc.dtype, out_ptr.dtype.element_ty, meta)
    result = Result(
        out_desc, out_rest_desc, out_ptr, tile, rest_tile,
        M, N, stride_oo, stride_oi, stride_om, stride_on, extra,
    )  # fmt: skip
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n * batch
    grid = Grid(tiles_m, tiles_n, inner_batch, tiles, gl.cdiv(K, BLOCK_K), flag_ptr)
    # The kernel's own warps are the first consumer; the last of these is the producer, a single warp.
    gl.warp_specialize(
        [
            (run, (0, operands, stages, grid, result, meta)),
            (run, (1, operands, stages, grid, result, meta)),
            (run, (2, operands, stages, grid, result, meta)),
            (run, (3, operands, stages, grid, result, meta)),
        ][: CONSUMERS + 1],
        [4, 4][: CONSUMERS - 1] + [1],
        [REGISTERS, REGISTERS][: CONSUMERS - 1] + [24],
    )
