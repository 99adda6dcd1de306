"""Pack weights of 4- or 8-bit integers: their layout in memory, and their meaning.

A weight of N rows and K columns is a number for each element, from 0 to 2^bits - 1, and for each row and
group of `group_size` columns a scale in the 16-bit type of the activations and, optionally, a zero point:

    weight[n, k] = (number[n, k] - zero[n, k // group_size]) * scale[n, k // group_size]

Without zero points the zero is 2^(bits - 1), which makes the numbers signed.

Numbers have the layout that the first operand of the tensor cores' 16-bit product needs: row r of 8 and
columns 2t, 2t + 1 of a run of 8 are in lane 4r + t. So a thread unpacks what it multiplies. A word of 32 bits
holds columns 2t and 2t + 1, one in each half, of each of 4 runs (2 runs for bytes). Four such words, for 16
(8) runs, are 16 bytes of a lane. The 16 bytes of the 32 lanes follow each other: 8 rows and 128 (64) columns.
Scales and zeros come by group, and within a group rows n and n + 8 are side by side.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

import torch

from tritile.core.problem import (
    ACTIVATION_DTYPES,
    GROUP_SIZES,
    UNIT_WORDS,
    WEIGHT_BITS,
    scales_shape,
    unit_columns,
    words_shape,
)
from tritile.errors import DeviceError, DtypeError, InvalidValueError, ShapeError

WeightKind = Literal["linear", "int8", "int4"]  # how a layer keeps its weight
SCALE_DTYPES: Final = tuple(getattr(torch, name) for name in ACTIVATION_DTYPES)


def _by_word(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers (rows, columns) in the order of words: (eights, units, row, t, runs, run, half)."""
    rows, columns = numbers.shape
    apart = (rows // 8, 8, columns // unit_columns(bits), 4, 16 // bits, 4, 2)
    return numbers.reshape(apart).permute(0, 2, 1, 5, 3, 4, 6)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers (N, K) of dtype uint8, each below 2^bits, as int32 words of `words_shape`."""
    n, k = numbers.shape
    eights, width = words_shape(n, k, bits)
    more = (0, width // UNIT_WORDS * unit_columns(bits) - k, 0, eights * 8 - n)
    apart = _by_word(torch.nn.functional.pad(numbers, more), bits)
    words = torch.zeros(apart.shape[:5], dtype=torch.int32, device=numbers.device)
    for run in range(16 // bits):
        for half in range(2):
            words |= apart[..., run, half].to(torch.int32) << (bits * run + 16 * half)
    return words.reshape(eights, width)


def unpacked(words: torch.Tensor, n: int, k: int, bits: int) -> torch.Tensor:
    """Return the numbers that `packed` packed, (N, K) of dtype uint8."""
    eights, width = words.shape
    apart = words.reshape(eights, width // UNIT_WORDS, 8, 4, 4)
    shifts = [bits * run + 16 * half for run in range(16 // bits) for half in range(2)]
    each = [((apart >> shift) & (2**bits - 1)).to(torch.uint8) for shift in shifts]
    numbers = torch.stack(each, -1).reshape(*apart.shape, 16 // bits, 2)
    numbers = numbers.permute(0, 2, 1, 4, 5, 3, 6).reshape(eights * 8, -1)
    return numbers[:n, :k]


def by_group(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return values (N, groups) in the order of scales and zeros, padded with 0 to a `scales_shape`."""
    n, groups = values.shape
    values = torch.nn.functional.pad(values, (0, shape[0] - groups, 0, shape[1] - n))
    return values.reshape(-1, 2, 8, shape[0]).permute(3, 0, 2, 1).reshape(shape).contiguous()


def by_row(values: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """Return the values (N, groups) that `by_group` laid out."""
    apart = values.reshape(values.shape[0], -1, 8, 2).permute(1, 3, 2, 0)
    return apart.reshape(values.shape[1], values.shape[0])[:n, :groups]


def meaning(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
) -> torch.Tensor:
    """Return the weight that packed numbers stand for, (N, K) of dtype float32, in which it is exact."""
    n, k = shape
    groups = -(-k // group_size)
    numbers = unpacked(words, n, k, bits).float()
    parts = torch.nn.functional.pad(numbers, (0, groups * group_size - k)).reshape(n, groups, group_size)
    if zeros is None:
        parts -= 2 ** (bits - 1)
    else:
        parts -= by_row(zeros & (2**bits - 1), n, groups)[..., None]
    return (parts * by_row(scales, n, groups).float()[..., None]).reshape(n, -1)[:, :k]


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight (N, K) of 4- or 8-bit integers with a scale for each group, made by `tritile.quantize`.

    `tritile.linear` takes it, with activations of the scales' dtype. torch.save and torch.load keep it, also
    with weights_only=True.

    Attributes:
        packed: the integers, int32, in the layout that `core.quantized` describes, as are scales and zeros.
        scales: the scales, float16 or bfloat16.
        zeros: the zero points, int16; None without them. All parts are on one device.
        bits: 4 or 8.
        group_size: how many columns share a scale: 32, 64 or 128.
        shape: (N, K).

    Raises:
        ShapeError, DtypeError, DeviceError, InvalidValueError: the parts do not fit each other.
    """

    packed: torch.Tensor = field(repr=False)
    scales: torch.Tensor = field(repr=False)
    zeros: torch.Tensor | None = field(repr=False)
    bits: int
    group_size: int
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if self.bits not in WEIGHT_BITS or self.group_size not in GROUP_SIZES:
            raise InvalidValueError(
                f"QuantizedWeight: bits {self.bits!r}, group_size {self.group_size!r}: "
                f"expected one of {WEIGHT_BITS} and one of {GROUP_SIZES}"
            )
        sizes = self.shape
        if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
            raise ShapeError(f"QuantizedWeight: shape {sizes!r}: expected two sizes of 1 and more")
        groups = scales_shape(*sizes, self.bits, self.group_size)
        self._check("packed", self.packed, (torch.int32,), words_shape(*sizes, self.bits))
        self._check("scales", self.scales, SCALE_DTYPES, groups)
        if self.zeros is not None:
            self._check("zeros", self.zeros, (torch.int16,), groups)

    def _check(self, name: str, tensor: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int]) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise DtypeError(f"QuantizedWeight: {name} is {kind}: expected a tensor of {expected}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ShapeError(
                f"QuantizedWeight: {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: "
                f"expected {shape}, contiguous"
            )
        if tensor.device != self.packed.device:
            raise DeviceError(
                f"QuantizedWeight: {name} is on {tensor.device}: expected {self.packed.device}, as packed"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = {each.name for each in fields(self)}
        if set(state) != names:
            raise InvalidValueError(f"QuantizedWeight: {sorted(state)}: expected {', '.join(sorted(names))}")
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations to multiply by, which is that of the scales."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        """The device of all parts."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """The size of all parts in bytes."""
        return sum(t.nbytes for t in (self.packed, self.scales, self.zeros) if t is not None)

    def to(self, device: torch.device | str | int) -> "QuantizedWeight":
        """Return the weight on another device, or itself if it is there already."""
        packed, scales = self.packed.to(device), self.scales.to(device)
        zeros = None if self.zeros is None else self.zeros.to(device)
        if packed is self.packed:
            return self
        return QuantizedWeight(packed, scales, zeros, self.bits, self.group_size, self.shape)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weight (N, K) that the integers represent, in a floating dtype (default: the scales').

        It is exact in float32 and float64, and rounded once in the scales' dtype. `tritile.linear` multiplies
        by the exact or the rounded weight, depending on its config.

        Raises:
            DtypeError: `dtype` is not a floating dtype.
        """
        dtype = self.dtype if dtype is None else dtype
        if not dtype.is_floating_point:
            raise DtypeError(f"dequantize: dtype is {dtype}: expected a floating dtype")
        parts = (self.packed, self.scales, self.zeros)
        return meaning(*parts, self.shape, self.bits, self.group_size).to(dtype)


torch.serialization.add_safe_globals([QuantizedWeight])
