"""Multiply fp8 matrices with scales for each block of K, by specialised warps on Hopper.

A consumer's rows and columns are cut into pieces of 64 rows by PIECE columns. Tensor cores sum a block of K
of one piece; the piece's total adds these sums, times the block's scales, in fp32. One piece is summed while
another is scaled: of another consumer, or, AHEAD, of the same one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from tritile.families.common.warps import tma
from tritile.families.common.warps.consume import start_warps
from tritile.families.common.warps.facts import How, Operands, Result
from tritile.families.common.warps.order import Walk, corner_of, counts_of, tile_at, tiles_of
from tritile.families.common.warps.pipeline import flat, following, operand, shared_of
from tritile.families.common.warps.store import converted, store_part


@gluon.jit
def sums_of(WHICH: gl.constexpr, piece: gl.constexpr, spent, stage, shared, how: gl.constexpr):
    """Start to sum a block of K of a consumer's piece, from zero, in the registers of sums that are spent."""
    HIGH: gl.constexpr = how.BLOCK_M // 64
    WIDE: gl.constexpr = how.BLOCK_N // how.COLUMNS
    first: gl.constexpr = WHICH * (HIGH // how.CONSUMERS) + piece // WIDE
    a = operand(shared.a.index(stage * HIGH + first), True)
    b = operand(shared.b.index(stage * WIDE + piece % WIDE), False)
    return warpgroup_mma(a, b, spent, use_acc=False, is_async=True)


@gluon.jit
def row_scales(m, block, result, how: gl.constexpr):
    """Return the scales of a of the consumer's rows, 64 at a time, in a block of K."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.COLUMNS, 32])
    scales = result.scales
    found = ()
    for i in gl.static_range(how.BLOCK_M // how.CONSUMERS // 64):
        rows = m + i * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        ptrs = scales[0] + rows // how.SCALE_BLOCKS[0] * scales[1] + block.to(gl.int64) * scales[2]
        found = found + (gl.load(ptrs, mask=rows < result.M, other=0.0),)
    return found


@gluon.jit
def column_scales(n, block, result, how: gl.constexpr):
    """Return the scales of b in a block of K, of PIECE columns each, where these share one; else nothing."""
    OF_B: gl.constexpr = how.SCALE_BLOCKS[1]
    scales = result.scales
    found = ()
    if OF_B % how.COLUMNS == 0:
        for i in gl.static_range(how.BLOCK_N // how.COLUMNS):
            column = n + i * how.COLUMNS
            ptr = scales[3] + column // OF_B * scales[5] + block.to(gl.int64) * scales[4]
            found = found + (gl.load(ptr, mask=column < result.N, other=0.0),)
    return found


@gluon.jit
def own_scales(piece: gl.constexpr, n, block, result, how: gl.constexpr):
    """Return the scales of b of a piece's columns in a block of K, if these have one each; else anything."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.COLUMNS, 32])
    OF_B: gl.constexpr = how.SCALE_BLOCKS[1]
    scales = result.scales
    columns = n + piece % (how.BLOCK_N // how.COLUMNS) * how.COLUMNS
    columns += gl.arange(0, how.COLUMNS, gl.SliceLayout(0, layout))
    found = columns
    if OF_B % how.COLUMNS != 0:
        ptrs = scales[3] + columns // OF_B * scales[5] + block.to(gl.int64) * scales[4]
        found = gl.load(ptrs, mask=columns < result.N, other=0.0)
    return found


@gluon.jit
def summed(pending: gl.constexpr, sums, own, how: gl.constexpr):
    """Return sums, and scales of their columns, once no more than `pending` later sums are under way."""
    if how.SCALE_BLOCKS[1] % how.COLUMNS == 0:
        sums = warpgroup_mma_wait(num_outstanding=pending, deps=(sums,))
    else:
        sums, own = warpgroup_mma_wait(num_outstanding=pending, deps=(sums, own))
    return sums, own


@gluon.jit
def added(totals, piece: gl.constexpr, sums, of_a, of_b, own, how: gl.constexpr):
    """Return the totals of all pieces, of which one gets `sums` of a block of K, times the block's scales.

    In assembly that keeps its place: a compiler that adds later needs registers for more sums at a time.
    """
    WIDE: gl.constexpr = how.BLOCK_N // how.COLUMNS
    if how.SCALE_BLOCKS[1] % how.COLUMNS == 0:
        scale = (of_a[piece // WIDE] * of_b[piece % WIDE])[:, None]
    else:
        scale = of_a[piece // WIDE][:, None] * own[None, :]
    total = gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [sums, scale, totals[piece]], gl.float32, False, 1
    )
    return totals[:piece] + (total,) + totals[piece + 1 :]


@gluon.jit
def blocks_of(
    BLOCKS: gl.constexpr, WHICH: gl.constexpr, totals, one, other, of_a, of_b, m, n, block, stage, phase,
    result, shared, blocks, how: gl.constexpr,
):  # fmt: skip
    """Add BLOCKS blocks of K to totals. `one` and, AHEAD, `other`: registers for the sums of a piece."""
    PIECES: gl.constexpr = (how.BLOCK_M // how.CONSUMERS // 64) * (how.BLOCK_N // how.COLUMNS)
    mbarrier.wait(shared.full.index(stage), phase)
    one = sums_of(WHICH, 0, one, stage, shared, how)
    own = own_scales(0, n, block, result, how)
    for i in gl.static_range(BLOCKS):
        after = gl.minimum(block + i + 1, blocks - 1)
        next_a = row_scales(m, after, result, how)
        next_b = column_scales(n, after, result, how)
        for piece in gl.static_range(PIECES):
            done = stage
            next_own = own
            if piece == PIECES - 1:
                stage, phase = following(stage, phase, how)
            if how.AHEAD and (piece < PIECES - 1 or i < BLOCKS - 1):
                if piece == PIECES - 1:
                    mbarrier.wait(shared.full.index(stage), phase)
                other = sums_of(WHICH, (piece + 1) % PIECES, other, stage, shared, how)
                next_own = own_scales((piece + 1) % PIECES, n, block + i + (piece + 1) // PIECES, result, how)
                one, own = summed(1, one, own, how)
            else:
                one, own = summed(0, one, own, how)
            if piece == PIECES - 1:
                mbarrier.arrive(shared.empty.index(done), count=1)
            totals = added(totals, piece, one, of_a, of_b, own, how)
            if not how.AHEAD and piece < PIECES - 1:
                one = sums_of(WHICH, piece + 1, one, stage, shared, how)
                next_own = own_scales(piece + 1, n, block, result, how)
            elif how.AHEAD and (piece < PIECES - 1 or i < BLOCKS - 1 or BLOCKS * PIECES % 2 == 0):
                one, other = other, one
            own = next_own
        of_a = next_a
        of_b = next_b
    return totals, one, other, of_a, of_b, stage, phase


@gluon.jit
def opaque_zeros(like):
    """Return zeros that no compiler moves behind a product."""
    return gl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [gl.zeros_like(like)], gl.float32, False, 1)


@gluon.jit
def multiply(WHICH: gl.constexpr, m, n, stage, phase, result, shared, blocks, how: gl.constexpr):
    """Return the totals of the pieces of a tile that are consumer WHICH's; and the next stage."""
    PIECES: gl.constexpr = (how.BLOCK_M // how.CONSUMERS // 64) * (how.BLOCK_N // how.COLUMNS)
    BLOCKS: gl.constexpr = 2 if how.AHEAD and PIECES == 1 else 1  # AHEAD is within these
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, how.COLUMNS, 32])
    totals = ()
    for _ in gl.static_range(PIECES):
        totals = totals + (gl.zeros((64, how.COLUMNS), gl.float32, layout),)
    of_a = row_scales(m, blocks * 0, result, how)
    of_b = column_scales(n, blocks * 0, result, how)
    one = opaque_zeros(totals[0])
    other = m
    if how.AHEAD:
        other = opaque_zeros(totals[0])
    whole = blocks // BLOCKS * BLOCKS
    for block in range(0, whole, BLOCKS):
        totals, one, other, of_a, of_b, stage, phase = blocks_of(
            BLOCKS, WHICH, totals, one, other, of_a, of_b, m, n, block, stage, phase,
            result, shared, blocks, how,
        )  # fmt: skip
    if BLOCKS > 1:
        for block in range(whole, blocks):
            totals, one, other, of_a, of_b, stage, phase = blocks_of(
                1, WHICH, totals, one, other, of_a, of_b, m, n, block, stage, phase,
                result, shared, blocks, how,
            )  # fmt: skip
    return totals, stage, phase


@gluon.jit
def store_all(WHICH: gl.constexpr, totals, outer, inner, m, n, result, how: gl.constexpr):
    """Store all pieces of a consumer, each through room of its own in shared memory."""
    WIDE: gl.constexpr = how.BLOCK_N // how.COLUMNS
    PIECES: gl.constexpr = (how.BLOCK_M // how.CONSUMERS // 64) * WIDE
    if how.BY_DESCRIPTOR:
        tma.store_wait(0)
        for piece in gl.static_range(PIECES):
            row = m + piece // WIDE * 64
            column = n + piece % WIDE * how.COLUMNS
            part = converted(totals[piece], outer, inner, row, column, result, how)
            flat(result.tile.index(WHICH * PIECES + piece)).store(part)
        fence_async_shared()
        for piece in gl.static_range(PIECES):
            at = [outer, inner, m + piece // WIDE * 64, n + piece % WIDE * how.COLUMNS]
            tma.async_copy_shared_to_global(result.desc, at, result.tile.index(WHICH * PIECES + piece))
    else:
        for piece in gl.static_range(PIECES):
            row = m + piece // WIDE * 64
            column = n + piece % WIDE * how.COLUMNS
            tile = result.tile.index(WHICH * PIECES + piece)
            store_part(result.desc, tile, totals[piece], outer, inner, row, column, result, how)


@gluon.jit
def consume(WHICH: gl.constexpr, result, shared, walk, how: gl.constexpr):
    """Multiply the rows of each tile that are consumer WHICH's, and store them."""
    stage = 0
    phase = 0
    if how.WAIT:
        gdc_wait()  # scales are read ahead of the first tile
    first, last, step = tiles_of(walk, how)
    for index in range(first, last, step):
        outer, inner, row, column = tile_at(index, walk, how)
        m, n = corner_of(WHICH, row, column, how)
        totals, stage, phase = multiply(WHICH, m, n, stage, phase, result, shared, walk.iterations, how)
        store_all(WHICH, totals, outer, inner, m, n, result, how)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=("M", "K"))
def matmul_scaled(
    a_desc, b_desc, out_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, scales, extra, verdict_ptr,
    BY_DESCRIPTOR: gl.constexpr, WAIT: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr,
    FLAT: gl.constexpr, BATCHED: gl.constexpr, SCALE_BLOCKS: gl.constexpr, EPILOGUE: gl.constexpr,
    VERDICTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, CONSUMERS: gl.constexpr, PERSISTENT: gl.constexpr,
    PIECE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Make out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    BLOCK_K is what shares a scale. `scales`, SCALE_BLOCKS: see `block_scale`. PIECE, AHEAD: see above. The
    rest is as in `matmul_warpgroups`.
    """
    how: gl.constexpr = How(
        True, False, BY_DESCRIPTOR, WAIT, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_N, 64, PIECE,
        GROUP_M, STAGES, CONSUMERS, 1, FLAT, BATCHED, EPILOGUE, VERDICTS,
        SCALE_BLOCKS=SCALE_BLOCKS, AHEAD=AHEAD,
    )  # fmt: skip
    operands = Operands(a_desc, b_desc, None)
    shared, tile, rest_tile = shared_of(a_desc.dtype, b_desc.dtype, out_ptr.dtype.element_ty, how)
    result = Result(
        out_desc, None, out_ptr, tile, rest_tile,
        M, N, stride_oo, stride_oi, stride_om, stride_on, scales, extra,
    )  # fmt: skip
    tiles_m, tiles_n, iterations = counts_of(M, N, K, how)
    tiles = tiles_m * tiles_n * batch
    walk = Walk(tiles_m, tiles_n, inner_batch, tiles, iterations, verdict_ptr)
    start_warps(consume, operands, result, shared, walk, REGISTERS, how)
