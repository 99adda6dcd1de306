# mypy: ignore-errors
# The body of a jitted function is Triton's language, to which Python's types do not apply.
"""Triton's tutorial matmul as a baseline, each case tuned by triton.autotune."""

from collections.abc import Callable
from typing import Final

import torch
import triton
import triton.language as tl

DTYPES: Final = ("float16", "bfloat16", "float32")

# BLOCK_M, BLOCK_N, BLOCK_K, warps, stages: the tutorial's. With aligned rows of 16-bit types the deepest need
# more shared memory than there is, and triton.autotune skips them; with odd rows they run.
_TILES: Final = (
    (128, 256, 64, 8, 3), (64, 256, 32, 4, 4), (128, 128, 32, 4, 4), (128, 64, 32, 4, 4),
    (64, 128, 32, 4, 4), (128, 32, 32, 4, 4), (64, 32, 32, 2, 5), (32, 64, 32, 2, 5),
    (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 32, 64, 4, 4), (128, 256, 128, 8, 3),
    (256, 128, 128, 8, 3), (256, 64, 128, 4, 4), (64, 256, 128, 4, 4), (128, 128, 128, 4, 4),
)  # fmt: skip
CONFIGS: Final = [
    triton.Config(
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages
    )
    for m, n, k, warps, stages in _TILES
]


@triton.jit
def tutorial_kernel(
    a_ptr, b_ptr, out_ptr,
    M, N, K,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_ob, stride_om, stride_on,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[i] = a[i] @ b[i], a program for each tile of out (axis 0) of each product (axis 1).

    Rows and columns past an edge wrap around to the first ones and are never stored; loads are masked
    along K alone. Offsets within a matrix are of 32 bits.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = GROUP_M * tiles_n
    first = tl.program_id(0) // band * GROUP_M
    height = min(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    within = tl.program_id(0) % band
    row = first + within % height
    column = within // height
    tl.assume(row >= 0)
    tl.assume(column >= 0)
    tl.assume(stride_am > 0)
    tl.assume(stride_ak > 0)
    tl.assume(stride_bk > 0)
    tl.assume(stride_bn > 0)
    tl.assume(stride_om > 0)
    tl.assume(stride_on > 0)

    matrix = tl.program_id(1).to(tl.int64)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    ks = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    a_ptrs = a_ptr + matrix * stride_ab + ((rows % M)[:, None] * stride_am + ks[None, :] * stride_ak)
    b_ptrs = b_ptr + matrix * stride_bb + (ks[:, None] * stride_bk + (columns % N)[None, :] * stride_bn)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        in_k = ks < K - k * BLOCK_K
        a = tl.load(a_ptrs, mask=in_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        b = tl.load(b_ptrs, mask=in_k[:, None], other=0.0)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    out_ptrs = out_ptr + matrix * stride_ob + (rows[:, None] * stride_om + columns[None, :] * stride_on)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def arguments(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, precision: str) -> tuple:
    """Return the kernel's arguments for out = a @ b, its tile sizes left out.

    All three tensors have shape (batch, rows, columns).
    """
    sizes = (a.shape[1], b.shape[2], a.shape[2])
    return (a, b, out, *sizes, *a.stride(), *b.stride(), *out.stride(), precision)


def grid_of(batch: int, m: int, n: int) -> Callable[[dict], tuple[int, int]]:
    """Return the kernel's grid as a function of a config's blocks."""
    return lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]), batch)


def configs_for(itemsize: int) -> list[triton.Config]:
    """Return the configs to try, without those that never fit 4-byte elements and compile for minutes."""
    return [config for config in CONFIGS if itemsize < 4 or config.kwargs["BLOCK_K"] < 128]


def tuned(itemsize: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, str], None]:
    """Return the kernel as a function of a, b, out and a precision; its first call measures the configs.

    The tensors have shape (batch, rows, columns).
    """
    kernel = triton.autotune(configs=configs_for(itemsize), key=[])(tutorial_kernel)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, precision: str) -> None:
        kernel[grid_of(*out.shape)](*arguments(a, b, out, precision))

    return run
