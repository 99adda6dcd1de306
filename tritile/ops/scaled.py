"""Offer `tritile.scaled_matmul`: products of fp8 and int8 with scales, as quantized models have them."""

from typing import Any, Final

import torch

from tritile.core.problem import FP8_DTYPES, SCALE_K, Activation
from tritile.errors import DtypeError, ShapeError
from tritile.ops.call import computed, requests
from tritile.ops.checks import check_operand, check_rank, describe, name_of
from tritile.ops.fused import check_activation
from tritile.ops.memo import recall
from tritile.ops.products import Product

_OP: Final = "scaled_matmul"
_BLOCK: Final = SCALE_K
_QUANTISED: Final = (*FP8_DTYPES, "int8")


def _check_operands(a: Any, b: Any, scale_a: Any, scale_b: Any) -> None:
    for name, tensor in (("a", a), ("b", b)):
        check_rank(_OP, name, tensor, 2)
        if name_of(tensor.dtype) not in _QUANTISED:
            wanted = ", ".join(_QUANTISED)
            raise DtypeError(f"{_OP}: {name} is {describe(tensor)}: wanted one of {wanted}")
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
        check_operand(_OP, a, name, tensor, (torch.float32,))


def _blocks(size: int, shared: int) -> int:
    return -(-size // shared)


def _shared(scale: torch.Tensor, rows: int, k: int) -> int | None:
    """Return how many rows share a scale of (blocks of rows, blocks of K), None for any other shape."""
    for shared in (1, _BLOCK):
        if tuple(scale.shape) == (_blocks(rows, shared), _blocks(k, _BLOCK)):
            return shared
    return None


def _scaling(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> tuple[dict[str, torch.Tensor], str]:
    """Return scales of the sums, by name, or none and what shares a scale within the sums.

    Raise ShapeError where the shapes fit no way of scaling.
    """
    (m, k), n = a.shape, b.shape[1]
    plain_a = scale_a.numel() == 1 or tuple(scale_a.shape) == (m, 1)
    plain_b = scale_b.numel() == 1 or tuple(scale_b.shape) == (1, n)
    if plain_a and plain_b:
        one_a, one_b = (scale.reshape(()) if scale.numel() == 1 else scale for scale in (scale_a, scale_b))
        return {"scale_a": one_a, "scale_b": one_b}, ""
    of_a, of_b = _shared(scale_a, m, k), _shared(scale_b.t() if scale_b.ndim == 2 else scale_b, n, k)
    if of_a is None or of_b is None or name_of(a.dtype) not in FP8_DTYPES:
        wanted_a = f"one element, ({m}, 1)"
        wanted_b = f"one element, (1, {n})"
        if name_of(a.dtype) in FP8_DTYPES:
            blocks = _blocks(k, _BLOCK)
            wanted_a += f", or ({m} or {_blocks(m, _BLOCK)}, {blocks})"
            wanted_b += f", or ({blocks}, {n} or {_blocks(n, _BLOCK)})"
        raise ShapeError(
            f"{_OP}: scale_a has shape {tuple(scale_a.shape)} and scale_b {tuple(scale_b.shape)}: "
            f"wanted {wanted_a}, and {wanted_b}; both or neither with a scale for each {_BLOCK} of K"
        )
    return {}, f"{of_a}x{of_b}"


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


@requests(_OP)
def scaled_of(
    a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any, bias: Any, activation: Any, residual: Any,
    use_fast_accum: bool,
) -> Product:  # fmt: skip
    _check_operands(a, b, scale_a, scale_b)
    sides, block_scales = _scaling(a, b, scale_a, scale_b)
    fast = use_fast_accum and not block_scales and a.dtype != torch.int8
    return Product(
        _OP, (a, b, scale_a, scale_b, bias, residual), a, b, out_dtype, "fast" if fast else None,
        {**sides, "bias": bias, "residual": residual}, check_activation(_OP, activation),
        scales=(scale_a, scale_b) if block_scales else (), block_scales=block_scales,
    )  # fmt: skip
