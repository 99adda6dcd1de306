"""Multiply by specialised warps, on Hopper: one loads tiles, 1 to 3 warpgroups multiply and store.

Written in Gluon: `tl.dot` has no tiles of 192 rows or 96 columns, and no producer that runs on into the next
tile while the last one is stored.

A stage of shared memory holds a tile of a, [BLOCK_M, BLOCK_K], as CONSUMERS tiles of rows, and one of b,
[BLOCK_K, BLOCK_N]. It is full once its copies by TMA have arrived, and empty once every consumer has read it.
Where BLOCK_N is no power of two, its columns are MAIN_N and the rest, with accumulators, descriptors and
shared memory of their own: `rest`.

Two options, of which a kernel has at most one. The tiles of a last wave that would leave SMs idle are made in
parts of K, by all of them (see `Tail`). The two CTAs of a cluster are a pair: they make tiles one below the
other, and tiles of b, which both need, cross from the L2 cache once, to both. Rows that start on 16 bytes and
not on 32 are read at 0.6 of that cache's rate (`tuning/NOTES.md`), so it is what bounds such products.
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

ARRIVAL = gl.constexpr(65536)  # of a part, in a split tile's counter
PLACES = gl.constexpr(256)  # for arrivals in a counter: more than a tile has parts
ALL = gl.constexpr(65536 * 256)
POLLS = gl.constexpr(64)  # some 40 us: parts of a tile end closer together


class Operands(NamedTuple):
    """Hold descriptors of the operands; `b_rest` sees tiles of the columns beyond MAIN_N."""

    a: Any
    b: Any
    b_rest: Any


class Stages(NamedTuple):
    """Hold tiles in shared memory, and the barriers of full and of empty stages."""

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


class Tail(NamedTuple):
    """Describe split tiles: the `rest` tiles after the first `whole`, in `split` equal parts of K each.

    `parts` has room for a part of each program. `counters` has an arrival counter for each of these tiles and
    each consumer.
    """

    parts: Any
    counters: Any
    whole: Any
    rest: Any
    split: Any


class Grid(NamedTuple):
    """Hold the numbers of tiles and of K iterations; `flag_ptr` is None, or the fallback flag.

    `tail`: None, or which of the tiles are split.
    """

    tiles_m: Any
    tiles_n: Any
    inner_batch: Any
    tiles: Any
    iterations: Any
    flag_ptr: Any
    tail: Any


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
    CTAS: Any


# --- Which tiles a program makes, and in which order. ---


@gluon.jit
def tiles_of(grid, meta: gl.constexpr):
    """Return first, end and step of the tiles that a program makes.

    Where tiles are split, of its pieces, counted from 0: whole tiles, and then a part (see `piece_at`).
    """
    if grid.tail is not None:
        first = gl.program_id(0) * 0
        step = first + 1
        tail = grid.tail
        own = gl.cdiv(gl.maximum(tail.whole - gl.program_id(0), 0), gl.num_programs(0))
        end = own + gl.where(gl.program_id(0) < tail.rest * tail.split, 1, 0)
    elif meta.FLAT:
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
def piece_at(index, grid):
    """Return the tile of a program's piece `index`, and its iterations of K: from, to.

    Parts of one tile lie `rest` programs apart: programs next to each other read the same range of K of tiles
    next to each other, which then come from the L2 cache.
    """
    start = index * 0
    end = grid.iterations
    if grid.tail is not None:
        tail = grid.tail
        rest = gl.maximum(tail.rest, 1)
        part = gl.program_id(0) // rest
        own = gl.program_id(0) + index * gl.num_programs(0)
        is_part = own >= tail.whole
        index = gl.where(is_part, tail.whole + gl.program_id(0) % rest, own)
        start = gl.where(is_part, part * grid.iterations // tail.split, 0)
        end = gl.where(is_part, (part + 1) * grid.iterations // tail.split, grid.iterations)
    return index, start, end


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


# --- Synchronisation of the CTAs of a pair. ---
#
# The first CTA copies tiles of b to both, so it waits until a stage is empty in both. In triton 3.7 Gluon's
# `mbarrier.arrive` reaches only barriers of its own CTA, and Gluon has no shared-memory addresses, so these
# barriers lie outside Triton's shared memory, and PTX handles them. `barrier.cluster` waits for all threads
# of a CTA, those of other partitions included.
# Source: PTX ISA, `mapa`, `mbarrier` and `barrier.cluster`.

# Clusters are made from 3.7 on: 3.6 looks this name up and does not call it.
allocate_mbarrier = getattr(mbarrier, "allocate_mbarrier", None)
# Makes initialised barriers visible to the other CTA and TMA once both CTAs have synced; not in 3.9.
fence_init_release_cluster = getattr(mbarrier, "fence_init_release_cluster", None)


@gluon.jit
def asm(text: gl.constexpr, constraints: gl.constexpr, args):
    """Return the int32 that PTX with side effects returns: each thread executes it."""
    return gl.inline_asm_elementwise(text, constraints, args, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rank_in_pair():
    """Return 0 in the cluster's first CTA, which copies what both read, and 1 in its second."""
    return asm("mov.u32 $0, %cluster_ctarank;", "=r", [])


