"""`tritile.scaled_matmul`: products of fp8 and int8 with scales, as quantised models have them."""

from typing import Any, Final

import torch

from tritile.core.problem import FP8_DTYPES, SCALE_K
from tritile.errors import DtypeError, ShapeError
from tritile.ops.checks import check_rank, check_same_device, check_tensor, describe, name_of
from tritile.ops.described import Extras
from tritile.ops.dispatch import dispatched, diverted
from tritile.ops.fused import Product, check_activation, fused_product
from tritile.ops.recall import Tensors, again, met

_OP: Final = "scaled_matmul"
_BLOCK: Final = SCALE_K
_QUANTISED: Final = (*FP8_DTYPES, "int8")


def _check_operands(a: Any, b: Any, scale_a: Any, scale_b: Any) -> None:
    for name, tensor in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b)):
        check_tensor("scaled_matmul", name, tensor)
        check_same_device("scaled_matmul", a, name, tensor)
    for name, tensor in (("a", a), ("b", b)):
        if name_of(tensor.dtype) not in _QUANTISED:
            wanted = ", ".join(_QUANTISED)
            raise DtypeError(f"scaled_matmul: {name} is {describe(tensor)}: wanted one of {wanted}")
        check_rank("scaled_matmul", name, tensor, 2)
    if a.shape[1] != b.shape[0]:
        raise ShapeError(
            f"scaled_matmul: a is {tuple(a.shape)} and b {tuple(b.shape)}: "
            f"the last dimension of a, {a.shape[1]}, is not b's {b.shape[0]}"
        )
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
        if tensor.dtype != torch.float32:
            raise DtypeError(f"scaled_matmul: {name} is {describe(tensor)}: wanted float32")


