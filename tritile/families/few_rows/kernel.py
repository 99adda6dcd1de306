"""Multiply a few rows x by a matrix w, which is read once in words of 16 bytes, wherever its rows begin.

Rows of w begin anywhere in a word, at a place that repeats every PERIOD rows. A thread multiplies the WORD
elements of a word as it lies by the elements of x that belong to them. Words that lie partly outside of w are
not read: their elements are read one by one.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.epilogue import finished
from tritile.families.common.tiles import batch_index, batch_offset, compensated_sum, multiple


@triton.jit
def apart(tile, WORD: tl.constexpr):
    """The elements of each word of a tile [R, L * WORD]: WORD tensors [R, L], without moving any."""
    R: tl.constexpr = tile.shape[0]
    L: tl.constexpr = tile.shape[1] // WORD
    HALF: tl.constexpr = WORD // 2
    low, high = tile.reshape(R, L, 2, HALF).permute(0, 1, 3, 2).split()
    if HALF == 1:
        found = (low.reshape(R, L), high.reshape(R, L))
    else:
        found = apart(low.reshape(R, L * HALF), HALF) + apart(high.reshape(R, L * HALF), HALF)
    return found


@triton.jit
def stacked(parts):
    """Tensors [R, L], of which there are 1, 2, 4 or 8, as one [R, L, how many]."""
    if len(parts) == 1:
        found = parts[0].reshape(parts[0].shape[0], parts[0].shape[1], 1)
    elif len(parts) == 2:
        found = tl.join(parts[0], parts[1])
    elif len(parts) == 4:
        found = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        found = tl.join(even, tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7])))
    return found.reshape(found.shape[0], found.shape[1], len(parts))


@triton.jit
def several(tensor, COUNT: tl.constexpr):
    """A tuple that holds a tensor COUNT times."""
    found = (tensor,)
    for _ in tl.static_range(COUNT - 1):
        found = found + (tensor,)
    return found


@triton.jit
def shared(parts_ptr, counters_ptr, total, index, part, SPLIT_K: tl.constexpr):
    """Leave `total`, one of SPLIT_K parts of tile `index`: whether it came last, and then the sum of all.

    The sum is in the order of the parts. Counters are as `share_parts` leaves them.
    """
    ALL: tl.constexpr = 256 * 65536
    ARRIVAL: tl.constexpr = ALL // SPLIT_K
    ARRIVALS: tl.constexpr = ALL - 65536
    BLOCK_M: tl.constexpr = total.shape[0]
    BLOCK_N: tl.constexpr = total.shape[1]
    parts = parts_ptr + index.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N)
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(parts + part * (BLOCK_M * BLOCK_N) + within, total, cache_modifier=".cg")
    tl.debug_barrier()  # every thread has written before one of them says so
    before = tl.atomic_add(counters_ptr + index, ARRIVAL, sem="acq_rel")
    last = (before & ARRIVALS) == ALL - ARRIVAL
    if last:
        total = tl.zeros((BLOCK_M, BLOCK_N), total.dtype)
        for i in tl.static_range(SPLIT_K):
            total += tl.load(parts + i * (BLOCK_M * BLOCK_N) + within, cache_modifier=".cg")
    return last, total


@triton.jit
def finish(
    total, rows, columns, end, M, N, matrix, batch_shape, out_ptr, stride_om, stride_on, extra,
    EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Store the sums of these rows and columns, those before `end`, with what is fused into the store."""
    if EPILOGUE is not None:
        total = finished(total, rows, columns, M, N, (matrix,), batch_shape, extra, EPILOGUE)
    offsets = rows[:, None].to(tl.int64) * stride_om + columns[None, :].to(tl.int64) * stride_on
    inside = (rows[:, None] < M) & (columns[None, :] < end)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("M", "N", "K"))
