"""Three kernels as their authors write them: row softmax, layer norm and attention, right at any size.

None belongs to tritile, and none is decorated: `authors.py` has what tuning each takes.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * LOG2E), and exp2 is one instruction


@triton.jit
def softmax(
    x_ptr, out_ptr,
    rows, columns, stride_x, stride_out,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = softmax(x[i]), ROWS rows a program, BLOCK columns at a time; sums in fp32.

    Elements of a row are contiguous. A row that fits BLOCK is read once. A longer one is read twice: for
    its largest element and its sum, the sum scaled down whenever a larger element is met, and to write.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    x_ptrs = x_ptr + row * stride_x + column
    out_ptrs = out_ptr + row * stride_out + column
    in_rows = row < rows
    if columns <= BLOCK:
        mask = in_rows & (column < columns)
        x = tl.load(x_ptrs, mask=mask, other=-float("inf")).to(tl.float32) * LOG2E
        e = tl.exp2(x - tl.max(x, axis=1)[:, None])
        tl.store(out_ptrs, (e / tl.sum(e, axis=1)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        largest = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, columns, BLOCK):
            mask = in_rows & (column < columns - start)
            x = tl.load(x_ptrs + start, mask=mask, other=-float("inf"), eviction_policy="evict_last")
            x = x.to(tl.float32) * LOG2E
            before, largest = largest, tl.maximum(largest, tl.max(x, axis=1))
            # Until an element above -inf is met, what is subtracted is 0: -inf - -inf is no number.
            shift = tl.where(largest == -float("inf"), 0.0, largest)
            total = total * tl.exp2(before - shift) + tl.sum(tl.exp2(x - shift[:, None]), axis=1)
        for start in range(0, columns, BLOCK):
            mask = in_rows & (column < columns - start)
            x = tl.load(x_ptrs + start, mask=mask, other=-float("inf"), eviction_policy="evict_first")
            e = tl.exp2(x.to(tl.float32) * LOG2E - largest[:, None]) / total[:, None]
            tl.store(out_ptrs + start, e.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm(
    x_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr,
    rows, columns, stride_x, stride_out, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = (x[i] - mean[i]) * rstd[i] * weight + bias, ROWS rows a program, BLOCK columns at a time.

    mean and rstd (1 / sqrt(variance + eps)) are written too, in fp32, for a backward pass. Elements of a
    row are contiguous. A row that fits BLOCK is read once. Of a longer one, each block's mean and squared
    deviations are merged into those of the blocks before it (Chan, Golub and LeVeque 1979), which loses
    no digits where the mean is large beside the deviations; then it is read again, to write.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)  # [BLOCK]
    x_ptrs = x_ptr + row[:, None] * stride_x + column[None, :]
    out_ptrs = out_ptr + row[:, None] * stride_out + column[None, :]
    in_rows = row < rows
    if columns <= BLOCK:
        in_columns = column < columns
        mask = in_rows[:, None] & in_columns[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=in_columns, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=1) / columns
        centred = tl.where(in_columns[None, :], x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / columns + eps)
        out = centred * rstd[:, None] * weight[None, :] + bias[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        mean = tl.zeros((ROWS,), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        for start in range(0, columns, BLOCK):
            count = tl.minimum(columns - start, BLOCK)
            in_columns = column < count
            mask = in_rows[:, None] & in_columns[None, :]
            x = tl.load(x_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            here = tl.sum(x, axis=1) / count
            centred = tl.where(in_columns[None, :], x - here[:, None], 0.0)
            share = count / (start + count).to(tl.float32)  # of this block in all columns so far
            apart = here - mean
            mean += apart * share
            squares += tl.sum(centred * centred, axis=1) + apart * apart * share * start
        rstd = tl.rsqrt(squares / columns + eps)
        for start in range(0, columns, BLOCK):
            in_columns = column < columns - start
            mask = in_rows[:, None] & in_columns[None, :]
            x = tl.load(x_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            weight = tl.load(weight_ptr + start + column, mask=in_columns, other=0.0).to(tl.float32)
            bias = tl.load(bias_ptr + start + column, mask=in_columns, other=0.0).to(tl.float32)
            out = (x - mean[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
            tl.store(out_ptrs + start, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(mean_ptr + row, mean, mask=in_rows)
    tl.store(rstd_ptr + row, rstd, mask=in_rows)


@triton.jit
def _attend(
    acc, largest, total, q, k_ptr, v_ptr, k_offsets, v_offsets,
    first, last, sequence, rows, stride_ks, stride_vs, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Go on with the keys and values from `first` to `last`.

    MASKED: some of them are past the sequence's end or, causal, past a row.
    """
    key = tl.arange(0, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        # A base that moves and offsets that stay: half the registers of a tile of moving addresses.
        wide_start = tl.cast(start, tl.int64)
        k_ptrs = k_ptr + wide_start * stride_ks + k_offsets
        v_ptrs = v_ptr + wide_start * stride_vs + v_offsets
        in_keys = key < sequence - start
        loaded = in_keys[:, None] if MASKED else None
        k = tl.load(k_ptrs, mask=loaded, other=0.0 if MASKED else None)  # [BLOCK_N, HEAD]
        scores = tl.dot(q, k.T)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            seen = in_keys[None, :]
            if CAUSAL:
                seen = seen & (start + key[None, :] <= rows[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        before, largest = largest, tl.maximum(largest, tl.max(scores, axis=1) * scale)
        p = tl.exp2(scores * scale - largest[:, None])
        fade = tl.exp2(before - largest)
        total = total * fade + tl.sum(p, axis=1)
        v = tl.load(v_ptrs, mask=loaded, other=0.0 if MASKED else None)  # [BLOCK_N, HEAD]
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return acc, largest, total


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, out_ptr,
    heads, sequence, scale,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    HEAD: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale * q k^T) v for each batch and head, BLOCK_M queries a program.

    Keys and values pass by in blocks of BLOCK_N; sums, and the largest score so far, are kept in fp32, and
    the scores never leave the chip (flash attention). q, k, v and out are (batch, heads, sequence, HEAD)
    of a 16-bit type, HEAD contiguous; `scale` is above 0. Only the last blocks, which the sequence's end
    or, causal, the diagonal crosses, are masked. Every row sees key 0 first, so that its largest score is
    finite from then on.
    """
    blocks = tl.cdiv(sequence, BLOCK_M)
    # Causal, the last queries see most keys: those begin first, and the short ones fill what is left.
    block = blocks - 1 - tl.program_id(0) % blocks
    pair = tl.program_id(0) // blocks
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    depth = tl.arange(0, HEAD)[None, :]  # [1, HEAD]
    key = tl.arange(0, BLOCK_N)[:, None]  # [BLOCK_N, 1]
    wide_rows, in_rows = rows.to(tl.int64)[:, None], rows[:, None] < sequence
    q = tl.load(q_ptr + wide_rows * stride_qs + depth, mask=in_rows, other=0.0)  # [BLOCK_M, HEAD]
    k_offsets, v_offsets = key * stride_ks + depth, key * stride_vs + depth
    acc = tl.zeros((BLOCK_M, HEAD), tl.float32)
    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)

    scale *= LOG2E
    end = tl.minimum((block + 1) * BLOCK_M, sequence) if CAUSAL else sequence
    whole = (block * BLOCK_M if CAUSAL else sequence) // BLOCK_N * BLOCK_N
    acc, largest, total = _attend(
        acc, largest, total, q, k_ptr, v_ptr, k_offsets, v_offsets,
        0, whole, sequence, rows, stride_ks, stride_vs, scale, CAUSAL, False, BLOCK_N,
    )  # fmt: skip
    acc, largest, total = _attend(
        acc, largest, total, q, k_ptr, v_ptr, k_offsets, v_offsets,
        whole, end, sequence, rows, stride_ks, stride_vs, scale, CAUSAL, True, BLOCK_N,
    )  # fmt: skip
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + wide_rows * stride_os + depth, out, mask=in_rows)