@gluon.jit
def reserve_barriers():
    """Return the address of 1 KB of shared memory for barriers; Triton's own begins behind, on 1 KB too."""
    return asm("{ .shared .align 1024 .b8 stages[1024]; mov.u32 $0, stages; }", "=r", [])


@gluon.jit
def init_barriers(barriers, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Have each of STAGES barriers wait for WARPS of this CTA, and the first CTA's for both's."""
    expected = WARPS * (2 - rank_in_pair())
    for stage in gl.static_range(STAGES):
        asm(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first mbarrier.init.shared::cta.b64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,r,r",
            [barriers + 8 * stage, expected],
        )


@gluon.jit
def sync_pair():
    """Wait for all threads of the cluster; what they wrote before is visible after."""
    asm("barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.u32 $0, 0;", "=r", [])


@gluon.jit
def addressed(barriers):
    """Return where this thread is to `arrive`: its CTA's barriers, the first CTA's, or, for most, 0.

    Of each warp the first thread arrives in its own CTA, and the second thread in the first CTA if
    that is the other one.
    """
    return asm(
        """{
        .reg .pred own, other;
        .reg .b32 lane, rank;
        mov.u32 lane, %laneid;
        mov.u32 rank, %cluster_ctarank;
        mov.u32 $0, 0;
        setp.eq.u32 own, lane, 0;
        setp.eq.u32 other, lane, 1;
        setp.ne.and.u32 other, rank, 0, other;
        @own mapa.shared::cluster.u32 $0, $1, rank;
        @other mapa.shared::cluster.u32 $0, $1, 0;
        }""",
        "=&r,r",
        [barriers],
    )


@gluon.jit
def arrive_at(places, stage):
    """Say that this warp has read `stage`: to the threads' `places`, which `addressed` returned.

    Tensor cores are done with reading, and nothing was written: no fence is needed, which would wait for all
    of the warp's stores.
    """
    asm(
        """{
        .reg .pred told;
        .reg .b32 at;
        setp.ne.u32 told, $1, 0;
        mad.lo.u32 at, $2, 8, $1;
        @told mbarrier.arrive.shared::cluster.b64 _, [at];
        mov.u32 $0, 0;
        }""",
        "=r,r,r",
        [places, stage],
    )


@gluon.jit
def wait_at(barriers, stage, phase):
    """Wait until all that read this CTA's copies to `stage` have arrived."""
    asm(
        """{
        .reg .pred done;
        .reg .b32 at;
        mad.lo.u32 at, $2, 8, $1;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [at], $3;
        @!done bra.uni again;
        mov.u32 $0, 0;
        }""",
        "=r,r,r,r",
        [barriers, stage, phase],
    )


# --- Shared memory. ---


@gluon.constexpr_function
def of_pair(ctas, dims, split):
    """Return what a layout takes for a pair: the second CTA has the second half of dimension `split`.

    None: both hold all of it.
    """
    return {"cga_layout": [[int(dim == split) for dim in range(dims)]]} if ctas == 2 else {}


@gluon.constexpr_function
def shared_layout(shape, dtype, ctas, split):
    return gl.NVMMASharedLayout.get_default_for(shape, dtype, **of_pair(ctas, len(shape), split))


@gluon.jit
def allocate_tiles(
    dtype, COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, ROW: gl.constexpr,
    CTAS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Allocate COUNT tiles of a batch of two dimensions; not ROW: they hold the transpose.

    SPLIT: each CTA of a pair has half of the rows, else both have all.
    """
    if ROW:
        shape: gl.constexpr = [1, 1, ROWS, COLUMNS]
        layout: gl.constexpr = shared_layout(shape, dtype, CTAS, 2 if SPLIT else None)
    else:
        shape: gl.constexpr = [1, 1, COLUMNS, ROWS]
        layout: gl.constexpr = shared_layout(shape, dtype, CTAS, 3 if SPLIT else None)
    return gl.allocate_shared_memory(dtype, [COUNT] + shape, layout)


@gluon.jit
def barriers(meta: gl.constexpr):
    """Allocate the barriers of full and of empty stages, and say what they wait for."""
    if meta.CTAS == 2:
        full = allocate_mbarrier(batch=meta.STAGES)
        for i in gl.static_range(meta.STAGES):
            mbarrier.init(full.index(i), count=1)
        empty = reserve_barriers()
        init_barriers(empty, meta.STAGES, 4 * meta.CONSUMERS)
        fence_init_release_cluster()
    else:
        full = gl.allocate_shared_memory(gl.int64, [meta.STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [meta.STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(meta.STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=meta.CONSUMERS)
    return full, empty


@gluon.jit
def allocate(a_dtype, b_dtype, out_dtype, meta: gl.constexpr):
    """Allocate the stages and their barriers, and the tiles through which consumers store."""
    ROWS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS * meta.CTAS
    REST: gl.constexpr = meta.BLOCK_N - meta.MAIN_N
    PART: gl.constexpr = meta.MAIN_N // meta.SUBTILES
    COUNT: gl.constexpr = meta.STAGES * meta.CONSUMERS
    CTAS: gl.constexpr = meta.CTAS
    a = allocate_tiles(a_dtype, COUNT, ROWS, meta.BLOCK_K, meta.A_ROW, CTAS, True)
    b = allocate_tiles(b_dtype, meta.STAGES, meta.BLOCK_K, meta.MAIN_N, meta.B_ROW, CTAS, False)
    out = allocate_tiles(out_dtype, meta.CONSUMERS, ROWS, PART, True, CTAS, True)
    b_rest = b
    out_rest = out
    if REST:
        b_rest = allocate_tiles(b_dtype, meta.STAGES, meta.BLOCK_K, REST, meta.B_ROW, CTAS, False)
        out_rest = allocate_tiles(out_dtype, meta.CONSUMERS, ROWS, REST, True, CTAS, True)
    full, empty = barriers(meta)
    return Stages(a, b, b_rest, full, empty), out, out_rest


@gluon.constexpr_function
def matrix_layout(tile):
    """Return the layout of a (1, 1, rows, columns) tile in shared memory, as (rows, columns)."""
    basis = [each[2:] for each in getattr(tile.layout, "cga_layout", None) or []]
    more = {"cga_layout": basis} if basis else {}
    return gl.NVMMASharedLayout.get_default_for([tile.shape[2], tile.shape[3]], tile.dtype, **more)


@gluon.jit
def matrix_view(tile):
    """View a (1, 1, rows, columns) tile in shared memory as (rows, columns)."""
    shape: gl.constexpr = [tile.shape[2], tile.shape[3]]
    layout: gl.constexpr = matrix_layout(tile)
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


@gluon.jit
def wait_empty(stages, stage, phase, meta: gl.constexpr):
    """Wait until all that read this CTA's copies to `stage` have done so."""
    if meta.CTAS == 2:
        wait_at(stages.empty, stage, phase)
    else:
        mbarrier.wait(stages.empty.index(stage), phase)


@gluon.jit
def release(stages, stage, meta: gl.constexpr):
    """Say that this consumer has read `stage`. In a pair `stages` is as `met` returns it."""
    if meta.CTAS == 2:
        arrive_at(stages.empty, stage)
    else:
        mbarrier.arrive(stages.empty.index(stage), count=1)


@gluon.jit
def met(stages, meta: gl.constexpr):
    """Return `stages` as a consumer uses them.

    In a pair wait for both CTAs' barriers; `empty` is then where the consumer's threads release stages.
    """
    if meta.CTAS == 2:
        sync_pair()
        places = addressed(stages.empty)
        stages = Stages(stages.a, stages.b, stages.b_rest, stages.full, places)
    return stages


# --- The producer. ---


@gluon.jit
def fetch(
    desc, outer, inner, row, column, ROW: gl.constexpr, TO_BOTH: gl.constexpr, barrier, tile,
):  # fmt: skip
    """Start copying the tile at (row, column) to shared memory; not ROW: `desc` sees the transpose.

    TO_BOTH: the first CTA of a pair copies it to both.
    """
    at = [outer, inner, row, column] if ROW else [outer, inner, column, row]
    if TO_BOTH:
        tma.async_copy_global_to_shared(desc, at, barrier, tile, multicast=True)
    else:
        tma.async_copy_global_to_shared(desc, at, barrier, tile)


@gluon.jit
def produce(operands, stages, grid, meta: gl.constexpr):
    """Keep the stages of shared memory filled with tiles of a and b, in the order they are consumed."""
    ROWS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS
    SIZE: gl.constexpr = stages.a.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = (meta.BLOCK_M + meta.BLOCK_N) * meta.BLOCK_K * SIZE
    TO_BOTH: gl.constexpr = meta.CTAS == 2
    stage = 0
    phase = 1  # of a wait that a new barrier passes: all stages are empty
    if meta.CTAS == 2:
        sync_pair()
    if meta.WAIT:
        gdc_wait()
    first, end, step = tiles_of(grid, meta)
    for piece in range(first, end, step):
        index, start, stop = piece_at(piece, grid)
        outer, inner, row, column = tile_at(index, grid, meta)
        m = row * (meta.BLOCK_M * meta.CTAS)
        n = column * meta.BLOCK_N
        for iteration in range(start, stop):
            k = iteration * meta.BLOCK_K
            full = stages.full.index(stage)
            wait_empty(stages, stage, phase, meta)
            mbarrier.expect(full, BYTES)
            for i in gl.static_range(meta.CONSUMERS):
                tile = stages.a.index(stage * meta.CONSUMERS + i)
                at_m = m + i * (ROWS * meta.CTAS)
                fetch(operands.a, outer, inner, at_m, k, meta.A_ROW, False, full, tile)
            fetch(operands.b, outer, inner, k, n, meta.B_ROW, TO_BOTH, full, stages.b.index(stage))
            if meta.MAIN_N < meta.BLOCK_N:
                tile = stages.b_rest.index(stage)
                at_n = n + meta.MAIN_N
                fetch(operands.b_rest, outer, inner, k, at_n, meta.B_ROW, TO_BOTH, full, tile)
            stage, phase = next_stage(stage, phase, meta)
    if meta.WAIT:
        gdc_launch_dependents()
    if meta.CTAS == 2:
        for _ in range(meta.STAGES):  # the other CTA's warps arrive here: its barriers must not go before
            wait_empty(stages, stage, phase, meta)
            stage, phase = next_stage(stage, phase, meta)


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
            release(stages, last, meta)
        last = stage
        stage, phase = next_stage(stage, phase, meta)
    if meta.MAIN_N < meta.BLOCK_N:
        acc, rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, rest))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    release(stages, last, meta)
    return acc, rest, stage, phase