def rows_along_k(
    x_ptr, w_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, stride_xm, stride_xk, stride_w, stride_om, stride_on,
    batch, batch_shape, x_batch_strides, w_batch_strides, out_batch_strides, extra,
    PERIOD: tl.constexpr, EDGES: tl.constexpr, X_WORDS: tl.constexpr, WORD: tl.constexpr,
    COMPENSATED: tl.constexpr, WAIT: tl.constexpr, EPILOGUE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """out[i] = x[i] @ w[i].T, for w [N, K] contiguous along K, rows `stride_w` apart.

    A program takes BLOCK_N rows of w that begin at the same place in a word, every PERIOD-th, and one of
    SPLIT_K parts of the blocks of K. EDGES: rows begin or end amid a word. X_WORDS: x is read in words too.
    """
    LANES: tl.constexpr = BLOCK_K // WORD
    index = tl.program_id(0)
    part = index % SPLIT_K
    tile = index // SPLIT_K
    tiles = tl.num_programs(0) // SPLIT_K
    matrix = batch_index(False)
    if matrix >= batch:
        return
    first = tile // PERIOD * (BLOCK_N * PERIOD) + tile % PERIOD
    rows = first + PERIOD * tl.arange(0, BLOCK_N)
    x_ptr += batch_offset(matrix, batch_shape, x_batch_strides, WORD if X_WORDS else 1)
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, 1)
    w_ptr += batch_offset(matrix, batch_shape, w_batch_strides, 1) + first.to(tl.int64) * stride_w
    shift = first * 0  # elements of a row's first word before the row
    if EDGES:
        shift = (w_ptr.to(tl.int64) // (16 // WORD) % WORD).to(tl.int32)
    begin = (shift > 0).to(tl.int32) * WORD  # elements from the first word to the first whole one
    words = (tl.maximum(shift + K, begin) - begin) // WORD
    first_word = tl.multiple_of(w_ptr + (begin - shift), 16)
    steps = tl.arange(0, BLOCK_N).to(tl.int64) * multiple(stride_w * PERIOD, WORD)
    steps = tl.where(rows < N, steps, 0)[:, None]  # rows past the last one read the first
    lanes = tl.arange(0, LANES)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    if x_ptr.dtype.element_ty == tl.int8:
        DTYPE: tl.constexpr = tl.int32
    else:
        DTYPE: tl.constexpr = tl.float32
    sums = several(tl.zeros((BLOCK_N, LANES), DTYPE), BLOCK_M)
    lost = several(tl.zeros((BLOCK_N, LANES), DTYPE), BLOCK_M)
    if EDGES:
        ks = tl.where(lanes < WORD, 0, begin + words * WORD - WORD) + lanes - shift
        beside = (ks >= 0) & (ks < K) & (lanes < 2 * WORD) & ((lanes >= WORD) | (lanes < begin)) & (part == 0)
        edge = tl.load(w_ptr + steps + ks[None, :], mask=beside[None, :], other=0.0).to(DTYPE)
        edges = ()
        for m in tl.static_range(BLOCK_M):
            x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64) * stride_xm
            x_edge = tl.load(x_row + ks * stride_xk, mask=beside, other=0.0)
            edges = edges + (edge * x_edge.to(DTYPE)[None, :],)
        sums = edges
    along = tl.arange(0, BLOCK_K)[None, :]
    for block in tl.range(part, tl.cdiv(words, LANES), SPLIT_K, num_stages=STAGES):
        whole = block * BLOCK_K + along < words * WORD
        w_ptrs = first_word + steps + (block * BLOCK_K + along)
        w = apart(tl.load(w_ptrs, mask=whole, other=0.0), WORD)
        first_ks = (begin - shift) + (block * LANES + lanes) * WORD
        new_sums = ()
        new_lost = ()
        for m in tl.static_range(BLOCK_M):
            x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64) * multiple(stride_xm, WORD if X_WORDS else 1)
            total = tl.zeros((BLOCK_N, LANES), DTYPE) if COMPENSATED else sums[m]
            if X_WORDS:
                x = apart(tl.load(x_row + (block * BLOCK_K + along), mask=whole, other=0.0), WORD)
                for j in tl.static_range(WORD):
                    total += w[j].to(DTYPE) * x[j].to(DTYPE)
            else:
                for j in tl.static_range(WORD):
                    x = tl.load(
                        x_row + (first_ks + j) * stride_xk, mask=block * LANES + lanes < words, other=0.0
                    )
                    total += w[j].to(DTYPE) * x.to(DTYPE)[None, :]
            left = lost[m]
            if COMPENSATED:
                total, left = compensated_sum(sums[m], left, total)
            new_sums = new_sums + (total,)
            new_lost = new_lost + (left,)
        sums = new_sums
        lost = new_lost
    total = tl.sum(stacked(sums), axis=1).trans()  # [BLOCK_M, BLOCK_N]
    if SPLIT_K > 1:
        last, total = shared(parts_ptr, counters_ptr, total, matrix * tiles + tile, part, SPLIT_K)
        if not last:
            return
    finish(
        total, tl.arange(0, BLOCK_M), rows, N, M, N, matrix, batch_shape, out_ptr, stride_om, stride_on,
        extra, EPILOGUE,
    )  # fmt: skip


