"""Tutorial kernels that multiply n x n row-major matrices, one idea each.

Offsets have 32 bits: n is 46,340 at most. Requests count whether or not a cache answers them.
"""

import triton
import triton.language as tl

from tritile.families.common.tiles import grouped_tile


@triton.jit
def matmul_naive(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Make an element of out in each lane: each reads its row of a and its column of b, and shares nothing.

    Requests 2 n^3 elements: every row of a, and every column of b, n times.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK], of the n * n elements of out
    row = index // n
    column = index % n
    inside = index < n * n
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(n):
        a = tl.load(a_ptr + row * n + k, mask=inside, other=0.0)  # [BLOCK]
        b = tl.load(b_ptr + k * n + column, mask=inside, other=0.0)  # [BLOCK]
        total += a * b
    tl.store(out_ptr + index, total, mask=inside)


@triton.jit
def matmul_tiles(
    a_ptr, b_ptr, out_ptr, n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Make a tile of out in each program: tiles of a and b pass through shared memory, for all its threads.

    Requests n^3 / BLOCK_N elements of a and n^3 / BLOCK_M of b. A thread holds BLOCK_M * BLOCK_N / threads
    sums in registers: the more, the less often it reads shared memory for each product. Elements of 16
    bits are multiplied on tensor cores; those of 32 bits, with "ieee", one by one.
    """
    index = tl.program_id(0)
    tile_row, tile_column = grouped_tile(index, tl.cdiv(n, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    row = tile_row * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    column = tile_column * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + row * n + k[None, :]  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + k[:, None] * n + column  # [BLOCK_K, BLOCK_N]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n, BLOCK_K):
        a = tl.load(a_ptrs, mask=(row < n) & (k[None, :] < n - start), other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < n - start) & (column < n), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * n
    inside = (row < n) & (column < n)
    tl.store(out_ptr + row * n + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def matmul_persistent(
    a_desc, b_desc, out_desc, n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Run as many programs as there are SMs, each making tile after tile; TMA moves and masks whole tiles.

    No thread computes an address, and one tile is stored while the next one's operands are under way.
    Requests as much as `matmul_tiles` does. Rows have to start on 16 bytes.
    """
    tiles_m = tl.cdiv(n, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_row, tile_column = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
        row = tile_row * BLOCK_M
        column = tile_column * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, n, BLOCK_K):
            a = a_desc.load([row, k])  # [BLOCK_M, BLOCK_K], zero past the edges
            b = b_desc.load([k, column])  # [BLOCK_K, BLOCK_N]
            total = tl.dot(a, b, total)
        out_desc.store([row, column], total.to(out_desc.dtype))