@gluon.constexpr_function
def sums_layout(columns, bits, ctas):
    """Return the layout of sums of so many columns, of operands of so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits], **of_pair(ctas, 2, 0))


@gluon.jit
def zeros(stages, meta: gl.constexpr):
    """Return zeros: a consumer's sums of MAIN_N columns, and those of the rest."""
    BITS: gl.constexpr = stages.a.dtype.primitive_bitwidth
    ROWS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS * meta.CTAS
    REST: gl.constexpr = meta.BLOCK_N - meta.MAIN_N if meta.MAIN_N < meta.BLOCK_N else 16
    acc = gl.zeros((ROWS, meta.MAIN_N), gl.float32, sums_layout(meta.MAIN_N, BITS, meta.CTAS))
    rest = gl.zeros((ROWS, REST), gl.float32, sums_layout(REST, BITS, meta.CTAS))
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
def by_rows(columns, ctas):
    """Return the layout of rows in which a warp reads up to 32 columns at once."""
    wide = min(columns, 32)
    return gl.BlockedLayout([1, 1], [32 // wide, wide], [4, 1], [1, 0], **of_pair(ctas, 2, 0))


@gluon.jit
def fused(sums, rows, columns, outer, inner, result, meta: gl.constexpr):
    """Return the sums of these rows and columns with the epilogue applied."""
    if meta.EPILOGUE is not None:
        sums = finished(
            sums, rows, columns, result.M, result.N, (outer, inner), (1, 1), result.extra, meta.EPILOGUE
        )
    return sums


@gluon.jit
def store_masked(part, rows, columns, outer, inner, result):
    """Store by pointers what of these rows and columns is inside the result."""
    matrix = outer.to(gl.int64) * result.stride_o + inner.to(gl.int64) * result.stride_i
    by_row = rows[:, None].to(gl.int64) * result.stride_m
    offsets = by_row + columns[None, :].to(gl.int64) * result.stride_n
    inside = (rows[:, None] < result.M) & (columns[None, :] < result.N)
    gl.store(result.ptr + matrix + offsets, part.to(result.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_part(desc, tile, part, outer, inner, m, n, result, meta: gl.constexpr):
    """Store the sums of a part of a tile through shared memory, once the store before has let go of it.

    By pointers, masked, where no descriptor can: TMA cuts a store off at 16 bytes, not at the element.
    """
    rows = m + gl.arange(0, part.shape[0], gl.SliceLayout(1, part.type.layout))
    columns = n + gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout))
    part = fused(part, rows, columns, outer, inner, result, meta).to(result.ptr.dtype.element_ty)
    if meta.BY_DESCRIPTOR:
        tma.store_wait(0)
        matrix_view(tile).store(part)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [outer, inner, m, n], tile)
    else:
        layout: gl.constexpr = by_rows(part.shape[1], meta.CTAS)
        matrix_view(tile).store(part)
        part = matrix_view(tile).load(layout)
        rows = m + gl.arange(0, part.shape[0], gl.SliceLayout(1, layout))
        columns = n + gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
        store_masked(part, rows, columns, outer, inner, result)


@gluon.jit
def store_tile(WHICH: gl.constexpr, acc, rest, outer, inner, m, n, result, meta: gl.constexpr):
    """Store what a consumer made of a tile, in SUBTILES parts."""
    HALF: gl.constexpr = meta.MAIN_N // 2
    tile = result.tile.index(WHICH)
    if meta.SUBTILES == 2:
        left, right = acc.reshape((acc.shape[0], 2, HALF)).permute((0, 2, 1)).split()
        store_part(result.desc, tile, left, outer, inner, m, n, result, meta)
        store_part(result.desc, tile, right, outer, inner, m, n + HALF, result, meta)
    else:
        store_part(result.desc, tile, acc, outer, inner, m, n, result, meta)
    if meta.MAIN_N < meta.BLOCK_N:
        tile = result.rest_tile.index(WHICH)
        store_part(result.rest_desc, tile, rest, outer, inner, m, n + meta.MAIN_N, result, meta)


# --- Tiles whose K is split: every program leaves its part, then sums some rows of the tile. ---


@gluon.jit
def place_of(program, rows, columns, WHICH: gl.constexpr, tail, meta: gl.constexpr):
    """Return where these rows and columns of a consumer's part lie among the parts.

    In squares of 8 rows and columns, as a warp holds them at once, so that its stores are whole lines.
    """
    ROWS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS
    start = tail.parts + (program * meta.CONSUMERS + WHICH) * (ROWS * meta.BLOCK_N)
    by_row = rows // 8 * (8 * meta.BLOCK_N) + rows % 8 * 8
    by_column = columns // 8 * 64 + columns % 8
    return start + by_row[:, None] + by_column[None, :]


@gluon.jit
def leave(part, first, WHICH: gl.constexpr, tail, meta: gl.constexpr):
    """Leave `part`, a consumer's columns from `first` on, where the tile's other programs find it."""
    rows = gl.arange(0, part.shape[0], gl.SliceLayout(1, part.type.layout))
    columns = first + gl.arange(0, part.shape[1], gl.SliceLayout(0, part.type.layout))
    place = place_of(gl.program_id(0), rows, columns, WHICH, tail, meta)
    gl.store(place, part, cache_modifier=".cg")


@gluon.jit
def share_of(index, WHICH: gl.constexpr, tail, meta: gl.constexpr):
    """Return the first group of 8 rows of tile `index` that this program is to sum, and the step to the next.

    This program's part was left. None needs another to be running: a program that has looked POLLS times
    whether all parts are there says that it gives up, and sums nothing; then the last to arrive sums all
    groups, and no other program any. A tile's counter holds, below bit 16, programs that gave up; from bit 16
    on, arrivals; and from bit 24 on, a number that a launch moves on by 1, or by 2 if any gave up.
    """
    tma.barrier()  # every thread of this warpgroup has written before one of them says so
    counter = tail.counters + (index - tail.whole) * meta.CONSUMERS + WHICH
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
            first = first + meta.BLOCK_M
    return first, step


@gluon.jit
def store_sums(
    mine, step, index, start, COLUMNS: gl.constexpr, outer, inner, m, n,
    WHICH: gl.constexpr, result, tail, meta: gl.constexpr,
):  # fmt: skip
    """Store a program's groups of rows, of a consumer's COLUMNS columns from `start` on: sums of all parts.

    Parts are summed in the order of K, several under way at a time. (m, n): where the consumer's rows begin.
    """
    GROUPS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS // 8
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
                place = place_of(program, own, start + columns, WHICH, tail, meta)
                there = all_of_group & (after + i < tail.split)
                sums += gl.load(place, mask=there, other=0.0, cache_modifier=".cg")
        in_columns = n + start + columns
        sums = fused(sums, m + own, in_columns, outer, inner, result, meta)
        store_masked(sums, m + own, in_columns, outer, inner, result)


@gluon.jit
def meet(WHICH: gl.constexpr, acc, rest, index, outer, inner, m, n, result, tail, meta: gl.constexpr):
    """Leave this program's part of tile `index`, and store its share of the tile's rows."""
    REST: gl.constexpr = meta.BLOCK_N - meta.MAIN_N
    leave(acc, 0, WHICH, tail, meta)
    if REST:
        leave(rest, meta.MAIN_N, WHICH, tail, meta)
    mine, step = share_of(index, WHICH, tail, meta)
    store_sums(mine, step, index, 0, meta.MAIN_N, outer, inner, m, n, WHICH, result, tail, meta)
    if REST:
        store_sums(mine, step, index, meta.MAIN_N, REST, outer, inner, m, n, WHICH, result, tail, meta)


@gluon.jit
def consume(WHICH: gl.constexpr, stages, grid, result, meta: gl.constexpr):
    """Multiply the rows of each tile that are consumer WHICH's, and store them."""
    stage = 0
    phase = 0
    stages = met(stages, meta)
    first, end, step = tiles_of(grid, meta)
    for piece in range(first, end, step):
        index, start, stop = piece_at(piece, grid)
        outer, inner, row, column = tile_at(index, grid, meta)
        acc, rest = zeros(stages, meta)
        if meta.PROMOTE:
            acc, rest, stage, phase = promoted(WHICH, acc, rest, stage, phase, stages, grid, meta)
        else:
            acc, rest, stage, phase = multiply(WHICH, acc, rest, start, stop, stage, phase, stages, meta)
        ROWS: gl.constexpr = meta.BLOCK_M // meta.CONSUMERS * meta.CTAS
        m = row * (meta.BLOCK_M * meta.CTAS) + WHICH * ROWS
        n = column * meta.BLOCK_N
        if grid.tail is None or index < grid.tail.whole:
            store_tile(WHICH, acc, rest, outer, inner, m, n, result, meta)
        else:
            meet(WHICH, acc, rest, index, outer, inner, m, n, result, grid.tail, meta)
    tma.store_wait(0)


@gluon.jit
def idle():
    """Take part in the pair's barrier, which counts warps that do nothing: they fill a warpgroup."""
    sync_pair()


@gluon.jit
def run(WHICH: gl.constexpr, operands, stages, grid, result, meta: gl.constexpr):
    """Be consumer WHICH, or after the last one the producer."""
    if WHICH < meta.CONSUMERS:
        consume(WHICH, stages, grid, result, meta)
    else:
        produce(operands, stages, grid, meta)


@gluon.jit(do_not_specialize=("M", "K", "whole", "rest", "split"))
def matmul_warpgroups(
    a_desc, b_desc, b_rest_desc, out_desc, out_rest_desc, out_ptr, parts_ptr, counters_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra, flag_ptr,
    whole, rest, split,
    A_ROW: gl.constexpr, B_ROW: gl.constexpr, BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr,
    MAIN_N: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    BATCHED: gl.constexpr, EPILOGUE: gl.constexpr, PROMOTE: gl.constexpr, IN_PARTS: gl.constexpr,
    FLAGS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, PERSISTENT: gl.constexpr, SUBTILES: gl.constexpr,
    SPLIT_TAIL: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """Make out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    CONSUMERS warpgroups of REGISTERS registers a thread share a tile, each with BLOCK_M / CONSUMERS of its
    rows. Where BLOCK_N is no power of two its columns are MAIN_N and the rest, with descriptors of their own.

    PERSISTENT: the grid has fewer programs than there are tiles. SUBTILES: the parts in which a tile's
    columns pass through shared memory to be stored. WAIT: launched before the kernel ahead of it is done,
    so wait for that one before touching memory. FLAT: the grid has an axis each for rows and columns of
    tiles, and one for matrices. BATCHED: there are several of these.
    EPILOGUE, `extra`: what is done to the sums, and with what (see `finished`).
    CTAS: 1, or 2: the two of a cluster make tiles one below the other, and share tiles of b, which the first
    copies to both. GROUP_M then counts rows of pairs.
    PROMOTE: 0, or after how many K iterations sums go from tensor cores to a total in fp32; IN_PARTS: in the
    last third of K.
    SPLIT_TAIL: the first `whole` tiles are made whole, each of the `rest` others in `split` parts of K, which
    are left at `parts_ptr` and meet by `counters_ptr` (see `Tail`). Else these are None.
    `flag_ptr`, FLAGS: None, or the fallback flag and what it says where there is something to do (see
    `is_enabled`).
    """
    meta: gl.constexpr = Meta(
        A_ROW, B_ROW, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, BLOCK_K, MAIN_N, GROUP_M, STAGES, CONSUMERS,
        SUBTILES, FLAT, BATCHED, EPILOGUE, FLAGS, PROMOTE, IN_PARTS, CTAS,
    )  # fmt: skip
    operands = Operands(a_desc, b_desc, b_rest_desc)
    stages, tile, rest_tile = allocate(a_desc.dtype, b_desc.dtype, out_ptr.dtype.element_ty, meta)
    result = Result(
        out_desc, out_rest_desc, out_ptr, tile, rest_tile,
        M, N, stride_oo, stride_oi, stride_om, stride_on, extra,
    )  # fmt: skip
    tiles_m = gl.cdiv(M, BLOCK_M * CTAS)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n * batch
    tail = None
    if SPLIT_TAIL:
        tail = Tail(parts_ptr, counters_ptr, whole, rest, split)
    grid = Grid(tiles_m, tiles_n, inner_batch, tiles, gl.cdiv(K, BLOCK_K), flag_ptr, tail)
    IDLE: gl.constexpr = 2 if CTAS == 2 else 0
    # Finding its parts takes a producer more registers: with 24 it would spill.
    PRODUCER: gl.constexpr = 24 if not SPLIT_TAIL else 40 if CONSUMERS < 3 else 32
    # The kernel's own warps are the first consumer; the last of these is the producer, a single warp.
    gl.warp_specialize(
        [
            (run, (0, operands, stages, grid, result, meta)),
            (run, (1, operands, stages, grid, result, meta)),
            (run, (2, operands, stages, grid, result, meta)),
            (run, (3, operands, stages, grid, result, meta)),
        ][: CONSUMERS + 1]
        + [(idle, ()), (idle, ())][:IDLE],
        [4, 4][: CONSUMERS - 1] + [1] + [1, 2][:IDLE],
        [REGISTERS, REGISTERS][: CONSUMERS - 1] + [PRODUCER] + [24, 24][:IDLE],
    )
