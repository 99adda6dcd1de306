"""Make gated products by tensor descriptor: two products in one loop, which share each tile of a."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tritile.families.common.epilogue import finished
from tritile.families.common.tiles import grouped_tile
from tritile.families.matmul_tma.kernel import load_operand, store_tile


@triton.jit
def gated_sums(
    a_desc, b_desc, up_desc, outer, inner, m, n, blocks,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, UP_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of a's rows from m with columns from n of b, and of up."""
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    tl.assume(blocks > 0)
    for block in range(0, blocks):
        a = load_operand(a_desc, outer, inner, m, block * BLOCK_K, A_ROW)
        b = load_operand(b_desc, outer, inner, block * BLOCK_K, n, B_ROW)
        c = load_operand(up_desc, outer, inner, block * BLOCK_K, n, UP_ROW)
        gate = tl.dot(a, b, gate, input_precision=PRECISION, out_dtype=tl.float32)
        up = tl.dot(a, c, up, input_precision=PRECISION, out_dtype=tl.float32)
    return gate, up


@triton.jit(do_not_specialize=("M", "K"))
def gated_descriptor(
    a_desc, b_desc, up_desc, out_desc, out_ptr,
    M, N, K, batch, inner_batch, stride_oo, stride_oi, stride_om, stride_on, extra,
    A_ROW: tl.constexpr, B_ROW: tl.constexpr, UP_ROW: tl.constexpr, BY_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, WAIT: tl.constexpr, FLAT: tl.constexpr, BATCHED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """out[i] = activation(a[i] @ b[i] + bias) * (a[i] @ up[i] + bias_up), tiles by tensor descriptor.

    Parameters are those of `tritile.kernels.descriptor.matmul_descriptor`.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    blocks = tl.cdiv(K, BLOCK_K)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    if PERSISTENT:
        # Not flattened into one loop with that over K: ptxas then serialises the products, as two sums begin
        # anew amid it.
        for index in range(tl.program_id(0), tiles * batch, tl.num_programs(0)):
            outer = index // tiles // inner_batch
            inner = index // tiles % inner_batch
            row, column = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
            m = row * BLOCK_M
            n = column * BLOCK_N
            gate, up = gated_sums(
                a_desc, b_desc, up_desc, outer, inner, m, n, blocks, A_ROW, B_ROW, UP_ROW,
                BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            )  # fmt: skip
            rows = m + tl.arange(0, BLOCK_M)
            columns = n + tl.arange(0, BLOCK_N)
            made = finished(gate, rows, columns, M, N, (outer, inner), (1, 1), extra, EPILOGUE, up)
            store_tile(
                out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, made,
                None, BY_DESCRIPTOR, SUBTILES, None,
            )  # fmt: skip
    else:
        if FLAT:
            row = tl.program_id(0)
            column = tl.program_id(1)
            matrix = tl.program_id(2)
        else:
            matrix = tl.program_id(0) // tiles
            row, column = grouped_tile(tl.program_id(0) % tiles, tiles_m, tiles_n, GROUP_M)
        outer = row * 0
        inner = row * 0
        if BATCHED:
            outer = matrix // inner_batch
            inner = matrix % inner_batch
        m = row * BLOCK_M
        n = column * BLOCK_N
        gate, up = gated_sums(
            a_desc, b_desc, up_desc, outer, inner, m, n, blocks, A_ROW, B_ROW, UP_ROW,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        rows = m + tl.arange(0, BLOCK_M)
        columns = n + tl.arange(0, BLOCK_N)
        made = finished(gate, rows, columns, M, N, (outer, inner), (1, 1), extra, EPILOGUE, up)
        store_tile(
            out_desc, out_ptr, stride_oo, stride_oi, stride_om, stride_on, outer, inner, m, n, M, N, made,
            None, BY_DESCRIPTOR, SUBTILES, None,
        )  # fmt: skip
