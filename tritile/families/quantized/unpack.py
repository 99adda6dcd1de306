"""Write a weight of 4- or 8-bit integers as a matrix of 16-bit floats.

Words lie as the fragments of tensor cores want them (`core.quantized`), and rows of floats do not: Triton
transposes tiles in shared memory, so that a thread both reads and writes 16 bytes at a time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.quantized.kernel import dequantized


@triton.jit
def unpack(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, rows, row, magic,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZEROS: tl.constexpr,
    MASK_K: tl.constexpr, WAIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write, in each program, a BLOCK_N x BLOCK_K tile of the weight to out, as numbers stand for it.

    words, scales, zeros: as `tritile.quantized` lays them out, with `rows` rows, those of padding included;
    BLOCK_N divides them. out: as many rows of `row` elements, a multiple of the 64 in 128 bytes; what is
    packed beyond the weight's columns goes there too. MASK_K: tiles overhang these.
    magic: see `kernels.quantized.linear_quantized`.
    WAIT: launched before the kernel ahead of it is done, so wait for that one before touching memory.
    """
    UNIT_K: tl.constexpr = 512 // BITS  # columns of 128 words of 8 rows
    WIDTH: tl.constexpr = BLOCK_K // UNIT_K * 128
    SCALES: tl.constexpr = BLOCK_K // GROUP_SIZE
    tl.static_assert(BLOCK_N % 16 == 0 and BLOCK_K % UNIT_K == 0 and BLOCK_K % GROUP_SIZE == 0)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    across = tl.cdiv(row, BLOCK_K)
    n = tl.program_id(0) // across * BLOCK_N
    block = tl.program_id(0) % across
    units = tl.cdiv(row, UNIT_K)
    width = units * 128
    groups = tl.cdiv(units * UNIT_K, GROUP_SIZE)

    eights = n // 8 + tl.arange(0, BLOCK_N // 8)[:, None]
    columns = block * WIDTH + tl.arange(0, WIDTH)[None, :]
    group = block * SCALES + tl.arange(0, SCALES)[:, None]
    twos = n // 2 + tl.arange(0, BLOCK_N // 2)[None, :]
    ns = n + tl.arange(0, BLOCK_N)[:, None]
    ks = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    words_mask = columns < width if MASK_K else None
    scales_mask = group < groups if MASK_K else None
    out_mask = ks < row if MASK_K else None

    words = tl.load(words_ptr + (eights.to(tl.int64) * width + columns), mask=words_mask)
    places = group.to(tl.int64) * (rows // 2) + twos
    scales = tl.load(scales_ptr.to(tl.pointer_type(tl.int32)) + places, mask=scales_mask)
    zeros = scales
    if ZEROS:
        zeros = tl.load(zeros_ptr.to(tl.pointer_type(tl.int32)) + places, mask=scales_mask)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    weight = dequantized(words, scales, zeros, magic, BITS, ZEROS, DTYPE, SCALES, BLOCK_N, BLOCK_K, True)
    tl.store(out_ptr + (ns.to(tl.int64) * row + ks), weight, mask=out_mask)