@triton.jit(do_not_specialize=("M", "N", "K"))
def rows_along_n(
    x_ptr, w_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, stride_xm, stride_xk, stride_w, stride_om, stride_on,
    batch, batch_shape, x_batch_strides, w_batch_strides, out_batch_strides, extra,
    PERIOD: tl.constexpr, EDGES: tl.constexpr, UNROLL: tl.constexpr, WORD: tl.constexpr,
    COMPENSATED: tl.constexpr, WAIT: tl.constexpr, EPILOGUE: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """out[i] = x[i] @ w[i], for w [K, N] contiguous along N, rows `stride_w` apart, at least a word.

    A program takes every row of w in one of SPLIT_K parts, and of each the words of BLOCK_N elements: with
    EDGES, where rows begin or end amid words, that is one word more than it has columns. Each thread sums
    rows that begin at the same place in a word; sums are moved into place at the end.
    """
    AT_ONCE: tl.constexpr = BLOCK_K // UNROLL
    COLUMNS: tl.constexpr = BLOCK_N - WORD if EDGES else BLOCK_N
    index = tl.program_id(0)
    part = index % SPLIT_K
    tile = index // SPLIT_K
    tiles = tl.num_programs(0) // SPLIT_K
    matrix = batch_index(False)
    if matrix >= batch:
        return
    x_ptr += batch_offset(matrix, batch_shape, x_batch_strides, 1)
    w_ptr += batch_offset(matrix, batch_shape, w_batch_strides, 1)
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, 1)
    rows = tl.arange(0, AT_ONCE)
    across = tl.arange(0, BLOCK_N)[None, :]
    column = tile * COLUMNS
    place = tl.zeros((), tl.int32)
    if EDGES:
        place = (w_ptr.to(tl.int64) // (16 // WORD) % WORD).to(tl.int32)
    shift = (place + rows % PERIOD * (stride_w % WORD)) % WORD  # elements of a row's first word before it
    origin = tl.multiple_of(w_ptr - place, 16)
    begin = tl.where((shift > 0) & (column == 0), WORD, 0)  # from the first word to the first whole one
    end = tl.cdiv(shift + (N - column), WORD) * WORD  # from the first word to the end of the last
    whole_end = (shift + (N - column)) // WORD * WORD
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    if x_ptr.dtype.element_ty == tl.int8:
        DTYPE: tl.constexpr = tl.int32
    else:
        DTYPE: tl.constexpr = tl.float32
    sums = several(tl.zeros((AT_ONCE, BLOCK_N), DTYPE), BLOCK_M)
    lost = several(tl.zeros((AT_ONCE, BLOCK_N), DTYPE), BLOCK_M)
    if EDGES:
        columns = column + across - shift[:, None]
        in_row = (columns >= 0) & (columns < N) & (part == 0)
        for last in tl.static_range(2):
            k = (K - 1) * last
            beside = across >= tl.where(K == 1, tl.maximum(begin, whole_end), whole_end)[:, None]
            if last == 0:
                beside = across < begin[:, None]
            beside = beside & in_row & (rows == k % AT_ONCE)[:, None]
            w = tl.load(w_ptr + k.to(tl.int64) * stride_w + columns, mask=beside, other=0.0).to(DTYPE)
            edges = ()
            for m in tl.static_range(BLOCK_M):
                x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64) * stride_xm
                edges = edges + (sums[m] + w * tl.load(x_row + k.to(tl.int64) * stride_xk).to(DTYPE),)
            sums = edges
    for block in tl.range(part, tl.cdiv(K, BLOCK_K), SPLIT_K, num_stages=STAGES):
        parts = sums
        if COMPENSATED:
            parts = several(tl.zeros((AT_ONCE, BLOCK_N), DTYPE), BLOCK_M)
        for step in tl.static_range(UNROLL):
            ks = block * BLOCK_K + step * AT_ONCE + rows
            inside = (ks < K)[:, None] & (across < end[:, None])
            if EDGES:
                inside = inside & (across >= tl.where(ks == 0, begin, 0)[:, None])
                inside = inside & (across < tl.where(ks == K - 1, whole_end, end)[:, None])
            starts = (place + ks.to(tl.int64) * stride_w) // WORD * WORD + column
            w = tl.load(origin + starts[:, None] + across, mask=inside, other=0.0).to(DTYPE)
            added = ()
            for m in tl.static_range(BLOCK_M):
                x_row = x_ptr + tl.minimum(m, M - 1).to(tl.int64) * stride_xm
                x = tl.load(x_row + ks.to(tl.int64) * stride_xk, mask=ks < K, other=0.0).to(DTYPE)
                added = added + (parts[m] + w * x[:, None],)
            parts = added
        if COMPENSATED:
            new_sums = ()
            new_lost = ()
            for m in tl.static_range(BLOCK_M):
                total, left = compensated_sum(sums[m], lost[m], parts[m])
                new_sums = new_sums + (total,)
                new_lost = new_lost + (left,)
            sums = new_sums
            lost = new_lost
        else:
            sums = parts
    total = stacked(sums)  # [AT_ONCE, BLOCK_N, BLOCK_M]
    if EDGES:
        total = tl.sum(total.reshape(AT_ONCE // PERIOD, PERIOD, BLOCK_N, BLOCK_M), axis=0)
        turn = (place + tl.arange(0, PERIOD) * (stride_w % WORD)) % WORD
        from_ = tl.minimum(tl.arange(0, BLOCK_N)[None, :] + turn[:, None], BLOCK_N - 1)
        from_ = tl.broadcast_to(from_[:, :, None], (PERIOD, BLOCK_N, BLOCK_M))
        total = tl.gather(total, from_, axis=1)
    total = tl.sum(total, axis=0).trans()  # [BLOCK_M, BLOCK_N]
    if SPLIT_K > 1:
        last, total = shared(parts_ptr, counters_ptr, total, matrix * tiles + tile, part, SPLIT_K)
        if not last:
            return
    columns = column + tl.arange(0, BLOCK_N)
    finish(
        total, tl.arange(0, BLOCK_M), columns, tl.minimum(column + COLUMNS, N), M, N, matrix, batch_shape,
        out_ptr, stride_om, stride_on, extra, EPILOGUE,
    )  # fmt: skip
