"""`tritile.nn.QuantizedLinear`: a linear layer whose weight has 4 or 8 bits."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tritile.core.problem import GROUP_SIZES, WEIGHT_BITS, scales_shape, words_shape
from tritile.core.quantized import SCALE_DTYPES, QuantizedWeight
from tritile.errors import InvalidValueError
from tritile.nn.packed import PackedLinear
from tritile.ops.fused import linear
from tritile.ops.quantize import quantize


def _parts(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return weight.packed, weight.scales, weight.zeros


class QuantizedLinear(PackedLinear):
    """A linear layer whose weight is what `tritile.quantize` makes, unpacked as it is multiplied with.

    The weight is three buffers, `packed`, `scales` and `zeros` (None without zero points), as
    `tritile.QuantizedWeight` has them, which are in the state dict: a layer of the same sizes, bits and
    group_size takes it. `.to(device)` moves all; `.to(dtype)` changes the bias and the scales, and with them
    the dtype of the input, to bfloat16 or float16, and leaves scales as they are for other dtypes.

    Args:
        in_features: K, the last dimension of the input.
        out_features: N, that of the result.
        bias: whether there is one, a parameter (N,), at first zeros.
        device: of weight and bias.
        dtype: of the input, the result, the scales and the bias: bfloat16 or float16.
        bits: 4 or 8.
        group_size: columns that share a scale: 32, 64 or 128.
        zero_points: whether each group has one.

    The weight is zeros at first; `from_linear` makes a layer of one that was trained. Raises ShapeError,
    DtypeError or InvalidValueError for what does not fit. A call raises as `tritile.linear` does.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    _types: ClassVar = {"scales": SCALE_DTYPES}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        bits: int = 4,
        group_size: int = 128,
        zero_points: bool = False,
    ) -> None:
        if bits not in WEIGHT_BITS or group_size not in GROUP_SIZES:
            raise InvalidValueError(
                f"QuantizedLinear: bits {bits!r}, group_size {group_size!r}: "
                f"wanted one of {WEIGHT_BITS} and one of {GROUP_SIZES}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        groups = scales_shape(out_features, in_features, bits, group_size)
        words = torch.zeros(words_shape(out_features, in_features, bits), dtype=torch.int32, device=device)
        scales = torch.zeros(groups, dtype=dtype, device=device)
        zeros = torch.zeros(groups, dtype=torch.int16, device=device) if zero_points else None
        shape = (out_features, in_features)
        self._hold(QuantizedWeight(words, scales, zeros, bits, group_size, shape))

    @classmethod
    def from_linear(
        cls, layer: torch.nn.Linear, *, bits: int = 4, group_size: int = 128, zero_points: bool = False
    ) -> "QuantizedLinear":
        """A layer with the weight of another, quantised, and with its very bias.

        Raises as `tritile.quantize` does. Of a layer on the meta device only the sizes are taken.
        """
        weight, how = layer.weight, {"bits": bits, "group_size": group_size, "zero_points": zero_points}
        sizes = (layer.in_features, layer.out_features)
        made = cls(*sizes, False, "meta", weight.dtype, **how)  # type: ignore[arg-type]
        made._hold(quantize(weight.detach(), **how))  # type: ignore[arg-type]
        made.bias = layer.bias
        return made

    def _hold(self, weight: QuantizedWeight) -> None:
        self.bits, self.group_size = weight.bits, weight.group_size
        for name, part in zip(("packed", "scales", "zeros"), _parts(weight), strict=True):
            self.register_buffer(name, part)
        self._weight: QuantizedWeight | None = weight

    @property
    def weight(self) -> QuantizedWeight:
        """The buffers as the value that `tritile.linear` takes, made anew where one was replaced."""
        held, parts = self._weight, (self.packed, self.scales, self.zeros)
        if held is None or any(a is not b for a, b in zip(parts, _parts(held), strict=True)):
            shape = (self.out_features, self.in_features)
            held = self._weight = QuantizedWeight(*parts, self.bits, self.group_size, shape)
        return held

    def _moved(self, tensors: Callable[[], Any]) -> None:
        self._weight = None  # which would keep what is replaced in memory
        super()._moved(tensors)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input @ weight^T + bias, (..., N) of an input (..., K)."""
        return linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes and how the weight is quantised."""
        how = f"bits={self.bits}, group_size={self.group_size}, zero_points={self.zeros is not None}"
        return f"{super().extra_repr()}, {how}"
