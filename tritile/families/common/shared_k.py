"""Share the K of a tile among programs: parts are left in memory, and summed in a fixed order."""

import triton
import triton.language as tl

from tritile.families.common.epilogue import finished


@triton.jit
def store_part(
    out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, part, extra,
    BY_DESCRIPTOR: tl.constexpr, EPILOGUE: tl.constexpr, STEP: tl.constexpr = 1,
):  # fmt: skip
    """Store a tile of the result: by descriptor, or by pointers and masked where no descriptor can see it.

    STEP: from one column of the tile to the next.
    """
    BLOCK_M: tl.constexpr = part.shape[0]
    BLOCK_N: tl.constexpr = part.shape[1]
    if EPILOGUE is not None:
        rows = m + tl.arange(0, BLOCK_M)
        columns = n + STEP * tl.arange(0, BLOCK_N)
        part = finished(part, rows, columns, M, N, (outer, inner), (1, 1), extra, EPILOGUE)
    part = part.to(out_ptr.dtype.element_ty)
    if BY_DESCRIPTOR:
        out_desc.store([outer, inner, m, n], part.reshape(1, 1, BLOCK_M, BLOCK_N))
    else:
        rows = m + tl.arange(0, BLOCK_M)
        columns = n + STEP * tl.arange(0, BLOCK_N)
        matrix = outer.to(tl.int64) * stride_oo + inner.to(tl.int64) * stride_oi
        offsets = rows[:, None].to(tl.int64) * stride_om + columns[None, :].to(tl.int64) * stride_on
        tl.store(out_ptr + matrix + offsets, part, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def share_parts(
    parts_ptr, counters_ptr, acc, index, part, out_ptr, stride_oo, stride_oi, stride_om, stride_on,
    outer, inner, m, n, M, N, extra, SPLIT_K: tl.constexpr, POLLS: tl.constexpr, EPILOGUE: tl.constexpr,
    STEP: tl.constexpr = 1,
):  # fmt: skip
    """Leave `acc`, one of SPLIT_K parts of tile `index`; once all are there, sum the tile's rows and store.

    Each program sums some of the rows, in the order of the parts, so that all work at once. None needs
    another to be running: a program that has looked POLLS times whether all parts are there says that it
    gives up, and sums nothing; then the last to arrive sums all rows, and no other program any: the result
    may be an operand of the epilogue. Where POLLS is 0 the last to arrive always sums all.

    The tile's counter holds, below bit 16, programs that gave up before the last arrived; from bit 16 on,
    arrivals; and from bit 24 on, a number that a launch moves on by 1, or by 2 if any gave up.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    SHARES: tl.constexpr = min(SPLIT_K, BLOCK_M) if POLLS else 1
    ROWS: tl.constexpr = BLOCK_M // SHARES
    HELD: tl.constexpr = max(1, 16384 // (ROWS * BLOCK_N))  # parts that registers hold
    AT_ONCE: tl.constexpr = min(SPLIT_K, 8, HELD)  # parts under way
    ALL: tl.constexpr = 256 * 65536
    ARRIVAL: tl.constexpr = ALL // SPLIT_K
    ARRIVALS: tl.constexpr = ALL - 65536
    parts = parts_ptr + index.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
    counter = counters_ptr + index
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(parts + part * (BLOCK_M * BLOCK_N) + within, acc, cache_modifier=".cg")
    tl.debug_barrier()  # every thread has written before one of them says so
    before = tl.atomic_add(counter, ARRIVAL, sem="acq_rel")
    launch = before // ALL
    share = part
    end = part
    if (before & ARRIVALS) == ALL - ARRIVAL:  # the last to arrive
        gone = before & 65535
        if gone > 0:
            tl.atomic_add(counter, ALL - gone, sem="relaxed")
        if (gone > 0) | (POLLS == 0):
            share = 0
            end = SHARES
        else:
            end = min(part + 1, SHARES)
    elif (part < SHARES) & (POLLS > 0):
        seen = tl.atomic_add(counter, 0, sem="acquire")
        polls = 1
        while (seen // ALL == launch) & (polls < POLLS):
            seen = tl.atomic_add(counter, 0, sem="acquire")
            polls += 1
        giving_up = seen // ALL == launch
        while giving_up:  # until the counter says so, or the last has come before that
            found = tl.atomic_cas(counter, seen, seen + 1, sem="acq_rel")
            giving_up = (found != seen) & (found // ALL == launch)
            seen = found
        if seen == (launch + 1) * ALL:  # all are there, and none gave up
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
            total, extra, False, EPILOGUE, STEP,
        )  # fmt: skip
        share += 1
