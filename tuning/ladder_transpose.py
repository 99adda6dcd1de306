"""Tutorial kernels that transpose n x n row-major matrices, out[j, i] = x[i, j], one idea each.

All read n^2 elements and write as many. They differ in how many threads work, how much of each 32-byte
sector they use, and whether threads wait for each other at shared memory.
Offsets have 32 bits: n is 46,340 at most.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def transpose_rows(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Copy a row of x in each program, BLOCK elements at a time, written down a column of out.

    Reads whole sectors. Each element written is in a sector of its own: 32 bytes touched for 4.
    """
    row = tl.program_id(0)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(x_ptr + row * n + column, mask=column < n)
        tl.store(out_ptr + column * n + row, x, mask=column < n)


@triton.jit
def transpose_elements(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Copy an element in each thread, in the order of x: as many under way as the GPU holds threads.

    From n = BLOCK on writes are scattered as those of `transpose_rows` are: a sector for each element. Below,
    a program has parts of several rows, whose elements lie side by side in out, and touches fewer sectors.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], of the n * n elements of x
    inside = index < n * n
    x = tl.load(x_ptr + index, mask=inside)
    tl.store(out_ptr + index % n * n + index // n, x, mask=inside)


# Tiles of 32 x 32 words over 4 warps, whose 32 lanes lie along a row, or along a column.
TILE = gl.constexpr(32)
ALONG_ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
ALONG_COLUMNS = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1]))
# Row after row: word (i, j) is in bank j of 32, so that a column is in one bank.
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]))
# Word (i, j) is in bank i xor j: neither in a row nor in a column do two words share one.
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=32, order=[1, 0]))


@gluon.jit
def transpose_shared(x_ptr, out_ptr, n, SWIZZLE: gl.constexpr):
    """Copy a tile in each program: read by rows of x, transposed in shared memory, written by rows of out.

    Whole sectors both ways. Shared memory has 32 banks of 4 bytes, which give a warp one word each at a
    time. Without SWIZZLE the lanes of a warp read a column of the tile, 32 words of one bank, one after the
    other; with it, words lie so that rows and columns both are spread over all banks.
    """
    row = gl.program_id(0) * TILE
    column = gl.program_id(1) * TILE
    i = row + gl.arange(0, TILE, gl.SliceLayout(1, ALONG_ROWS))[:, None]  # [TILE, 1]
    j = column + gl.arange(0, TILE, gl.SliceLayout(0, ALONG_ROWS))[None, :]  # [1, TILE]
    x = gl.load(x_ptr + i * n + j, mask=(i < n) & (j < n))
    shared = gl.allocate_shared_memory(x.dtype, [TILE, TILE], SWIZZLED if SWIZZLE else PLAIN, x)
    columns = shared.load(ALONG_COLUMNS)
    i = row + gl.arange(0, TILE, gl.SliceLayout(1, ALONG_COLUMNS))[:, None]
    j = column + gl.arange(0, TILE, gl.SliceLayout(0, ALONG_COLUMNS))[None, :]
    gl.store(out_ptr + j * n + i, columns, mask=(i < n) & (j < n))


@triton.jit
def transpose_tiles(x_ptr, out_ptr, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Copy a tile in each program in Triton, which finds a layout of shared memory without conflicts itself.

    What is left to choose is the tile: large ones have more reads under way, long ones longer runs.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    x_mask = (row[:, None] < n) & (column[None, :] < n)
    x = tl.load(x_ptr + row[:, None] * n + column[None, :], mask=x_mask)  # [BLOCK_M, BLOCK_N]
    out_mask = (column[:, None] < n) & (row[None, :] < n)
    tl.store(out_ptr + column[:, None] * n + row[None, :], x.trans(), mask=out_mask)
