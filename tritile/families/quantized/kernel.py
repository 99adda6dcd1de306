"""Multiply by a weight of 4- or 8-bit integers, which become 16-bit floats in registers.

The weight's rows are the first operand of `tl.dot`, the one that tensor cores of Hopper read from registers:
out^T = weight x^T. Words lie in memory as the fragments of that operand want them (`core.quantized`), so that
unpacking moves nothing between threads.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_warps
from triton.language.target_info import cuda_capability_geq

from tritile.families.common.shared_k import share_parts, store_part
from tritile.families.common.tiles import grouped_tile, load_tile, multiple


@triton.jit
def number(pattern, DTYPE: tl.constexpr):
    """Return the float whose 16 bits are the lower half of an int32; DTYPE float32 widens a bfloat16."""
    if DTYPE.is_fp32():
        value = (pattern << 16).to(tl.float32, bitcast=True)
    else:
        value = pattern.to(tl.int16).to(DTYPE, bitcast=True)
    return value


@triton.jit
def both(words, DTYPE: tl.constexpr):
    """Return the floats in the lower and upper half of each int32, along a new last dimension."""
    return tl.join(number(words & 0xFFFF, DTYPE), number((words >> 16) & 0xFFFF, DTYPE))


@triton.jit
def signed_bytes(words, magic, DTYPE: tl.constexpr):
    """n - 128 for the low bytes n of both halves of each word, exact in bfloat16.

    The pattern of 128 has room for 7 bits. The 8th is set apart: 128 + n % 128, less 128 where it is set and
    256 where it is not.
    """
    low = both((words & 0x007F007F) | magic, DTYPE)
    return low - both((~words & 0x00800080) | magic, DTYPE)


@triton.jit
def by_row(pairs, ROWS: tl.constexpr, SCALES: tl.constexpr):
    """[SCALES, ROWS / 2, 2] of rows n and n + 8 side by side, as [ROWS, SCALES]."""
    return pairs.reshape(SCALES, ROWS // 16, 8, 2).permute(1, 3, 2, 0).reshape(ROWS, SCALES)


@triton.jit
def spread(values, COUNT: tl.constexpr):
    """[ROWS, SCALES] over the words that each is for: [ROWS, COUNT, 1, 1]."""
    ROWS: tl.constexpr = values.shape[0]
    SCALES: tl.constexpr = values.shape[1]
    values = tl.broadcast_to(values[:, :, None], (ROWS, SCALES, COUNT // SCALES))
    return values.reshape(ROWS, COUNT)[:, :, None, None]


@triton.jit
def rounded(weight):
    """fp32 rounded to the nearest bfloat16, ties to even, as fp32."""
    bits = weight.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def keep_live(value, scales):
    """`value`, one for each of `scales`, as if it depended on them: at no instruction.

    Triton loads ahead of time, by asynchronous copies, only what a product's operands are made of.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [value, scales], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dequantized(
    words, scales, zeros, magic,
    BITS: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
    AHEAD: tl.constexpr = False,
):  # fmt: skip
    """Return the weight tile [BLOCK_N, BLOCK_K] = (number - zero point) * scale, rounded once, to DTYPE.

    Not SCALED: without the scales, and so exact; AHEAD: they are loaded ahead with the words all the same.

    words: [BLOCK_N / 8, BLOCK_K * BITS / 4] int32. scales and zeros: [groups, BLOCK_N / 2] int32, each two
    16-bit values, of rows n and n + 8.
    """
    PAIRS: tl.constexpr = 16 // BITS  # of numbers in a word
    COUNT: tl.constexpr = BLOCK_K // (8 * PAIRS)  # words of a row, by fours
    LEVELS: tl.constexpr = 2**BITS
    words = words.reshape(BLOCK_N // 8, COUNT // 4, 8, 4, 4).permute(0, 2, 1, 4, 3).reshape(BLOCK_N, COUNT, 4)
    words = words[:, :, :, None] >> (tl.arange(0, PAIRS) * BITS)[None, None, None, :]
    pattern = magic
    if AHEAD:
        pattern = spread(keep_live(magic, by_row(tl.join(scales, scales), BLOCK_N, SCALES)), COUNT)
    if BITS == 4 or DTYPE.is_fp16():
        BASE: tl.constexpr = 1024.0 if DTYPE.is_fp16() else 128.0
        numbers = words & (LEVELS - 1) * 0x10001
        if ZEROS:  # the pattern of BASE + number + LEVELS - zero point
            zero = by_row(tl.join(zeros & (LEVELS - 1), (zeros >> 16) & (LEVELS - 1)), BLOCK_N, SCALES)
            numbers += pattern + spread((LEVELS - zero) * 0x10001, COUNT)
            weight = both(numbers, DTYPE) - tl.full((1,), BASE + LEVELS, DTYPE)
        else:
            weight = both(numbers | pattern, DTYPE) - tl.full((1,), BASE + LEVELS // 2, DTYPE)
    else:
        weight = signed_bytes(words, pattern, DTYPE)
        if ZEROS:
            weight -= spread(by_row(signed_bytes(zeros, magic, DTYPE), BLOCK_N, SCALES), COUNT)[
                :, :, :, :, None
            ]
    if SCALED:
        weight *= spread(by_row(both(scales, DTYPE), BLOCK_N, SCALES), COUNT)[:, :, :, :, None]
        if DTYPE.is_fp32():
            weight = rounded(weight)
    return weight.permute(0, 1, 3, 2, 4).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def scaled_sums(acc, scales, DTYPE: tl.constexpr, SCALES: tl.constexpr):
    """Sums [BLOCK_N, BLOCK_M] over one group of K, times the scale of their row, which came SCALES times."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    scale = by_row(both(scales, DTYPE), ROWS, SCALES).to(tl.float32)
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, SCALES, COLUMNS // SCALES))
    return acc * scale.reshape(ROWS, COLUMNS)


@triton.jit
def wait_for_registers():
    """Wait until tensor cores of Hopper have read the operand that they take from registers.

    Triton lets several `wgmma` be under way while the next block is unpacked, and 3.6 into the registers that
    they still read. Source: triton-lang/triton issue 9433.
    """
    tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_pairs(ptr, places, inside, MASK: tl.constexpr):
    """Return 16-bit numbers, as words of two; zero beyond the last group."""
    return load_tile(ptr.to(tl.pointer_type(tl.int32)) + places, inside, inside, MASK, False)


@triton.jit(do_not_specialize=("M",))
def linear_quantized(
    x_ptr, x_desc, words_ptr, scales_ptr, zeros_ptr, out_ptr, parts_ptr, counters_ptr,
    M, N, K, stride_xm, stride_xk, magic, extra,
    ALIGN_X: tl.constexpr, ALIGN_N: tl.constexpr, ALIGN_K: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZEROS: tl.constexpr,
    MASK_M: tl.constexpr, MASK_N: tl.constexpr, MASK_K: tl.constexpr,
    WAIT: tl.constexpr, POLLS: tl.constexpr, SCALES: tl.constexpr, SCALE_SUMS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """out = x @ weight^T: each program makes one BLOCK_M x BLOCK_N tile of out, or a part of its sum.

    x: (M, K), read by `x_desc` where there is one. out: (M, N), contiguous. words, scales, zeros: as
    `tritile.quantized` lays them out.
    MASK_*: tiles overhang that edge. ALIGN_*: units of x's row stride, N and K (see `multiple`).
    magic: the pattern of 1024 (fp16) or 128 (bf16) in both halves. It is an argument, and so in a register,
    as one instruction takes one immediate.
    SCALES: how many scales of a row are loaded for a block, some of them several times: loads of less
    than an element a thread are not pipelined.
    SCALE_SUMS: a block of K is of one group, whose sums are scaled, in fp32, in the place of weights.
    SPLIT_K > 1: that many programs share a tile (see `share_parts`).
    WAIT: launched before the kernel ahead of it is done, so wait for that one before touching memory.
    EPILOGUE, `extra`: what is done to the sums of out^T, and with what (see `finished`).
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    UNIT_K: tl.constexpr = 512 // BITS  # columns of 128 words of 8 rows
    WIDTH: tl.constexpr = BLOCK_K // UNIT_K * 128
    SPAN: tl.constexpr = BLOCK_K // SCALES  # columns that a loaded scale is for
    tl.static_assert(BLOCK_K % UNIT_K == 0 and SPAN <= GROUP_SIZE)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    N = multiple(N, ALIGN_N)
    K = multiple(K, ALIGN_K)
    tiles_m = tl.cdiv(M, BLOCK_M)
    row, column = grouped_tile(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    part = tl.program_id(1)
    m = row * BLOCK_M
    n = column * BLOCK_N
    padded_n = tl.cdiv(N, 16) * 16
    units = tl.cdiv(K, UNIT_K)
    width = units * 128
    groups = tl.cdiv(units * UNIT_K, GROUP_SIZE)
    stride_xm = multiple(stride_xm, ALIGN_X)
    rows = m + tl.arange(0, BLOCK_M)
    ks = part * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    eights = n // 8 + tl.arange(0, BLOCK_N // 8)
    twos = n // 2 + tl.arange(0, BLOCK_N // 2)
    if MASK_N:  # rows past the last are the last again, and not stored
        eights = tl.minimum(eights, padded_n // 8 - 1)
        twos = tl.minimum(twos, padded_n // 2 - 1)
    if x_desc is None:
        x_ptrs = x_ptr + (rows[:, None].to(tl.int64) * stride_xm + ks[None, :].to(tl.int64) * stride_xk)
        step = SPLIT_K * BLOCK_K * tl.cast(stride_xk, tl.int64)
    words_ptrs = words_ptr + (eights[:, None].to(tl.int64) * width + columns[None, :])

    row_mask = rows[:, None] < M
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    blocks = tl.cdiv(K, BLOCK_K)
    tl.assume(blocks > part)
    for block in range(part, blocks, SPLIT_K):
        ahead = block - part
        if x_desc is None:
            x = load_tile(x_ptrs, row_mask, ks[None, :] < K - ahead * BLOCK_K, MASK_M, MASK_K)
            x_ptrs += step
        else:
            x = x_desc.load([m, block * BLOCK_K])
        words = load_tile(words_ptrs, True, columns[None, :] < width - ahead * WIDTH, False, MASK_K)
        group = (block * BLOCK_K + tl.arange(0, SCALES)[:, None] * SPAN) // GROUP_SIZE
        places = group.to(tl.int64) * (padded_n // 2) + twos[None, :]
        scales = load_pairs(scales_ptr, places, group < groups, MASK_K)
        zeros = scales
        if ZEROS:
            zeros = load_pairs(zeros_ptr, places, group < groups, MASK_K)
        weight = dequantized(
            words, scales, zeros, magic, BITS, ZEROS, DTYPE, SCALES, BLOCK_N, BLOCK_K,
            not SCALE_SUMS, SCALE_SUMS and WAIT,
        )  # fmt: skip
        if SCALE_SUMS:
            acc += scaled_sums(tl.dot(weight, x.T), scales, DTYPE, SCALES)
        else:
            acc = tl.dot(weight, x.T, acc)
        if WAIT and BLOCK_N >= 64 and num_warps() >= 4 and not cuda_capability_geq(10, 0):
            wait_for_registers()
        words_ptrs += SPLIT_K * WIDTH
    if SPLIT_K > 1:
        share_parts(
            parts_ptr, counters_ptr, acc, column * tiles_m + row, part, out_ptr, 0, 0, 1, N,
            row * 0, row * 0, n, m, N, M, extra, SPLIT_K, POLLS, EPILOGUE,
        )  # fmt: skip
    else:
        store_part(None, out_ptr, 0, 0, 1, N, row * 0, row * 0, n, m, N, M, acc, extra, False, EPILOGUE)
