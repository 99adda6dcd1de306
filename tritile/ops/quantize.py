"""`tritile.quantize`: a weight as 4- or 8-bit whole numbers, with a scale for each group of columns."""

from typing import Any, Final

import torch

from tritile.core.problem import GROUP_SIZES, WEIGHT_BITS, scales_shape, words_shape
from tritile.core.quantized import SCALE_DTYPES, QuantizedWeight, by_group, packed
from tritile.errors import DtypeError, InvalidValueError, ShapeError
from tritile.ops.checks import check_constant, check_memory, check_tensor, name_of

_WEIGHTS: Final = (torch.bfloat16, torch.float16, torch.float32)
_AT_ONCE: Final = 1 << 24  # elements that are quantised together, for the sake of memory


def _checked(
    weight: Any, bits: Any, group_size: Any, zero_points: Any, dtype: torch.dtype | None
) -> torch.dtype:
    """The scales' dtype. Raises a TritileError for arguments that do not fit."""
    check_tensor("quantize", "weight", weight)
    check_memory("quantize", weight)
    check_constant("quantize", "weight", weight)
    if weight.dtype not in _WEIGHTS:
        wanted = ", ".join(map(name_of, _WEIGHTS))
        raise DtypeError(f"quantize: weight is {name_of(weight.dtype)}: wanted {wanted}")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ShapeError(f"quantize: weight is {tuple(weight.shape)}: wanted (N, K), neither of them 0")
    for name, value, among in (("bits", bits, WEIGHT_BITS), ("group_size", group_size, GROUP_SIZES)):
        if type(value) is not int or value not in among:
            raise InvalidValueError(f"quantize: {name} is {value!r}: wanted one of {among}")
    if not isinstance(zero_points, bool):
        raise InvalidValueError(f"quantize: zero_points is {zero_points!r}: wanted True or False")
    if dtype is None:
        return weight.dtype if weight.dtype in SCALE_DTYPES else torch.bfloat16
    if dtype not in SCALE_DTYPES:
        raise DtypeError(f"quantize: dtype is {dtype}: wanted {', '.join(map(name_of, SCALE_DTYPES))}")
    return dtype


def _rounded_up(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values of 0 and more in a 16-bit type, none smaller than it was."""
    near = values.to(dtype)
    # The patterns of floats of one sign are in the order of their values.
    return torch.where(near.float() < values, (near.view(torch.int16) + 1).view(dtype), near)


def _rows(
    weight: torch.Tensor, bits: int, group_size: int, zero_points: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers (rows, K) in uint8, and for each group scales in `dtype` and zeros in int16."""
    rows, k = weight.shape
    groups, top, half = -(-k // group_size), 2**bits - 1, 2 ** (bits - 1)
    wide = torch.nn.functional.pad(weight.float(), (0, groups * group_size - k))
    wide = wide.reshape(rows, groups, group_size)
    low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
    # By tensors, as CUDA multiplies by the reciprocal of a number, and scales would not be the host's.
    whole, most = low.new_tensor(float(top)), low.new_tensor(half - 1.0)
    steps = (high / whole - low / whole) if zero_points else torch.maximum(high / most, low / -half)
    scales = _rounded_up(steps, dtype)
    step = scales.float()
    step = torch.where(step == 0, 1.0, step)  # a group of zeros
    zeros = (-low / step).round() if zero_points else torch.full_like(step, half)
    numbers = ((wide / step[..., None]).round() + zeros[..., None]).clamp(0, top)
    largest = ((numbers - zeros[..., None]) * step[..., None]).abs().amax()
    if not bool(largest <= torch.finfo(dtype).max):
        raise InvalidValueError(
            f"quantize: weights as large as {float(wide.abs().amax()):g} overflow {name_of(dtype)}"
        )
    return numbers.to(torch.uint8).reshape(rows, -1)[:, :k], scales, zeros.to(torch.int16)


def quantize(
    weight: torch.Tensor,
    *,
    bits: int,
    group_size: int = 128,
    zero_points: bool = False,
    dtype: torch.dtype | None = None,
) -> QuantizedWeight:
    """A weight as 4- or 8-bit whole numbers and a scale for each group, for `tritile.linear`.

    Args:
        weight: (N, K), bfloat16, float16 or float32, any strides; finite.
        bits: 4 or 8.
        group_size: columns that share a scale: 32, 64 or 128. K may end amid a group.
        zero_points: numbers count from a zero point that each group has of its own: for groups whose
            values lie to one side of 0. Otherwise they are signed.
        dtype: of the scales, and of the activations that the weight will meet: bfloat16 or float16.
            Default: weight's own, bfloat16 for float32.

    Each weight w becomes the nearest of the values q * scale that its group has, so that
    |w - q * scale| <= scale / 2, but for the rounding of w / scale to fp32, some 2^-16 of a scale. The scale
    is the least that reaches over the group, rounded up to `dtype`: (max - min) / (2^bits - 1), 0 being
    among the values, and without zero points the larger of max / (2^(bits - 1) - 1) and
    -min / 2^(bits - 1). It has 16 bits and no more as it is read with every group, and multiplied by in
    that type: q * scale is rounded once more there, by half a unit in the last place at the most.

    Runs on weight's device, in torch, and waits for it; on the meta device it tells shapes. Raises
    ShapeError, DtypeError, GradientError or InvalidValueError for what does not fit, which includes
    infinities and NaN.
    """
    kind = _checked(weight, bits, group_size, zero_points, dtype)
    n, k = weight.shape
    shape = scales_shape(n, k, bits, group_size)
    if weight.is_meta:
        words = torch.empty(words_shape(n, k, bits), dtype=torch.int32, device="meta")
        scales = torch.empty(shape, dtype=kind, device="meta")
        zeros = torch.empty(shape, dtype=torch.int16, device="meta") if zero_points else None
        return QuantizedWeight(words, scales, zeros, bits, group_size, (n, k))
    return _quantized(weight, bits, group_size, zero_points, kind)


def _quantized(
    weight: torch.Tensor, bits: int, group_size: int, zero_points: bool, kind: torch.dtype
) -> QuantizedWeight:
    """Quantise a weight that has values, some rows at a time."""
    n, k = weight.shape
    at_once = max(16, _AT_ONCE // k // 16 * 16)
    words, scales, zeros = [], [], []
    for start in range(0, n, at_once):
        rows = weight[start : start + at_once].resolve_neg()
        if not bool(torch.isfinite(rows).all()):
            row, column = ((~torch.isfinite(rows)).nonzero()[0]).tolist()
            value = float(rows[row, column])
            raise InvalidValueError(
                f"quantize: weight[{start + row}, {column}] is {value}: wanted finite numbers"
            )
        numbers, scale, zero = _rows(rows, bits, group_size, zero_points, kind)
        words.append(packed(numbers, bits))
        scales.append(scale)
        zeros.append(zero)
    shape = scales_shape(n, k, bits, group_size)
    return QuantizedWeight(
        torch.cat(words),
        by_group(torch.cat(scales), shape),
        by_group(torch.cat(zeros), shape) if zero_points else None,
        bits,
        group_size,
        (n, k),
    )
