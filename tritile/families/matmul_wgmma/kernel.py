"""Multiply matrices by specialised warps, on Hopper: one feeds shared memory, warpgroups multiply.

Written in Gluon: `tl.dot` has no tiles of 192 rows or 96 columns, and no producer that runs on into the next
tile while the last one is stored.
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
from tritile.families.common.tiles import carried_sum
from tritile.families.common.verdict import wanted
from tritile.families.matmul_wgmma import tma


class Operands(NamedTuple):
    """Descriptors of the operands; `b_rest` sees tiles of the columns beyond MAIN_N."""

    a: Any
    b: Any
    b_rest: Any


class Shared(NamedTuple):
    """Tiles in shared memory, and the barriers that tell which are full or empty."""

    a: Any
    b: Any
    b_rest: Any
    full: Any
    empty: Any


class Result(NamedTuple):
    """Describe where the result goes: by descriptor, or by pointer and strides, through shared memory.

    `scales` multiply the sum in the main loop; `extra` are operands of the epilogue.
    """

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
    scales: Any
    extra: Any


class Walk(NamedTuple):
    """Hold the numbers of tiles and of K iterations; `verdict` is the fallback flag that skips them all."""

    tiles_m: Any
    tiles_n: Any
    inner_batch: Any
    tiles: Any
    turns: Any
    verdict: Any


class How(NamedTuple):
    """Hold the compile-time parameters of `matmul_warpgroups`."""

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
    FLAT: Any
    BATCHED: Any
    EPILOGUE: Any
    PROMOTE: Any
    IN_PARTS: Any
    SCALE_BLOCKS: Any
    VERDICTS: Any


@gluon.jit
def tile_at(index, walk, how: gl.constexpr):
    """The matrix (outer, inner), row and column of tile `index`, walked down bands of GROUP_M tile rows.

    FLAT: of the program's only tile, by its place in the grid. A division takes some 0.1 us, which small
    products feel. Not BATCHED: there is one matrix.
    """
    matrix = gl.program_id(2)
    row = gl.program_id(0)
    column = gl.program_id(1)
    if not how.FLAT:
        tiles = walk.tiles_m * walk.tiles_n
        if how.BATCHED:
            matrix = index // tiles
            index = index % tiles
        band = how.GROUP_M * walk.tiles_n
        first = (index // band) * how.GROUP_M
        rows = gl.minimum(walk.tiles_m - first, how.GROUP_M)
        within = index % band
        row = first + within % rows
        column = within // rows
    outer = matrix * 0
    inner = outer
    if how.BATCHED:
        outer = matrix // walk.inner_batch
        inner = matrix % walk.inner_batch
    return outer, inner, row, column


@gluon.jit
def tiles_of(walk, how: gl.constexpr):
    """First, end and step of the tiles that a program makes."""
    first = gl.program_id(0)
    step = gl.num_programs(0)
    tiles = walk.tiles
    if how.FLAT:
        first = first * 0
        step = first + 1
        tiles = step
    if walk.verdict is not None:
        if how.WAIT:
            gdc_wait()
        tiles = gl.where(wanted(walk.verdict, how.VERDICTS), tiles, 0)
    return first, tiles, step


@gluon.jit
def fetch(desc, outer, inner, row, column, ROW: gl.constexpr, barrier, tile):
    """Start copying the tile at (row, column) to shared memory; not ROW: `desc` sees the transpose."""
    if ROW:
        tma.async_copy_global_to_shared(desc, [outer, inner, row, column], barrier, tile)
    else:
        tma.async_copy_global_to_shared(desc, [outer, inner, column, row], barrier, tile)


@gluon.jit
def produce(operands, shared, walk, how: gl.constexpr):
    """Keep the stages of shared memory filled with tiles of a and b, in the order they are consumed."""
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS
    SIZE: gl.constexpr = shared.a.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (how.BLOCK_M + how.BLOCK_N) * how.BLOCK_K * SIZE
    stage = 0
    phase = 1
    if how.WAIT:
        gdc_wait()
    mine, end, step = tiles_of(walk, how)
    for index in range(mine, end, step):
        outer, inner, row, column = tile_at(index, walk, how)
        m = row * how.BLOCK_M
        n = column * how.BLOCK_N
        for turn in range(walk.turns):
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
def flat(tile):
    """A (1, 1, rows, columns) tile in shared memory as (rows, columns)."""
    shape: gl.constexpr = [tile.shape[2], tile.shape[3]]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, tile.dtype)
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
def store_part(desc, tile, part, outer, inner, m, n, result, how: gl.constexpr):
    """Store through shared memory, once the store before has let go of it; masked where no descriptor can."""
    if how.EPILOGUE is not None:
        by_row: gl.constexpr = gl.SliceLayout(1, part.type.layout)
        by_column: gl.constexpr = gl.SliceLayout(0, part.type.layout)
        rows_of_part = m + gl.arange(0, part.shape[0], by_row)
        columns_of_part = n + gl.arange(0, part.shape[1], by_column)
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
        ACROSS: gl.constexpr = 32 if COLUMNS >= 32 else COLUMNS
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
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
def multiply(WHICH: gl.constexpr, acc, rest, first, end, stage, phase, shared, how: gl.constexpr):
    """acc and rest plus the products of turns `first` to `end`, at least one; and the stage that is next."""
    last = 0
    for turn in range(first, end):
        mbarrier.wait(shared.full.index(stage), phase)
        a = operand(shared.a.index(stage * how.CONSUMERS + WHICH), how.A_ROW)
        acc = warpgroup_mma(a, operand(shared.b.index(stage), how.B_ROW), acc, is_async=True)
        if how.MAIN_N < how.BLOCK_N:
            b_rest = operand(shared.b_rest.index(stage), how.B_ROW)
            rest = warpgroup_mma(a, b_rest, rest, is_async=True)
            acc, rest = warpgroup_mma_wait(num_outstanding=2, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        if turn > first:
            mbarrier.arrive(shared.empty.index(last), count=1)
        last = stage
        stage += 1
        if stage == how.STAGES:
            stage = 0
            phase ^= 1
    if how.MAIN_N < how.BLOCK_N:
        acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(shared.empty.index(last), count=1)
    return acc, rest, stage, phase


@gluon.jit
def block_scales(result, m, n, block, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout, how: gl.constexpr):
    """By what rows and columns of block `block` of K are multiplied: see `kernels.matmul.block_scale`.

    Where all columns of a tile share a scale, it goes to the rows.
    """
    OF_A: gl.constexpr = how.SCALE_BLOCKS[0]
    OF_B: gl.constexpr = how.SCALE_BLOCKS[1]
    scales = result.scales
    rows = m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = n + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    of_rows = gl.load(
        scales[0] + rows // OF_A * scales[1] + block * scales[2], mask=rows < result.M, other=0.0
    )
    of_b = scales[3] + block * scales[4]
    if OF_B % how.BLOCK_N == 0:
        of_rows *= gl.load(of_b + n // OF_B * scales[5])
        of_columns = columns.to(gl.float32)
    else:
        of_columns = gl.load(of_b + columns // OF_B * scales[5], mask=columns < result.N, other=0.0)
    return of_rows, of_columns


@gluon.jit
def added(acc, sums, of_rows, of_columns, how: gl.constexpr):
    """acc plus sums, each block of K multiplied by its scales."""
    if how.SCALE_BLOCKS is None:
        acc += sums
    elif how.SCALE_BLOCKS[1] % how.BLOCK_N == 0:
        acc += sums * of_rows[:, None]
    else:
        acc += sums * (of_rows[:, None] * of_columns[None, :])
    return acc


@gluon.jit
def consume(WHICH: gl.constexpr, result, shared, walk, how: gl.constexpr):
    """Multiply the rows of each tile that are consumer WHICH's, and store them."""
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS
    MAIN_N: gl.constexpr = how.MAIN_N
    REST_N: gl.constexpr = how.BLOCK_N - MAIN_N
    HALF: gl.constexpr = MAIN_N // 2
    DEPTH: gl.constexpr = 256 // shared.a.dtype.primitive_bitwidth
    REST: gl.constexpr = REST_N if REST_N else 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN_N, DEPTH])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, DEPTH])
    stage = 0
    phase = 0
    if how.SCALE_BLOCKS is not None and how.WAIT:
        gdc_wait()  # scales are read ahead of the first tile; all else comes after tiles, which wait
    mine, end, step = tiles_of(walk, how)
    for index in range(mine, end, step):
        outer, inner, row, column = tile_at(index, walk, how)
        acc = gl.zeros((ROWS, MAIN_N), gl.float32, layout)
        rest = gl.zeros((ROWS, REST), gl.float32, rest_layout)
        if how.PROMOTE:
            m = row * how.BLOCK_M + WHICH * ROWS
            n = column * how.BLOCK_N
            lost = gl.zeros((ROWS, MAIN_N), gl.float32, layout)
            rest_lost = gl.zeros((ROWS, REST), gl.float32, rest_layout)
            small = walk.turns * 0
            if how.IN_PARTS:
                small = gl.maximum((walk.turns * 2 - 2) // 3, 1)
                acc, rest, stage, phase = multiply(WHICH, acc, rest, 0, small, stage, phase, shared, how)
            for first in range(small, walk.turns, how.PROMOTE):
                after = gl.minimum(first + how.PROMOTE, walk.turns)
                of_rows = m
                of_columns = n
                rest_rows = m
                rest_columns = n
                if how.SCALE_BLOCKS is not None:
                    block = first // how.PROMOTE
                    of_rows, of_columns = block_scales(result, m, n, block, ROWS, MAIN_N, layout, how)
                    if REST_N:
                        rest_rows, rest_columns = block_scales(
                            result, m, n + MAIN_N, block, ROWS, REST, rest_layout, how
                        )
                sums, rest_sums, stage, phase = multiply(
                    WHICH, lost, rest_lost, first, after, stage, phase, shared, how
                )
                if how.IN_PARTS:
                    acc, lost = carried_sum(acc, sums)
                    if REST_N:
                        rest, rest_lost = carried_sum(rest, rest_sums)
                else:
                    acc = added(acc, sums, of_rows, of_columns, how)
                    if REST_N:
                        rest = added(rest, rest_sums, rest_rows, rest_columns, how)
        else:
            acc, rest, stage, phase = multiply(WHICH, acc, rest, 0, walk.turns, stage, phase, shared, how)
        m = row * how.BLOCK_M + WHICH * ROWS
        n = column * how.BLOCK_N
        tile = result.tile.index(WHICH)
        if how.SUBTILES == 2:
            left, right = acc.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
            store_part(result.desc, tile, left, outer, inner, m, n, result, how)
            store_part(result.desc, tile, right, outer, inner, m, n + HALF, result, how)
        else:
            store_part(result.desc, tile, acc, outer, inner, m, n, result, how)
        if REST_N:
            tile = result.rest_tile.index(WHICH)
            store_part(result.rest_desc, tile, rest, outer, inner, m, n + MAIN_N, result, how)
    tma.store_wait(0)


@gluon.jit
def tiles_in_shared_memory(dtype, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Room for so many tiles of a batch of two dimensions, as tensor cores read them."""
    shape: gl.constexpr = [1, 1, ROWS, COLUMNS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return gl.allocate_shared_memory(dtype, [COUNT] + shape, layout)


@gluon.jit(do_not_specialize=("M", "K"))
def matmul_warpgroups(
    a_desc, b_desc, b_rest_desc, out_desc, out_rest_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, scales, extra, verdict_ptr,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_N: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    BATCHED: gl.constexpr, SCALE_BLOCKS: gl.constexpr, EPILOGUE: gl.constexpr, PROMOTE: gl.constexpr,
    IN_PARTS: gl.constexpr, VERDICTS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, PERSISTENT: gl.constexpr, SUBTILES: gl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    CONSUMERS warpgroups of REGISTERS registers a thread share a tile, each with BLOCK_M / CONSUMERS of its
    rows. Where BLOCK_N is no power of two its columns are MAIN_N and the rest, with descriptors of their own.

    PERSISTENT: the grid has fewer programs than there are tiles. SUBTILES: the parts in which a tile's
    columns pass through shared memory to be stored. WAIT: launched before the kernel ahead of it is done,
    so wait for that one before touching memory. FLAT: the grid has an axis each for rows and columns of
    tiles, and one for matrices. BATCHED: there are several of these.
    EPILOGUE, `extra`: what is done to the sums, and with what (see `finished`).
    PROMOTE: 0, or after how many turns sums go from tensor cores to a total in fp32; IN_PARTS: in the last
    third of K. SCALE_BLOCKS, `scales`: as they go, they are multiplied by scales of their own.
    `verdict_ptr`, VERDICTS: None, or a word that says whether there is anything to do (see `wanted`).
    """
    REST_N: gl.constexpr = BLOCK_N - MAIN_N
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    dtype: gl.constexpr = a_desc.dtype
    b_dtype: gl.constexpr = b_desc.dtype
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    if A_ROW:
        a_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, ROWS, BLOCK_K)
    else:
        a_tiles = tiles_in_shared_memory(dtype, STAGES * CONSUMERS, BLOCK_K, ROWS)
    if B_ROW:
        b_tiles = tiles_in_shared_memory(b_dtype, STAGES, BLOCK_K, MAIN_N)
    else:
        b_tiles = tiles_in_shared_memory(b_dtype, STAGES, MAIN_N, BLOCK_K)
    out_tiles = tiles_in_shared_memory(out_dtype, CONSUMERS, ROWS, MAIN_N // SUBTILES)
    b_rest_tiles = b_tiles
    out_rest_tiles = out_tiles
    if REST_N:
        if B_ROW:
            b_rest_tiles = tiles_in_shared_memory(b_dtype, STAGES, BLOCK_K, REST_N)
        else:
            b_rest_tiles = tiles_in_shared_memory(b_dtype, STAGES, REST_N, BLOCK_K)
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
        M, N, stride_oo, stride_oi, stride_om, stride_on, scales, extra,
    )  # fmt: skip
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles_m * tiles_n * batch, gl.cdiv(K, BLOCK_K), verdict_ptr)
    how: gl.constexpr = How(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, MAIN_N, BLOCK_K, GROUP_M,
        STAGES, CONSUMERS, SUBTILES, FLAT, BATCHED, EPILOGUE, PROMOTE, IN_PARTS,
        SCALE_BLOCKS, VERDICTS,
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (consume, (1, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, result, shared, walk, how)),
            (consume, (1, result, shared, walk, how)),
            (consume, (2, result, shared, walk, how)),
            (produce, (operands, shared, walk, how)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
