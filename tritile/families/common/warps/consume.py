"""Make whole tiles as a consumer, and start all warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from tritile.families.common.tiles import carried_sum
from tritile.families.common.warps import tma
from tritile.families.common.warps.order import corner_of, tile_at, tiles_of
from tritile.families.common.warps.pipeline import multiply, produce
from tritile.families.common.warps.store import store_tile


@gluon.constexpr_function
def sums_layout(columns, bits):
    """Return the layout of sums of so many columns, of operands of so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.jit
def no_sums(shared, how: gl.constexpr):
    """Return zeros: a consumer's sums of MAIN_N columns, and those of the rest."""
    BITS: gl.constexpr = shared.a.dtype.primitive_bitwidth
    ROWS: gl.constexpr = how.BLOCK_M // how.CONSUMERS
    REST: gl.constexpr = how.BLOCK_N - how.MAIN_N if how.MAIN_N < how.BLOCK_N else 16
    acc = gl.zeros((ROWS, how.MAIN_N), gl.float32, sums_layout(how.MAIN_N, BITS))
    rest = gl.zeros((ROWS, REST), gl.float32, sums_layout(REST, BITS))
    return acc, rest


@gluon.jit
def block_scales(like, m, n, block, result, how: gl.constexpr):
    """Return by what rows and columns of sums at (m, n) are multiplied in block `block` of K.

    See `block_scale`. Where all columns of a tile share a scale, it goes to the rows.
    """
    OF_A: gl.constexpr = how.SCALE_BLOCKS[0]
    OF_B: gl.constexpr = how.SCALE_BLOCKS[1]
    scales = result.scales
    rows = m + gl.arange(0, like.shape[0], gl.SliceLayout(1, like.type.layout))
    columns = n + gl.arange(0, like.shape[1], gl.SliceLayout(0, like.type.layout))
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
    """Return acc plus sums, each block of K multiplied by its scales."""
    if how.SCALE_BLOCKS is None:
        acc += sums
    elif how.SCALE_BLOCKS[1] % how.BLOCK_N == 0:
        acc += sums * of_rows[:, None]
    else:
        acc += sums * (of_rows[:, None] * of_columns[None, :])
    return acc


@gluon.jit
def promoted(
    WHICH: gl.constexpr, acc, rest, row, column, stage, phase, result, shared, walk, how: gl.constexpr
):
    """Return acc and rest plus the products of all K, and the next stage.

    Sums go from tensor cores to these totals every PROMOTE iterations; IN_PARTS: in the last third of K, with
    what rounding loses carried on (see `carried_sum`).
    """
    REST: gl.constexpr = how.MAIN_N < how.BLOCK_N
    m, n = corner_of(WHICH, row, column, how)
    lost, rest_lost = no_sums(shared, how)  # by rounding, of the total: the next sum starts from it
    small = walk.iterations * 0
    if how.IN_PARTS:
        small = gl.maximum((walk.iterations * 2 - 2) // 3, 1)
        acc, rest, stage, phase = multiply(WHICH, acc, rest, 0, small, stage, phase, shared, how)
    for first in range(small, walk.iterations, how.PROMOTE):
        after = gl.minimum(first + how.PROMOTE, walk.iterations)
        of_rows = m
        of_columns = n
        rest_rows = m
        rest_columns = n
        if how.SCALE_BLOCKS is not None:
            block = first // how.PROMOTE
            of_rows, of_columns = block_scales(acc, m, n, block, result, how)
            if REST:
                rest_rows, rest_columns = block_scales(rest, m, n + how.MAIN_N, block, result, how)
        sums, rest_sums, stage, phase = multiply(
            WHICH, lost, rest_lost, first, after, stage, phase, shared, how
        )
        if how.IN_PARTS:
            acc, lost = carried_sum(acc, sums)
            if REST:
                rest, rest_lost = carried_sum(rest, rest_sums)
        else:
            acc = added(acc, sums, of_rows, of_columns, how)
            if REST:
                rest = added(rest, rest_sums, rest_rows, rest_columns, how)
    return acc, rest, stage, phase


@gluon.jit
def consume(WHICH: gl.constexpr, result, shared, walk, how: gl.constexpr):
    """Multiply the rows of each tile that are consumer WHICH's, and store them."""
    stage = 0
    phase = 0
    if how.SCALE_BLOCKS is not None and how.WAIT:
        gdc_wait()  # scales are read ahead of the first tile; all else comes after tiles, which wait
    first, last, step = tiles_of(walk, how)
    for index in range(first, last, step):
        outer, inner, row, column = tile_at(index, walk, how)
        acc, rest = no_sums(shared, how)
        if how.PROMOTE:
            acc, rest, stage, phase = promoted(
                WHICH, acc, rest, row, column, stage, phase, result, shared, walk, how
            )
        else:
            acc, rest, stage, phase = multiply(
                WHICH, acc, rest, 0, walk.iterations, stage, phase, shared, how
            )
        m, n = corner_of(WHICH, row, column, how)
        store_tile(WHICH, acc, rest, outer, inner, m, n, result, how)
    tma.store_wait(0)


@gluon.jit
def role(WHICH: gl.constexpr, consumer: gl.constexpr, operands, result, shared, walk, how: gl.constexpr):
    """Be consumer WHICH, or after the last one the producer."""
    if WHICH < how.CONSUMERS:
        consumer(WHICH, result, shared, walk, how)
    else:
        produce(operands, shared, walk, how)


@gluon.jit
def start_warps(
    consumer: gl.constexpr, operands, result, shared, walk, REGISTERS: gl.constexpr, how: gl.constexpr
):
    """Start CONSUMERS warpgroups of `consumer`, and a warp of `produce`.

    The kernel's own warps are the first consumer, and the threads of others get REGISTERS registers.
    """
    gl.warp_specialize(
        [
            (role, (0, consumer, operands, result, shared, walk, how)),
            (role, (1, consumer, operands, result, shared, walk, how)),
            (role, (2, consumer, operands, result, shared, walk, how)),
            (role, (3, consumer, operands, result, shared, walk, how)),
        ][: how.CONSUMERS + 1],
        [4, 4][: how.CONSUMERS - 1] + [1],
        [REGISTERS, REGISTERS][: how.CONSUMERS - 1] + [24],
    )
