"""`tritile.quantize`: a weight as 4- or 8-bit integers, with a scale for each group of columns."""

from typing import Any, Final

import torch
from torch.overrides import handle_torch_function

from tritile.core.problem import GROUP_SIZES, WEIGHT_BITS, GroupSize, WeightBits, scales_shape, words_shape
from tritile.core.quantized import SCALE_DTYPES, QuantizedWeight, by_group, packed
from tritile.errors import DtypeError, InvalidValueError, ShapeError
from tritile.ops.checks import check_constant, check_memory, check_tensor, name_of, names_of
from tritile.ops.dispatch import is_overridden

_WEIGHTS: Final = (torch.bfloat16, torch.float16, torch.float32)
_AT_ONCE: Final = 1 << 24  # elements that are quantized at a time, to save memory


def _checked(
    weight: Any, bits: Any, group_size: Any, zero_points: Any, dtype: torch.dtype | None
) -> torch.dtype:
    """Return the dtype of the scales. Raises a TritileError for arguments that do not fit."""
    check_tensor("quantize", "weight", weight)
    check_memory("quantize", weight)
    check_constant("quantize", weight=weight)
    if weight.dtype not in _WEIGHTS:
        raise DtypeError(f"quantize: weight is {name_of(weight.dtype)}: expected {names_of(_WEIGHTS)}")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ShapeError(f"quantize: weight has shape {tuple(weight.shape)}: expected (N, K), both 1 or more")
    for name, value, among in (("bits", bits, WEIGHT_BITS), ("group_size", group_size, GROUP_SIZES)):
        if type(value) is not int or value not in among:
            raise InvalidValueError(f"quantize: {name} is {value!r}: expected one of {among}")
    if not isinstance(zero_points, bool):
        raise InvalidValueError(f"quantize: zero_points is {zero_points!r}: expected True or False")
    if dtype is None:
        return weight.dtype if weight.dtype in SCALE_DTYPES else torch.bfloat16
    if dtype not in SCALE_DTYPES:
        expected = " or ".join(map(str, SCALE_DTYPES))
        raise DtypeError(f"quantize: dtype is {dtype!r}: expected {expected}")
    return dtype


def _rounded_up(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round non-negative float32 values up to a 16-bit dtype."""
    near = values.to(dtype)
    # Bit patterns of floats of one sign are in the order of their values: + 1 is the next larger float.
    return torch.where(near.float() < values, (near.view(torch.int16) + 1).view(dtype), near)


def _rows(
    weight: torch.Tensor, bits: int, group_size: int, zero_points: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers (rows, K) in uint8, and for each group a scale in `dtype` and a zero point in int16."""
    rows, k = weight.shape
    groups, top, half = -(-k // group_size), 2**bits - 1, 2 ** (bits - 1)
    wide = torch.nn.functional.pad(weight.float(), (0, groups * group_size - k))
    wide = wide.reshape(rows, groups, group_size)
    low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
    # Divide by tensors: CUDA divides by a number as it multiplies by the reciprocal, unlike the host.
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
            f"quantize: weight has elements of {float(wide.abs().amax()):g}, which overflow {name_of(dtype)}"
        )
    return numbers.to(torch.uint8).reshape(rows, -1)[:, :k], scales, zeros.to(torch.int16)


def quantize(
    weight: torch.Tensor,
    *,
    bits: WeightBits,
    group_size: GroupSize = 128,
    zero_points: bool = False,
    dtype: torch.dtype | None = None,
) -> QuantizedWeight:
    """Quantize a weight to 4- or 8-bit integers with a scale for each group, for `tritile.linear`.

    Args:
        weight: (N, K), in bfloat16, float16 or float32, with any strides. All elements are finite.
        bits: 4 or 8.
        group_size: how many columns share a scale: 32, 64 or 128. The last group of a row may be shorter.
        zero_points: True gives each group a zero point of its own, which suits groups whose values lie mostly
            on one side of 0. Without zero points the integers are signed.
        dtype: dtype of the scales, and of the activations to multiply by: bfloat16 or float16. Default:
            weight's own; bfloat16 for float32.

    Each weight w becomes the nearest value q * scale of its group: |w - q * scale| <= scale / 2, apart from
    the rounding of w / scale to fp32, which is some 2^-16 of a scale. The scale is the smallest that covers
    the group, rounded up to `dtype`: (max - min) / (2^bits - 1), where min and max include 0; without zero
    points, the larger of max / (2^(bits - 1) - 1) and -min / 2^(bits - 1). Scales have 16 bits because one is
    read with every group. Products q * scale are rounded once more to `dtype`, by at most half a unit in the
    last place.

    torch computes this on weight's device, and the host waits for it. On the meta device only shapes are
    computed.

    Returns:
        A `tritile.QuantizedWeight`.

    Raises:
        ShapeError: weight is not a matrix, or is empty.
        DtypeError: weight is not a tensor, or it or `dtype` is of an unsupported dtype.
        GradientError: weight requires a gradient. Call it under `torch.no_grad()`, or detach weight.
        InvalidValueError: another argument does not fit, weight has an infinity or NaN, or its values
            overflow `dtype`.

    Examples:
        >>> weight = torch.randn(77, 300, device="cuda", dtype=torch.bfloat16)
        >>> packed = tritile.quantize(weight, bits=4)
        >>> x = torch.randn(10, 300, device="cuda", dtype=torch.bfloat16)
        >>> tritile.linear(x, packed).shape
        torch.Size([10, 77])
    """
    if is_overridden(weight):
        how: dict[str, Any] = {"group_size": group_size, "zero_points": zero_points, "dtype": dtype}
        of_class: QuantizedWeight = handle_torch_function(quantize, (weight,), weight, bits=bits, **how)
        return of_class
    kind = _checked(weight, bits, group_size, zero_points, dtype)
    n, k = weight.shape
    shape = scales_shape(n, k, bits, group_size)
    if weight.is_meta:
        made = torch.empty(words_shape(n, k, bits), dtype=torch.int32, device="meta")
        scales = torch.empty(shape, dtype=kind, device="meta")
        zeros = torch.empty(shape, dtype=torch.int16, device="meta") if zero_points else None
        return QuantizedWeight(made, scales, zeros, bits, group_size, (n, k))
    at_once = max(16, _AT_ONCE // k // 16 * 16)
    parts: list[tuple[torch.Tensor, ...]] = []
    with torch.autocast(weight.device.type, enabled=False):  # casts what torch.cat joins, or refuses it
        for start in range(0, n, at_once):
            rows = weight[start : start + at_once].resolve_neg()
            if not bool(torch.isfinite(rows).all()):
                row, column = ((~torch.isfinite(rows)).nonzero()[0]).tolist()
                value = float(rows[row, column])
                raise InvalidValueError(
                    f"quantize: weight[{start + row}, {column}] is {value}: expected finite numbers"
                )
            numbers, *of_groups = _rows(rows, bits, group_size, zero_points, kind)
            parts.append((packed(numbers, bits), *of_groups))
        words, scales, zeros = map(torch.cat, zip(*parts, strict=True))
    zeros = by_group(zeros, shape) if zero_points else None
    return QuantizedWeight(words, by_group(scales, shape), zeros, bits, group_size, (n, k))
