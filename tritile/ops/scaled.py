"""`tritile.scaled_matmul`: products of fp8 and int8 with scales, as quantized models use them."""

from dataclasses import replace
from typing import Final

import torch

from tritile.core.epilogue import Activation
from tritile.core.problem import FP8_DTYPES, SCALE_K
from tritile.errors import DtypeError, ShapeError
from tritile.ops.checks import check_tensor, describe, name_of, shapes
from tritile.ops.dispatch import public
from tritile.ops.memo import Key, Tensors, launch_cached
from tritile.ops.products import Product, product_of
from tritile.ops.request import computed, requests

_OP: Final = "scaled_matmul"
_DTYPES: Final = (*FP8_DTYPES, "int8")


@public
def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return activation((a * scale_a) @ (b * scale_b) + bias) + residual, like `torch._scaled_mm`.

    Args:
        a: (M, K), in float8_e4m3fn, float8_e5m2 or int8, with any strides. Contiguous rows that start on 16
            bytes are fastest.
        b: (K, N), in either fp8 dtype if a is fp8, in int8 if a is; with any strides. Contiguous columns that
            start on 16 bytes are fastest.
        scale_a: float32: one element; (M, 1), a scale for each row; or, for fp8, block scales, one for each
            128 of K, in the shape (M, ceil(K / 128)) or (ceil(M / 128), ceil(K / 128)).
        scale_b: float32: one element; (1, N), a scale for each column; or block scales if scale_a has them,
            (ceil(K / 128), N) or (ceil(K / 128), ceil(N / 128)).
        out_dtype: bfloat16 (the default), float16 or float32.
        bias: as in `tritile.linear`.
        activation: as in `tritile.linear`.
        residual: as in `tritile.linear`.
        out: as in `tritile.linear`.
        use_fast_accum: True keeps fp8 sums in the tensor cores, which hold 14 bits of them on Hopper. False
            moves sums to fp32 block by block, as block scales always do.

    int8 sums are exact in int32 and scaled in float32. On a GPU, only torch computes block scales: on Hopper,
    for contiguous rows of a and columns of b that start on 16 bytes, with N and K multiples of 16. Bias,
    activation and residual are then added to torch's float32 sums in separate launches, and the result is
    rounded once.

    Differentiable with respect to bias and residual only.

    Returns:
        The result, (M, N). It is `out` if that was passed.

    Raises:
        TritileError: the same errors as `tritile.matmul`.
        UnsupportedError: also for block scales on a GPU, if torch does not take the operands, in
            batch-invariant calls, and with `backends="triton"`.

    Examples:
        >>> a = torch.randint(-9, 9, (50, 64), device="cuda", dtype=torch.int8)
        >>> b = torch.randint(-9, 9, (64, 32), device="cuda", dtype=torch.int8)
        >>> scale_a, scale_b = torch.rand(50, 1, device="cuda"), torch.rand(1, 32, device="cuda")
        >>> tritile.scaled_matmul(a, b, scale_a, scale_b).dtype
        torch.bfloat16
    """
    tensors = (a, b, scale_a, scale_b, bias, residual)
    options = (out_dtype, activation, use_fast_accum)
    return launch_cached(_OP, tensors, out, options, computed)


def _blocks(size: int) -> int:
    return -(-size // SCALE_K)


def _sharing(scale: torch.Tensor, rows: int, k: int) -> int | None:
    """Return how many rows share a scale of (blocks of rows, blocks of K), None for any other shape."""
    shape, blocks = tuple(scale.shape), _blocks(k)
    return 1 if shape == (rows, blocks) else SCALE_K if shape == (_blocks(rows), blocks) else None


@requests(_OP)
def _scaled_of(op: str, tensors: Tensors, options: Key) -> Product:
    """Return the request, by how its scales are shaped. Raise ShapeError if they fit no way of scaling."""
    a, b, scale_a, scale_b, *_ = tensors
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(op, name, tensor, rank=2)
        if name_of(tensor.dtype) not in _DTYPES:
            raise DtypeError(f"{op}: {name} is {describe(tensor)}: expected one of {', '.join(_DTYPES)}")
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
        check_tensor(op, name, tensor, like=a, dtypes=(torch.float32,))
    of, (m, k), n = product_of(op, tensors, options), a.shape, b.shape[1]
    is_fp8, is_fast = name_of(a.dtype) in FP8_DTYPES, options[2]
    by_row = scale_a.numel() == 1 or tuple(scale_a.shape) == (m, 1)
    if by_row and (scale_b.numel() == 1 or tuple(scale_b.shape) == (1, n)):
        scales = {"scale_a": scale_a, "scale_b": scale_b}
        scales = {name: each.reshape(()) if each.numel() == 1 else each for name, each in scales.items()}
        return replace(of, sides={**of.sides, **scales}, precision="fast" if is_fast and is_fp8 else None)
    of_a, of_b = _sharing(scale_a, m, k), _sharing(scale_b.t() if scale_b.ndim == 2 else scale_b, n, k)
    if of_a is None or of_b is None or not is_fp8:
        expected_a, expected_b = f"one element, ({m}, 1)", f"one element, (1, {n})"
        if is_fp8:
            expected_a += f", or ({m} or {_blocks(m)}, {_blocks(k)})"
            expected_b += f", or ({_blocks(k)}, {n} or {_blocks(n)})"
        raise ShapeError(
            f"{op}: {shapes(scale_a=scale_a, scale_b=scale_b)}: expected {expected_a} for scale_a and "
            f"{expected_b} for scale_b, either both or neither with a scale for each {SCALE_K} of K"
        )
    sides = {name: side for name, side in of.sides.items() if name not in ("scale_a", "scale_b")}
    return replace(of, sides=sides, scales=(scale_a, scale_b), block_scales=f"{of_a}x{of_b}")
