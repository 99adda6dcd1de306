"""Make an fp64 product of int8 ones, by remainders modulo small coprime numbers.

A row of A and a column of B are both called a vector here. There are R vectors of K elements; `stride_r` and
`stride_k` are their strides.
"""

import triton
import triton.language as tl

from tritile.families.common.constants import constant
from tritile.families.common.epilogue import finished
from tritile.families.common.tiles import batch_index, batch_offset

# Stands for the exponent of a vector whose products are made in plain fp64.
UNFIT = constant(32767)


@triton.jit
def exponent_of(x):
    """floor(log2(|x|)) of float64; 1024 of infinities and NaN, -1023 of zero and subnormal numbers."""
    return ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023


@triton.jit
def power_of_two(exponent):
    """2**exponent in float64, for exponents from -1022 to 1023."""
    return ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def measure_vectors(
    x_ptr, exponents_ptr,
    R, K, stride_r, stride_k,
    matrices, batch_shape, batch_strides,
    REACH: tl.constexpr, PEAK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """exponents[matrix, r] = the largest e with |2**e x[r]|^2 <= REACH, |.| being the Euclidean norm.

    UNFIT for vectors with an infinity or NaN, and for those whose root mean square is above PEAK times the
    mean magnitude, over elements that are not zero. One pass: sums are kept in units of the largest power of
    two met, so that nothing overflows.
    """
    matrix = batch_index(False)
    if matrix >= matrices:
        return
    x_ptr += batch_offset(matrix, batch_shape, batch_strides, 1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    ks = tl.arange(0, BLOCK_K)
    ptrs = x_ptr + rows[:, None] * stride_r
    in_rows = rows < R
    unit = tl.full((BLOCK_R,), -1022, tl.int32)
    total = tl.zeros((BLOCK_R,), tl.float64)
    squares = tl.zeros((BLOCK_R,), tl.float64)
    count = tl.zeros((BLOCK_R,), tl.float64)
    for k in range(0, K, BLOCK_K):
        in_k = (ks < K - k)[None, :]
        offsets = (ks + k)[None, :].to(tl.int64) * stride_k
        x = tl.abs(tl.load(ptrs + offsets, mask=in_rows[:, None] & in_k, other=0.0))  # [BLOCK_R, BLOCK_K]
        count += tl.sum(tl.where(x != 0, 1, 0), axis=1).to(tl.float64)
        larger = tl.minimum(tl.maximum(tl.max(exponent_of(x), axis=1), unit), 1022)
        shrink = power_of_two(tl.maximum(unit - larger, -500))  # below that it is far below rounding
        x *= power_of_two(-larger)[:, None]
        total = total * shrink + tl.sum(x, axis=1)
        squares = squares * shrink * shrink + tl.sum(x * x, axis=1)
        unit = larger
    spare = tl.full((BLOCK_R,), REACH, tl.float64)
    exponent = (exponent_of(spare) - exponent_of(squares)) >> 1
    over = squares * power_of_two(2 * exponent) > spare
    exponent = tl.where(over, exponent - 1, exponent) - unit
    exponent = tl.where(squares > 0, exponent, 0)
    fit = (squares < float("inf")) & (count * squares <= total * total * (PEAK * PEAK))
    to = exponents_ptr + matrix.to(tl.int64) * R + rows
    tl.store(to, tl.where(fit, exponent, UNFIT), mask=in_rows)


@triton.jit
def split_residues(
    x_ptr, exponents_ptr, out_ptr, moduli_ptr,
    R, K, K_PADDED, stride_part, stride_r, stride_k,
    matrices, batch_shape, batch_strides,
    DIGITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[i, matrix, r, k] = 2**exponents[matrix, r] x[r, k], rounded to an integer, modulo the i-th modulus.

    int8, as near 0 as remainders go; zero for UNFIT vectors and from K to K_PADDED. DIGITS has, for each
    modulus, the modulus and the remainders of 2^16, 2^32 and 2^48, as near 0 as they go.
    `moduli_ptr`: None, or where the moduli are to be written, in float32.
    """
    matrix = batch_index(False)
    if matrix >= matrices:
        return
    x_ptr += batch_offset(matrix, batch_shape, batch_strides, 1)
    blocks = tl.cdiv(K_PADDED, BLOCK_K)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    ks = tl.program_id(0) % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    in_rows = rows < R
    mask = in_rows[:, None] & (ks < K)[None, :]
    exponents_ptr += matrix.to(tl.int64) * R
    exponent = tl.load(exponents_ptr + rows, mask=in_rows, other=UNFIT)
    fit = exponent != UNFIT
    exponent = tl.where(fit, exponent, 0)
    from_rows = x_ptr + rows[:, None] * stride_r
    offsets = ks[None, :].to(tl.int64) * stride_k
    x = tl.load(from_rows + offsets, mask=mask & fit[:, None], other=0.0)
    # In two steps, as 2**exponent may be beyond float64. The first loses bits only of what ends far below 1.
    half = exponent >> 1
    x = x * power_of_two(half)[:, None] * power_of_two(exponent - half)[:, None]
    # To the nearest integer; from 2^52 on all are integers, to which 0.5 cannot be added.
    x += tl.where(tl.abs(x) < 4503599627370496.0, tl.where(x < 0, -0.5, 0.5), 0.0)
    # Digits of 16 bits, from -2^15 to 2^15 - 1. Sums below are whole numbers under 2^24: exact in float32.
    bits = x.to(tl.int64) + 0x800080008000
    d0 = ((bits & 0xFFFF).to(tl.int32) - 0x8000).to(tl.float32)
    d1 = (((bits >> 16) & 0xFFFF).to(tl.int32) - 0x8000).to(tl.float32)
    d2 = (((bits >> 32) & 0xFFFF).to(tl.int32) - 0x8000).to(tl.float32)
    d3 = (bits >> 48).to(tl.int32).to(tl.float32)
    to_rows = out_ptr + (matrix.to(tl.int64) * R + rows[:, None]) * K_PADDED + ks[None, :]
    in_copy = in_rows[:, None] & (ks < K_PADDED)[None, :]
    for i in tl.static_range(len(DIGITS)):
        p = DIGITS[i][0]
        value = d3 * DIGITS[i][3] + d2 * DIGITS[i][2] + d1 * DIGITS[i][1] + d0
        # Adding 1.5 * 2^23 and taking it away rounds to an integer. The quotient errs by less than 2^-7.5
        # before that, which moves a remainder past p / 2 by less than 1.5: to 127 at the most. Modulo 256,
        # where d0 alone counts, 128 wraps to -128.
        quotient = (value * (1.0 / p) + 12582912.0) - 12582912.0
        residue = value - quotient * p
        tl.store(to_rows, residue.to(tl.int32).to(tl.int8), mask=in_copy)
        to_rows += stride_part
        if moduli_ptr is not None:
            tl.store(moduli_ptr + i, p * 1.0, mask=(tl.program_id(0) == 0) & (matrix == 0))


@triton.jit
def join_residues(
    parts_ptr, a_exponents_ptr, b_exponents_ptr, out_ptr,
    M, N, stride_part, stride_pm, stride_om, stride_on,
    matrices, a_matrices, b_matrices, batch_shape, out_batch_strides, extra,
    EPILOGUE: tl.constexpr, WEIGHTS: tl.constexpr, RANGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[matrix] = the number with the remainders parts[:, matrix], with the scales of its vectors undone.

    Of all such numbers the one nearest 0, rounded to float64, and again where the scales make it subnormal.
    Elements of UNFIT vectors are left alone.
    WEIGHTS has, for each modulus, three parts, of 41 bits or less, of the multiple of all others that is 1
    modulo this one; RANGE has the product of all moduli, in three parts of the same places.
    Every sum but the last two is exact in float64. EPILOGUE, `extra`: see `finished`.
    """
    matrix = batch_index(False)
    if matrix >= matrices:
        return
    across = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < M
    in_columns = columns < N
    a_exponents_ptr += (matrix % a_matrices).to(tl.int64) * M
    b_exponents_ptr += (matrix % b_matrices).to(tl.int64) * N
    of_rows = tl.load(a_exponents_ptr + rows, mask=in_rows, other=0)
    of_columns = tl.load(b_exponents_ptr + columns, mask=in_columns, other=0)
    in_parts = in_rows[:, None] & (columns < stride_pm)[None, :]  # whole words, past N where rows are padded
    parts = parts_ptr + ((matrix.to(tl.int64) * M + rows[:, None]) * stride_pm + columns[None, :])
    high = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
    middle = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
    low = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
    for i in tl.static_range(len(WEIGHTS)):
        residue = tl.load(parts, mask=in_parts, other=0).to(tl.float64)
        high += residue * tl.full((), WEIGHTS[i][0], tl.float64)
        middle += residue * tl.full((), WEIGHTS[i][1], tl.float64)
        low += residue * tl.full((), WEIGHTS[i][2], tl.float64)
        parts += stride_part
    turns = high * tl.full((), 1.0 / RANGE[0], tl.float64)
    turns = (turns + 6755399441055744.0) - 6755399441055744.0  # to the nearest integer
    high -= turns * tl.full((), RANGE[1], tl.float64)
    middle -= turns * tl.full((), RANGE[2], tl.float64)
    low -= turns * tl.full((), RANGE[3], tl.float64)
    # high + middle = total + lost, exactly (Knuth's two-sum).
    total = high + middle
    moved = total - high
    lost = (high - (total - moved)) + (middle - moved)
    value = total + (lost + low)
    # Undoing the scales may pass both ends of float64: in two steps, of which only the last may round.
    exponent = -(of_rows[:, None] + of_columns[None, :])
    first = tl.minimum(tl.maximum(exponent, -900), 900)
    second = tl.minimum(tl.maximum(exponent - first, -1000), 1000)
    value = value * power_of_two(first) * power_of_two(second)
    if EPILOGUE is not None:
        value = finished(value, rows, columns, M, N, (matrix,), batch_shape, extra, EPILOGUE)
    fit = (of_rows != UNFIT)[:, None] & (of_columns != UNFIT)[None, :]
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, 1)
    to = out_ptr + (rows[:, None] * stride_om + columns[None, :] * stride_on)
    tl.store(to, value, mask=in_rows[:, None] & in_columns[None, :] & fit)


@triton.jit
def multiply_unfit(
    a_ptr, b_ptr, a_exponents_ptr, b_exponents_ptr, out_ptr,
    M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_on,
    matrices, a_matrices, b_matrices, batch_shape, a_batch_strides, b_batch_strides, out_batch_strides, extra,
    EPILOGUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[matrix] = a[matrix] @ b[matrix] in plain float64, where a row of a or a column of b is UNFIT.

    A program whose tile has no such element ends at once; elements of fit vectors are left alone.
    EPILOGUE, `extra`: see `finished`.
    """
    matrix = batch_index(False)
    if matrix >= matrices:
        return
    across = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < M
    in_columns = columns < N
    a_exponents_ptr += (matrix % a_matrices).to(tl.int64) * M
    b_exponents_ptr += (matrix % b_matrices).to(tl.int64) * N
    unfit_rows = tl.load(a_exponents_ptr + rows, mask=in_rows, other=0) == UNFIT
    unfit_columns = tl.load(b_exponents_ptr + columns, mask=in_columns, other=0) == UNFIT
    found = tl.max(unfit_rows.to(tl.int32), axis=0) + tl.max(unfit_columns.to(tl.int32), axis=0)
    if found == 0:
        return
    ks = tl.arange(0, BLOCK_K)
    a_ptr += batch_offset(matrix, batch_shape, a_batch_strides, 1)
    b_ptr += batch_offset(matrix, batch_shape, b_batch_strides, 1)
    out_ptr += batch_offset(matrix, batch_shape, out_batch_strides, 1)
    a_ptrs = a_ptr + (rows[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak)  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + (ks[:, None].to(tl.int64) * stride_bk + columns[None, :] * stride_bn)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
    for k in range(0, K, BLOCK_K):
        in_k = ks < K - k
        a = tl.load(a_ptrs, mask=in_rows[:, None] & in_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=in_columns[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float64)
        a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
    if EPILOGUE is not None:
        acc = finished(acc, rows, columns, M, N, (matrix,), batch_shape, extra, EPILOGUE)
    to = out_ptr + (rows[:, None] * stride_om + columns[None, :] * stride_on)
    unfit = unfit_rows[:, None] | unfit_columns[None, :]
    tl.store(to, acc, mask=in_rows[:, None] & in_columns[None, :] & unfit)
