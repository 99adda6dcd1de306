"""Matrix product whose tiles travel by tensor descriptor (TMA), on GPUs from Hopper on."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.kernels.tiles import grouped_tile


@triton.jit
def load_operand(desc, outer, inner, row, column, ROW_MAJOR: tl.constexpr):
    """The tile at (row, column) of a matrix of the batch; not ROW_MAJOR: `desc` sees its transpose."""
    if ROW_MAJOR:
        tile = desc.load([outer, inner, row, column])
        tile = tile.reshape(tile.shape[2], tile.shape[3])
    else:
        tile = desc.load([outer, inner, column, row])
        tile = tile.reshape(tile.shape[2], tile.shape[3]).T
    return tile


@triton.jit
def multiply(
    a_desc, b_desc, acc, outer, inner, m, n, first, last,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc plus the product of a's rows from m and b's columns from n, over blocks first to last of K."""
    for block in range(first, last):
        a = load_operand(a_desc, outer, inner, m, block * BLOCK_K, A_ROW)
        b = load_operand(b_desc, outer, inner, block * BLOCK_K, n, B_ROW)
        if a.dtype.is_fp8():
            # The fp8 tensor cores of Hopper keep 14 bits of a sum: move it to fp32 every BLOCK_K.
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K, out_dtype=acc.dtype)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc


@triton.jit
def store_part(
    out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, part,
    BY_DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Store a tile of the result: by descriptor, or by pointers and masked where no descriptor can see it."""
    BLOCK_M: tl.constexpr = part.shape[0]
    BLOCK_N: tl.constexpr = part.shape[1]
    part = part.to(out_ptr.dtype.element_ty)
    if BY_DESCRIPTOR:
        out_desc.store([outer, inner, m, n], part.reshape(1, 1, BLOCK_M, BLOCK_N))
    else:
        rows = m + tl.arange(0, BLOCK_M)
        columns = n + tl.arange(0, BLOCK_N)
        matrix = outer.to(tl.int64) * stride_oo + inner.to(tl.int64) * stride_oi
        offsets = rows[:, None].to(tl.int64) * stride_om + columns[None, :].to(tl.int64) * stride_on
        tl.store(out_ptr + matrix + offsets, part, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def store_tile(
    out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
    BY_DESCRIPTOR: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """Store a tile, in SUBTILES parts of its columns: shared memory then holds one part at a time."""
    if SUBTILES == 2:
        HALF: tl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, left,
            BY_DESCRIPTOR,
        )  # fmt: skip
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n + HALF, M, N,
            right, BY_DESCRIPTOR,
        )  # fmt: skip
    else:
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
            BY_DESCRIPTOR,
        )  # fmt: skip


@triton.jit
def matmul_descriptor(
    a_desc, b_desc, out_desc, out_ptr, parts_ptr, arrived_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr, SPLIT_K: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    PERSISTENT: a program makes tile after tile, so that one's epilogue runs beside the next one's loads.
    SPLIT_K > 1: that many programs share a tile, each with a part of K; each leaves its sum in `parts`, and
    the one that arrives last adds them in their order: the answer is the same however they raced.
    WAIT: launched before the kernel ahead of it is done, so wait for that one before touching memory.
    """
    if out_ptr.dtype.element_ty == tl.int32:
        DTYPE: tl.constexpr = tl.int32
    else:
        DTYPE: tl.constexpr = tl.float32
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    blocks = tl.cdiv(K, BLOCK_K)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    if PERSISTENT:
        for index in tl.range(tl.program_id(0), tiles * batch, tl.num_programs(0), flatten=True):
            outer = index // tiles // inner_batch
            inner = index // tiles % inner_batch
            row, column = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
            m = row * BLOCK_M
            n = column * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
            acc = multiply(
                a_desc, b_desc, acc, outer, inner, m, n, 0, blocks, A_ROW, B_ROW, BLOCK_K, PRECISION
            )
            store_tile(
                out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
                BY_DESCRIPTOR, SUBTILES,
            )  # fmt: skip
    else:
        index = tl.program_id(0)
        part = tl.program_id(1)
        outer = index // tiles // inner_batch
        inner = index // tiles % inner_batch
        row, column = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
        m = row * BLOCK_M
        n = column * BLOCK_N
        first = (blocks.to(tl.int64) * part // SPLIT_K).to(tl.int32)
        last = (blocks.to(tl.int64) * (part + 1) // SPLIT_K).to(tl.int32)
        acc = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        acc = multiply(a_desc, b_desc, acc, outer, inner, m, n, first, last, A_ROW, B_ROW, BLOCK_K, PRECISION)
        mine = True
        if SPLIT_K > 1:
            within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            parts = parts_ptr + index.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
            tl.store(parts + part * (BLOCK_M * BLOCK_N) + within, acc, cache_modifier=".cg")
            tl.debug_barrier()  # every thread has written before one of them says so
            mine = tl.atomic_add(arrived_ptr + index, 1, sem="acq_rel") == SPLIT_K - 1
            if mine:
                tl.atomic_xchg(arrived_ptr + index, 0, sem="relaxed")  # as the next launch wants to find it
                acc = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
                for i in range(SPLIT_K):
                    acc += tl.load(parts + i * (BLOCK_M * BLOCK_N) + within, cache_modifier=".cg")
        if mine:
            store_tile(
                out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
                BY_DESCRIPTOR, SUBTILES,
            )  # fmt: skip