def _blocks(size: int, shared: int) -> int:
    return -(-size // shared)


def _shared(scale: torch.Tensor, rows: int, k: int) -> int | None:
    """How many rows share a scale of (blocks of rows, blocks of K), None where it has no such shape."""
    for shared in (1, _BLOCK):
        if tuple(scale.shape) == (_blocks(rows, shared), _blocks(k, _BLOCK)):
            return shared
    return None


def _extras(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> Extras:
    """The scales by their shapes. Raises ShapeError where these fit no way of scaling."""
    (m, k), n = a.shape, b.shape[1]
    plain_a = scale_a.numel() == 1 or tuple(scale_a.shape) == (m, 1)
    plain_b = scale_b.numel() == 1 or tuple(scale_b.shape) == (1, n)
    if plain_a and plain_b:
        one_a, one_b = (scale.reshape(()) if scale.numel() == 1 else scale for scale in (scale_a, scale_b))
        return Extras(one_a, one_b)
    of_a, of_b = _shared(scale_a, m, k), _shared(scale_b.t() if scale_b.ndim == 2 else scale_b, n, k)
    if of_a is None or of_b is None or name_of(a.dtype) not in FP8_DTYPES:
        wanted_a = f"one element, ({m}, 1)"
        wanted_b = f"one element, (1, {n})"
        if name_of(a.dtype) in FP8_DTYPES:
            blocks = _blocks(k, _BLOCK)
            wanted_a += f", or ({m} or {_blocks(m, _BLOCK)}, {blocks})"
            wanted_b += f", or ({blocks}, {n} or {_blocks(n, _BLOCK)})"
        raise ShapeError(
            f"scaled_matmul: scale_a is {tuple(scale_a.shape)} and scale_b {tuple(scale_b.shape)}: wanted "
            f"{wanted_a}, and {wanted_b}; for each {_BLOCK} of K either both or neither"
        )
    return Extras(blocks=(scale_a, scale_b), shared=f"{of_a}x{of_b}")


def _zeros(a: torch.Tensor, b: torch.Tensor, zero_a: Any, zero_b: Any) -> dict[str, Any]:
    """Zero points by the names of `Extras`. Raises a TritileError where they fit no way of taking them."""
    found = {}
    for name, zero, rows in (("zero_a", zero_a, (a.shape[0], 1)), ("zero_b", zero_b, (1, b.shape[1]))):
        if zero is None:
            continue
        check_tensor(_OP, name, zero)
        check_same_device(_OP, a, name, zero)
        if a.dtype != torch.int8:
            raise DtypeError(f"{_OP}: {name} is given for a of {name_of(a.dtype)}: wanted int8")
        if zero.dtype not in (torch.int32, torch.int8):
            raise DtypeError(f"{_OP}: {name} is {describe(zero)}: wanted int32 or int8")
        if zero.numel() != 1 and tuple(zero.shape) != rows:
            raise ShapeError(f"{_OP}: {name} is {tuple(zero.shape)}: wanted one element or {rows}")
        found[name] = zero.reshape(()) if zero.numel() == 1 else zero
    return found


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    zero_a: torch.Tensor | None = None,
    zero_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation((a * scale_a) @ (b * scale_b) + bias) + residual, with the meaning of `torch._scaled_mm`.

    Args:
        a: (M, K), float8_e4m3fn, float8_e5m2 or int8.
        b: (K, N), either fp8 type where a is one, int8 where a is. Any strides; fastest are rows of a and
            columns of b that are contiguous and start on 16 bytes.
        scale_a: float32. One element; (M, 1), one for each row; or, for fp8, one for each 128 of K:
            (M, ceil(K / 128)) or (ceil(M / 128), ceil(K / 128)).
        scale_b: float32. One element; (1, N); or (ceil(K / 128), N) or (ceil(K / 128), ceil(N / 128)),
            where scale_a has one for each 128 of K too.
        out_dtype: bfloat16 (the default), float16 or float32.
        bias: as `tritile.linear` takes it.
        activation: likewise.
        residual: likewise.
        out: likewise.
        use_fast_accum: leave sums of fp8 to the tensor cores, which on Hopper keep 14 bits of them.
            Otherwise, and always where each 128 of K has its scale, they are moved to fp32 as it goes.
        zero_a: of int8 operands: int32 or int8, one element or (M, 1), taken from a before it is scaled.
        zero_b: the same of b: one element or (1, N).

    int8 sums, and what zero points take from them, are exact in int32, and scaled in float32: a sum of
    (a - zero_a) (b - zero_b) beyond int32 is not defined.

    Differentiable by bias and residual alone.

    Raises as `tritile.matmul` does, before any launch.
    """
    tensors = (a, b, scale_a, scale_b, bias, residual, zero_a, zero_b)
    if dispatched(*tensors, out):
        words: dict[str, Any] = {"bias": bias, "residual": residual, "zero_a": zero_a, "zero_b": zero_b}
        words |= {"out_dtype": out_dtype, "activation": activation, "use_fast_accum": use_fast_accum}
        return diverted(_OP, a, b, scale_a, scale_b, out=out, **words)
    return eager(tensors, activation, use_fast_accum, out, out_dtype)


def eager(tensors: Tensors, activation: Any, use_fast_accum: bool, out: Any, out_dtype: Any) -> torch.Tensor:
    """`scaled_matmul` of plain tensors, which is what its operator runs on CUDA and CPU."""
    a = tensors[0]
    key, ready = met(_OP, a, tensors, out, (out_dtype, activation, use_fast_accum))
    if ready is not None:
        return again(_OP, ready, tensors, out)
    of, precision = scaled_of(tensors, activation, use_fast_accum)
    return fused_product(of, out, out_dtype, precision, key)


def scaled_of(tensors: Tensors, activation: Any, use_fast_accum: bool) -> tuple[Product, str | None]:
    """The product that `scaled_matmul` makes, and its precision. Raises a TritileError where nothing fits."""
    a, b, scale_a, scale_b, bias, residual, zero_a, zero_b = tensors
    _check_operands(a, b, scale_a, scale_b)
    extras = _extras(a, b, scale_a, scale_b)
    extras = extras._replace(**_zeros(a, b, zero_a, zero_b))
    extras = extras._replace(bias=bias, residual=residual, activation=check_activation(_OP, activation))
    fast = use_fast_accum and extras.blocks is None and a.dtype != torch.int8
    return Product(_OP, tensors, a, b, extras), "fast" if fast else None
