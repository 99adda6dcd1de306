"""Multiply groups by tiles that travel by tensor descriptor (TMA), on GPUs from Hopper on."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.tiles import add_product, constant, grouped_tile
from tritile.families.grouped.groups import ends_of_groups, group_of_tile

FAR = constant(2**30)  # rows of a cut descriptor, whatever the matrix has


@triton.jit
def load_block(desc, group, row, column, ROW_MAJOR: tl.constexpr):
    """Return the tile at (row, column) of a group's matrix; not ROW_MAJOR: `desc` sees its transpose."""
    if ROW_MAJOR:
        tile = desc.load([group, row, column])
        tile = tile.reshape(tile.shape[1], tile.shape[2])
    else:
        tile = desc.load([group, column, row])
        tile = tile.reshape(tile.shape[1], tile.shape[2]).T
    return tile


@triton.jit
def store_masked(out_ptr, stride_og, stride_om, stride_on, group, m, n, row_end, N, part):
    """Store part of a tile through pointers, up to the last row and column."""
    rows = m + tl.arange(0, part.shape[0])
    columns = n + tl.arange(0, part.shape[1])
    out_ptr += group.to(tl.int64) * stride_og
    offsets = rows[:, None].to(tl.int64) * stride_om + columns[None, :].to(tl.int64) * stride_on
    tl.store(out_ptr + offsets, part, mask=(rows[:, None] < row_end) & (columns[None, :] < N))


@triton.jit
def store_rows(
    out_desc, out_ptr, stride_og, stride_om, stride_on, group, m, n, row_end, N, part,
    BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Store part of a tile, up to its group's last row.

    TMA clips at a descriptor's end, and a group may end at any row. So the descriptor has FAR rows, of which
    FAR - row_end + m is written, and two outer dimensions that, stepped FAR and row_end times, lead back from
    there to where row m lies. Source: Triton's own `tools.ragged_tma`.
    """
    part = part.to(out_ptr.dtype.element_ty)
    if not BY_DESCRIPTOR:
        store_masked(out_ptr, stride_og, stride_om, stride_on, group, m, n, row_end, N, part)
    else:
        part = part.reshape(1, 1, part.shape[0], part.shape[1])
        out_desc.store([FAR, row_end, FAR - row_end + m, n], part)


@triton.jit
def make_tile(
    a_desc, b_desc, out_desc, out_ptr, ends, tile_ends, index, M, N, K, stride_og, stride_om, stride_on,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):  # fmt: skip
    """Make tile `index` of all groups' and store it, in SUBTILES parts of its columns."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    group, first, row_start, row_end = group_of_tile(index, ends, tile_ends, M)
    row, column = grouped_tile(index - first, tl.cdiv(row_end - row_start, BLOCK_M), tiles_n, GROUP_M)
    m = row_start + row * BLOCK_M
    n = column * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(tl.cdiv(K, BLOCK_K)):  # past the end of K zeros are read
        a = load_block(a_desc, 0, m, block * BLOCK_K, A_ROW)
        b = load_block(b_desc, group, block * BLOCK_K, n, B_ROW)
        acc = add_product(acc, a, b, PRECISION, False)
    if SUBTILES == 2:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        store_rows(
            out_desc, out_ptr, stride_og, stride_om, stride_on, group, m, n, row_end, N, left, BY_DESCRIPTOR,
        )  # fmt: skip
        store_rows(
            out_desc, out_ptr, stride_og, stride_om, stride_on, group, m, n + HALF, row_end, N, right,
            BY_DESCRIPTOR,
        )  # fmt: skip
    else:
        store_rows(
            out_desc, out_ptr, stride_og, stride_om, stride_on, group, m, n, row_end, N, acc, BY_DESCRIPTOR,
        )  # fmt: skip


@triton.jit(do_not_specialize=("groups", "M"))
def grouped_matmul_descriptor(
    a_desc, b_desc, out_desc, out_ptr, offs_ptr,
    groups, M, N, K, stride_og, stride_om, stride_on,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_G: tl.constexpr, WAIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """Make the products of all groups, as `grouped_matmul_tile` does.

    Descriptors of a and b have three dimensions, the first of which counts groups: a has one. A tile of a may
    reach into rows of the next group: they make rows of the result that are not stored.
    PERSISTENT: a program makes tile after tile, so that one's epilogue runs beside the next one's loads.
    WAIT: launched before the kernel ahead of it is done, so wait for that one before touching memory.
    """
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    ends, tile_ends = ends_of_groups(offs_ptr, groups, M, tiles_n, BLOCK_M, BLOCK_G)
    tiles = tl.max(tile_ends, 0)
    if PERSISTENT:
        # Flattened, the K loops of all tiles become one.
        for index in tl.range(first, tiles, tl.num_programs(0), flatten=True):
            make_tile(
                a_desc, b_desc, out_desc, out_ptr, ends, tile_ends, index,
                M, N, K, stride_og, stride_om, stride_on, A_ROW, B_ROW, BY_DESCRIPTOR, PRECISION,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES,
            )  # fmt: skip
    elif first < tiles:
        make_tile(
            a_desc, b_desc, out_desc, out_ptr, ends, tile_ends, first,
            M, N, K, stride_og, stride_om, stride_on, A_ROW, B_ROW, BY_DESCRIPTOR, PRECISION,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES,
        )  # fmt: skip
    # Rows of no group become zero: a share for each program, or one for each that had no tile.
    m = tl.max(ends, 0)
    cleared = tl.cdiv(M - m, BLOCK_M) * tiles_n
    if not PERSISTENT:
        first = tl.where(first < tiles, cleared, first - tiles)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for index in range(first, cleared, tl.num_programs(0)):
        store_rows(
            None, out_ptr, stride_og, stride_om, stride_on, first, m + index // tiles_n * BLOCK_M,
            index % tiles_n * BLOCK_N, M, N, zeros, False,
        )  # fmt: skip
