"""Matrix product whose tiles travel by tensor descriptor (TMA), on GPUs from Hopper on."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.epilogue import finished
from tritile.families.common.tiles import grouped_tile
from tritile.families.common.verdict import wanted
from tritile.families.matmul_tile.kernel import block_scale


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
    a_desc, b_desc, acc, outer, inner, m, n, part, blocks,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PRECISION: tl.constexpr, PROMOTE: tl.constexpr, scales, M, N, SCALE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """acc plus the product of a's rows from m and b's columns from n, over every SPLIT_K-th block of K.

    SCALE_BLOCKS, `scales`: each block is multiplied by scales of its own (see `block_scale`).
    Programs that share a tile then read side by side in memory, and not each in a far place of its own.
    There is a block for each of them. Unless told so, ptxas serialises the products of some layouts.
    PROMOTE: in the last third the sum of each block goes from tensor cores to a total in fp32.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    tl.assume(blocks > part)
    for third in tl.static_range(2 if PROMOTE else 1):
        small = (blocks * 2 - 2) // 3  # blocks before the last third, none of it among them
        start = part
        end = blocks
        if third:
            start = part + tl.cdiv(tl.maximum(small - part, 0), SPLIT_K) * SPLIT_K
        elif PROMOTE:
            end = small
        for block in range(start, end, SPLIT_K):
            a = load_operand(a_desc, outer, inner, m, block * BLOCK_K, A_ROW)
            b = load_operand(b_desc, outer, inner, block * BLOCK_K, n, B_ROW)
            if SCALE_BLOCKS is not None:
                rows = m + tl.arange(0, BLOCK_M)
                columns = n + tl.arange(0, BLOCK_N)
                product = tl.dot(a, b, out_dtype=tl.float32)
                acc += product * block_scale(
                    scales, rows, columns, M, N, block * BLOCK_K // 128, SCALE_BLOCKS
                )
            elif a.dtype.is_fp8() and PRECISION != "fast":
                # The fp8 tensor cores of Hopper keep 14 bits of a sum: move it to fp32 every BLOCK_K.
                acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K, out_dtype=acc.dtype)
            elif a.dtype.is_fp8():
                acc = tl.dot(a, b, acc, out_dtype=acc.dtype)
            elif third:
                acc += tl.dot(a, b, max_num_imprecise_acc=BLOCK_K)  # else the compiler has dot add to acc
            else:
                acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc


@triton.jit
def store_part(
    out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, part, extra,
    BY_DESCRIPTOR: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Store a tile of the result: by descriptor, or by pointers and masked where no descriptor can see it."""
    BLOCK_M: tl.constexpr = part.shape[0]
    BLOCK_N: tl.constexpr = part.shape[1]
    if EPILOGUE is not None:
        rows = m + tl.arange(0, BLOCK_M)
        columns = n + tl.arange(0, BLOCK_N)
        part = finished(part, rows, columns, M, N, (outer, inner), (1, 1), extra, EPILOGUE)
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
    out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc, extra,
    BY_DESCRIPTOR: tl.constexpr, SUBTILES: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Store a tile, in SUBTILES parts of its columns: shared memory then holds one part at a time."""
    if SUBTILES == 2:
        HALF: tl.constexpr = acc.shape[1] // 2
        left, right = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, left,
            extra, BY_DESCRIPTOR, EPILOGUE,
        )  # fmt: skip
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n + HALF, M, N,
            right, extra, BY_DESCRIPTOR, EPILOGUE,
        )  # fmt: skip
    else:
        store_part(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
            extra, BY_DESCRIPTOR, EPILOGUE,
        )  # fmt: skip


