"""Offer `tritile.scaled_matmul`: products of fp8 and int8 with scales, as quantized models have them."""

from dataclasses import replace
from typing import Final

import torch

from tritile.core.epilogue import Activation
from tritile.core.problem import FP8_DTYPES, SCALE_K
from tritile.errors import DtypeError, ShapeError
from tritile.ops.checks import check_tensor, describe, name_of, shapes
from tritile.ops.memo import Key, Tensors, recall
from tritile.ops.products import Product, product_of
from tritile.ops.request import computed, requests

_OP: Final = "scaled_matmul"
_DTYPES: Final = (*FP8_DTYPES, "int8")


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
    """Return activation((a * scale_a) @ (b * scale_b) + bias) + residual, as `torch._scaled_mm` does.

    Args:
        a: (M, K), float8_e4m3fn, float8_e5m2 or int8. Any strides; contiguous rows that start on 16 bytes are
            fastest.
        b: (K, N), either fp8 dtype where a is one, int8 where a is. Any strides; contiguous columns that
            start on 16 bytes are fastest.
        scale_a: float32. One element; (M, 1), one for each row; or, for fp8, one for each 128 of K: (M,
            ceil(K / 128)) or (ceil(M / 128), ceil(K / 128)). torch alone computes these, on Hopper, for
            contiguous rows of a and columns of b that start on 16 bytes, and N and K multiples of 16.
        scale_b: float32. One element; (1, N), one for each column; or, where scale_a has one for each 128 of
            K, (ceil(K / 128), N) or (ceil(K / 128), ceil(N / 128)).
        out_dtype: bfloat16 (the default), float16 or float32.
        bias: as for `tritile.linear`.
        activation: as for `tritile.linear`.
        residual: as for `tritile.linear`.
        out: as for `tritile.linear`.
        use_fast_accum: leave sums of fp8 to the tensor cores, which on Hopper keep 14 bits. Otherwise, and
            always where each 128 of K has a scale, sums are moved to fp32 block by block.

    int8 sums are exact in int32 and scaled in float32. With scales for each 128 of K, bias, activation and
    residual are added to torch's float32 sums in launches of their own, and the result is rounded once.

    Differentiable with respect to bias and residual only.

    Returns:
        The result, (M, N), in out where that is given.

    Raises:
        TritileError: as `tritile.matmul` raises it.
        UnsupportedError: scales for each 128 of K, on a GPU: where torch does not take the operands; in
            batch-invariant calls; with `backends="triton"`.
    """
    tensors = (a, b, scale_a, scale_b, bias, residual)
    options = (out_dtype, activation, use_fast_accum)
    return recall(_OP, tensors, out, options, computed)


def _blocks(size: int) -> int:
    return -(-size // SCALE_K)


def _sharing(scale: torch.Tensor, rows: int, k: int) -> int | None:
    """Return how many rows share a scale of (blocks of rows, blocks of K), None for any other shape."""
    shape, blocks = tuple(scale.shape), _blocks(k)
    return 1 if shape == (rows, blocks) else SCALE_K if shape == (_blocks(rows), blocks) else None


@requests(_OP)
def _scaled_of(op: str, tensors: Tensors, options: Key) -> Product:
    """Return the request, by how its scales are shaped. Raise ShapeError where they fit no way of scaling."""
    a, b, scale_a, scale_b, *_ = tensors
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(op, name, tensor, rank=2)
        if name_of(tensor.dtype) not in _DTYPES:
            raise DtypeError(f"{op}: {name} is {describe(tensor)}: wanted one of {', '.join(_DTYPES)}")
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
        wanted_a, wanted_b = f"one element, ({m}, 1)", f"one element, (1, {n})"
        if is_fp8:
            wanted_a += f", or ({m} or {_blocks(m)}, {_blocks(k)})"
            wanted_b += f", or ({_blocks(k)}, {n} or {_blocks(n)})"
        raise ShapeError(
            f"{op}: {shapes(scale_a=scale_a, scale_b=scale_b)}: "
            f"wanted {wanted_a}, and {wanted_b}; both or neither with a scale for each {SCALE_K} of K"
        )
    sides = {name: side for name, side in of.sides.items() if name not in ("scale_a", "scale_b")}
    return replace(of, sides=sides, scales=(scale_a, scale_b), block_scales=f"{of_a}x{of_b}")
