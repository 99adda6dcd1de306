"""Finish the sums of a product before they are stored, in the same way in every family of kernels."""

import triton
import triton.language as tl


@triton.jit
def side_tile(
    extra, WHICH: tl.constexpr, SPREAD: tl.constexpr, rows, columns, M, N, index, shape
):  # fmt: skip
    """Return the part of operand WHICH that goes with a tile, zero past the result's edges.

    In fp32; fp64 stays.

    SPREAD says whether it differs by row and column. `index` is the matrix of the batch, as one number or as
    many as `shape` has.
    """
    FIRST: tl.constexpr = WHICH * (3 + len(shape))
    ptr = extra[FIRST]
    matrix = index[0]
    for i in tl.static_range(len(shape)):
        step = extra[FIRST + 2 + len(shape) - i]
        if len(index) == len(shape):
            ptr += index[len(shape) - 1 - i].to(tl.int64) * step
        else:
            ptr += (matrix % shape[len(shape) - 1 - i]).to(tl.int64) * step
            matrix = matrix // shape[len(shape) - 1 - i]
    by_row = rows[:, None].to(tl.int64) * extra[FIRST + 1]
    by_column = columns[None, :].to(tl.int64) * extra[FIRST + 2]
    if SPREAD == "one":
        part = tl.load(ptr)
    elif SPREAD == "row":
        part = tl.load(ptr + by_column, mask=columns[None, :] < N, other=0.0)
    elif SPREAD == "column":
        part = tl.load(ptr + by_row, mask=rows[:, None] < M, other=0.0)
    else:
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        part = tl.load(ptr + by_row + by_column, mask=inside, other=0.0)
    if part.dtype != tl.float64:
        part = part.to(tl.float32)
    return part


@triton.jit
def gelu(x):
    """x times the normal distribution's share below x: in fp32 by 26 instructions, with libdevice's erf 65.

    The share below -|x| is t 2^(p(t) - x^2 / (2 ln 2)) with t = 1 / (1 + 0.39 |x|), a substitution after
    Hastings, Approximations for Digital Computers (1955). p is fitted for the least largest error over
    |x| <= 13: 7e-8 of the share. Rounding makes that 6e-7 of the result, and below 0 another x^2 1e-7 of it.
    """
    if x.dtype == tl.float64:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        t = 1.0 / (1.0 + 0.39 * tl.abs(x))
        p = -1.367684006690979 + t * 0.2572053074836731
        p = 2.8571693897247314 + t * p
        p = -2.7418699264526367 + t * p
        p = 0.9925469160079956 + t * p
        p = -0.31559357047080994 + t * p
        p = 0.5657621622085571 + t * p
        p = 1.436403751373291 + t * p
        p = -2.6839401721954346 + t * p
        power = tl.exp2(p - 0.7213475204444817 * x * x)
        # Fused as written, and not with what comes next, or the bits would differ from kernel to kernel.
        share = tl.where(x > 0, tl.fma(-t, power, 1.0), t * power)
        x = tl.fma(x, share, 0.0)
    return x


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply torch.nn.functional's activation of this name; "gelu_tanh" is gelu's approximation by tanh."""
    if ACTIVATION == "relu":
        x = tl.where(x <= 0, 0.0, x)  # NaN stays, as in torch
    elif ACTIVATION == "gelu":
        x = gelu(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u, with u = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def remainder(acc, modulus):
    """int32 sums modulo a whole number from 64 to 256, given in fp32, as near 0 as they go.

    In two turns: fp32 holds 24 bits of a sum, so the first quotient is off by a few, the second right.
    """
    whole = modulus.to(tl.int32)
    inverse = 1.0 / modulus
    acc -= (acc.to(tl.float32) * inverse).to(tl.int32) * whole
    # Adding 1.5 * 2^23 and taking it away rounds to an integer.
    quotient = (acc.to(tl.float32) * inverse + 12582912.0) - 12582912.0
    return acc - quotient.to(tl.int32) * whole


@triton.jit
def weighed(acc, rows, columns, M, N, index, shape, extra, EPILOGUE: tl.constexpr, up):
    """activation(alpha * scale_a * scale_b * acc + beta * bias) + residual, of a tile (see `finished`).

    Gated: what is activated is multiplied by `up` + bias_up.
    """
    WEIGHTS: tl.constexpr = 5 * (3 + len(shape))
    SCALE_A: tl.constexpr = EPILOGUE[0]
    SCALE_B: tl.constexpr = EPILOGUE[1]
    BIAS: tl.constexpr = EPILOGUE[2]
    RESIDUAL: tl.constexpr = EPILOGUE[3]
    ACTIVATION: tl.constexpr = EPILOGUE[4]
    WEIGHTED: tl.constexpr = EPILOGUE[5]
    BIAS_UP: tl.constexpr = EPILOGUE[6]
    if acc.dtype != tl.float64:
        acc = acc.to(tl.float32)
    if SCALE_A != "":
        acc = acc * side_tile(extra, 0, SCALE_A, rows, columns, M, N, index, shape)
    if SCALE_B != "":
        acc = acc * side_tile(extra, 1, SCALE_B, rows, columns, M, N, index, shape)
    if BIAS != "":
        bias = side_tile(extra, 2, BIAS, rows, columns, M, N, index, shape)
        if WEIGHTED:
            # Fused as written: LLVM fuses either product, by kernel and by how bias varies.
            bias = bias * extra[WEIGHTS + 1]
            if acc.dtype == tl.float64:  # constants, which tl.fma alone would round to fp32
                acc = tl.fma(acc, tl.zeros((1, 1), tl.float64) + extra[WEIGHTS], bias)
            else:
                acc = tl.fma(acc, extra[WEIGHTS], bias)
        else:
            acc = acc + bias
    elif WEIGHTED:
        acc = acc * extra[WEIGHTS]
    acc = activated(acc, ACTIVATION)
    if up is not None:
        if BIAS_UP != "":
            up = up + side_tile(extra, 4, BIAS_UP, rows, columns, M, N, index, shape)
        acc = acc * up
    if RESIDUAL != "":
        acc = acc + side_tile(extra, 3, RESIDUAL, rows, columns, M, N, index, shape)
    return acc


@triton.jit
def finished(acc, rows, columns, M, N, index, shape, extra, EPILOGUE: tl.constexpr, up=None):
    """Apply what `tritile.problem.Epilogue` says to a tile of a product; `up` is the other one where gated.

    `rows` and `columns` are the tile's, in the result. `extra` holds, for each operand in this order, its
    pointer, its strides of rows and columns, and those of the batch; then alpha and beta. (In one tuple: of
    tuples within tuples Triton 3.6 loses strides of 1.) EPILOGUE: `tritile.problem.Epilogue.constants`.
    """
    MODULUS: tl.constexpr = EPILOGUE[0]
    ACTIVATION: tl.constexpr = EPILOGUE[4]
    if ACTIVATION == "remainder":
        acc = remainder(acc, side_tile(extra, 0, MODULUS, rows, columns, M, N, index, shape))
    else:
        acc = weighed(acc, rows, columns, M, N, index, shape, extra, EPILOGUE, up)
    return acc