@triton.jit
def share_parts(
    parts_ptr, counters_ptr, acc, index, part, out_ptr, stride_oo, stride_oi, stride_om, stride_on,
    outer, inner, m, n, M, N, extra, SPLIT_K: tl.constexpr, POLLS: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Leave `acc`, one of SPLIT_K parts of tile `index`; once all are there, sum the tile's rows and store.

    Each program sums some of the rows, in the order of the parts, so that all work at once. None needs
    another to be running: one that has looked POLLS times whether all parts are there says that it gives up,
    and goes; then the last to arrive sums all rows. Where POLLS is 0 it always does.

    The tile's counter holds, from bit 16 on, arrivals, which a launch brings to the next multiple of ALL; and
    below, programs that gave up, which a launch brings back to 0.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    SHARES: tl.constexpr = min(SPLIT_K, BLOCK_M) if POLLS else 1
    ROWS: tl.constexpr = BLOCK_M // SHARES
    AT_ONCE: tl.constexpr = min(SPLIT_K, 8, 16384 // (ROWS * BLOCK_N))  # parts under way: what registers hold
    ALL: tl.constexpr = 256 * 65536
    ARRIVAL: tl.constexpr = ALL // SPLIT_K
    ARRIVALS: tl.constexpr = ALL - 65536
    parts = parts_ptr + index.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
    counter = counters_ptr + index
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(parts + part * (BLOCK_M * BLOCK_N) + within, acc, cache_modifier=".cg")
    tl.debug_barrier()  # every thread has written before one of them says so
    before = tl.atomic_add(counter, ARRIVAL, sem="acq_rel")
    share = part
    end = part
    if (before & ARRIVALS) == ALL - ARRIVAL:  # the last to arrive
        gone = before & 65535
        if (gone > 0) | (POLLS == 0):
            tl.atomic_add(counter, -gone, sem="relaxed")
            share = 0
            end = SHARES
        else:
            end = min(part + 1, SHARES)
    elif (part < SHARES) & (POLLS > 0):
        seen = tl.atomic_add(counter, 0, sem="acquire")
        polls = 1
        while ((seen & ARRIVALS) != 0) & (polls < POLLS):
            seen = tl.atomic_add(counter, 0, sem="acquire")
            polls += 1
        if (seen & ARRIVALS) != 0:
            seen = tl.atomic_add(counter, 1, sem="acq_rel")
            if (seen & ARRIVALS) == 0:  # the last came before that: it counts on this program
                tl.atomic_add(counter, -1, sem="relaxed")
        if (seen & ARRIVALS) == 0:
            end = part + 1
    of_share = tl.arange(0, ROWS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    while share < end:
        first = share * ROWS
        total = tl.zeros((ROWS, BLOCK_N), acc.dtype)
        for start in range(0, SPLIT_K, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                rows = parts + (start + i) * (BLOCK_M * BLOCK_N) + first * BLOCK_N
                total += tl.load(rows + of_share, cache_modifier=".cg")
        store_part(
            None, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m + first, n, M, N,
            total, extra, False, EPILOGUE,
        )  # fmt: skip
        share += 1


@triton.jit
def matmul_descriptor(
    a_desc, b_desc, out_desc, out_ptr, parts_ptr, counters_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, scales, extra, verdict_ptr,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, BY_DESCRIPTOR: tl.constexpr, PRECISION: tl.constexpr,
    WAIT: tl.constexpr, POLLS: tl.constexpr, FLAT: tl.constexpr, BATCHED: tl.constexpr,
    PROMOTE: tl.constexpr, VERDICTS: tl.constexpr, SCALE_BLOCKS: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr, SPLIT_K: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i], for a batch of two dimensions, the inner one of size `inner_batch`.

    PERSISTENT: a program makes tile after tile, so that one's epilogue runs beside the next one's loads.
    SPLIT_K > 1: that many programs share a tile, each with a part of K, and the sum of the parts; the answer
    is the same however they raced. POLLS: how often each looks whether the others have come.
    FLAT: the grid has an axis each for rows and columns of tiles, and one for matrices or parts of K.
    BATCHED: there are several matrices.
    WAIT: launched before the kernel ahead of it is done, so wait for that one before touching memory.
    SCALE_BLOCKS, `scales`: each block of K is multiplied by scales of its own (see `block_scale`).
    EPILOGUE, `extra`: what is done to the sums, and with what (see `finished`).
    PROMOTE: see `multiply`.
    `verdict_ptr`, VERDICTS: None, or a word that says whether there is anything to do (see `wanted`).
    """
    if a_desc.dtype == tl.int8:
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
    if verdict_ptr is not None:
        if not wanted(verdict_ptr, VERDICTS):
            return
    if PERSISTENT:
        for index in tl.range(tl.program_id(0), tiles * batch, tl.num_programs(0), flatten=True):
            outer = index // tiles // inner_batch
            inner = index // tiles % inner_batch
            row, column = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
            m = row * BLOCK_M
            n = column * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
            acc = multiply(
                a_desc, b_desc, acc, outer, inner, m, n, 0, blocks, A_ROW, B_ROW, BLOCK_K, 1, PRECISION,
                PROMOTE, scales, M, N, SCALE_BLOCKS,
            )  # fmt: skip
            store_tile(
                out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
                extra, BY_DESCRIPTOR, SUBTILES, EPILOGUE,
            )  # fmt: skip
    else:
        if FLAT:
            row = tl.program_id(0)
            column = tl.program_id(1)
            matrix = tl.program_id(2) if BATCHED else 0
            part = 0 if BATCHED else tl.program_id(2)
            index = (matrix * tiles_n + column) * tiles_m + row
        else:
            index = tl.program_id(0)
            part = tl.program_id(1)
            matrix = index // tiles
            row, column = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
        outer = row * 0
        inner = row * 0
        if BATCHED:
            outer = matrix // inner_batch
            inner = matrix % inner_batch
        m = row * BLOCK_M
        n = column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        acc = multiply(
            a_desc, b_desc, acc, outer, inner, m, n, part, blocks, A_ROW, B_ROW, BLOCK_K, SPLIT_K, PRECISION,
            PROMOTE, scales, M, N, SCALE_BLOCKS,
        )  # fmt: skip
        if SPLIT_K > 1:
            share_parts(
                parts_ptr, counters_ptr, acc, index, part,
                out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, extra, SPLIT_K,
                POLLS, EPILOGUE,
            )  # fmt: skip
        else:
            store_tile(
                out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, acc,
                extra, BY_DESCRIPTOR, SUBTILES, EPILOGUE,
            )  # fmt: skip
