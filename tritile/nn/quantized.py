"""`tritile.nn.QuantizedLinear`: a linear layer whose weight has 4 or 8 bits per element."""

from collections.abc import Callable
from typing import Any

import torch

from tritile.core.problem import GROUP_SIZES, WEIGHT_BITS, GroupSize, WeightBits, scales_shape, words_shape
from tritile.core.quantized import SCALE_DTYPES, QuantizedWeight
from tritile.core.torch_private import Moved
from tritile.errors import InvalidValueError, ShapeError
from tritile.nn.linear import refuse_scripting
from tritile.ops.memo import launch_cached
from tritile.ops.quantize import quantize
from tritile.ops.request import computed


class QuantizedLinear(Moved):
    """A linear layer with a weight that `tritile.quantize` made, which is unpacked while it is multiplied.

    The weight is three buffers, `packed`, `scales` and `zeros` (None without zero points), as in
    `tritile.QuantizedWeight`. The state dict holds them, and loads into a layer of the same sizes, bits and
    group_size. `.to(device)` moves all of them. `.to(dtype)` with bfloat16 or float16 changes bias and
    scales, and with them the dtype of the input; with other dtypes it changes only the bias.

    Args:
        in_features: K, the last dimension of the input.
        out_features: N, the last dimension of the result.
        bias: True adds a bias (N,), a parameter that is initially zero.
        device: device of weight and bias.
        dtype: dtype of input, result, scales and bias: bfloat16 or float16.
        bits: 4 or 8.
        group_size: how many columns share a scale: 32, 64 or 128.
        zero_points: True gives each group a zero point.

    The weight is initially zero; `from_linear` makes a layer from a trained one. A call raises the same
    errors as `tritile.linear`.

    Raises:
        ShapeError, DtypeError, InvalidValueError: an argument does not fit.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        bits: WeightBits = 4,
        group_size: GroupSize = 128,
        zero_points: bool = False,
    ) -> None:
        if bits not in WEIGHT_BITS or group_size not in GROUP_SIZES:
            raise InvalidValueError(
                f"QuantizedLinear: bits is {bits!r} and group_size {group_size!r}: "
                f"expected bits of {WEIGHT_BITS} and a group_size of {GROUP_SIZES}"
            )
        if in_features < 1 or out_features < 1:
            sizes = f"in_features is {in_features} and out_features {out_features}"
            raise ShapeError(f"QuantizedLinear: {sizes}: expected both 1 or more")
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        zero = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.bias = None if zero is None else torch.nn.Parameter(zero)
        groups = scales_shape(out_features, in_features, bits, group_size)
        words = torch.zeros(words_shape(out_features, in_features, bits), dtype=torch.int32, device=device)
        scales = torch.zeros(groups, dtype=dtype, device=device)
        zeros = torch.zeros(groups, dtype=torch.int16, device=device) if zero_points else None
        shape = (out_features, in_features)
        self._hold(QuantizedWeight(words, scales, zeros, bits, group_size, shape))

    @classmethod
    def from_linear(
        cls,
        layer: torch.nn.Linear,
        *,
        bits: WeightBits = 4,
        group_size: GroupSize = 128,
        zero_points: bool = False,
    ) -> "QuantizedLinear":
        """Return a layer with the quantized weight of another layer, and its bias itself.

        For a layer on the meta device only the sizes are computed.

        Args:
            layer: a layer with a weight (N, K) in bfloat16 or float16.
            bits: as for the class.
            group_size: as for the class.
            zero_points: as for the class.

        Raises:
            TritileError: the same errors as `tritile.quantize`.

        Examples:
            >>> layer = torch.nn.Linear(64, 256, device="cuda", dtype=torch.bfloat16)
            >>> tritile.nn.QuantizedLinear.from_linear(layer, bits=4).weight.shape
            (256, 64)
        """
        weight, sizes = layer.weight, (layer.in_features, layer.out_features)
        how: dict[str, Any] = {"bits": bits, "group_size": group_size, "zero_points": zero_points}
        made = cls(*sizes, False, "meta", weight.dtype, **how)
        made._hold(quantize(weight.detach(), **how))
        made.bias = layer.bias
        return made

    def _hold(self, weight: QuantizedWeight) -> None:
        self.bits, self.group_size = weight.bits, weight.group_size
        for name in ("packed", "scales", "zeros"):
            self.register_buffer(name, getattr(weight, name))

    def _moved(self, tensors: Callable[[], Any]) -> None:
        before = self.scales
        super()._moved(tensors)
        if self.scales.dtype not in SCALE_DTYPES:  # `.to(dtype)` casts every floating tensor
            self.scales = before.to(self.scales.device)

    @property
    def weight(self) -> QuantizedWeight:
        """The buffers as a `tritile.QuantizedWeight`: a new one at each access, in the same memory.

        Keep it if you use it often, because its parts are checked each time.
        """
        shape = (self.out_features, self.in_features)
        return QuantizedWeight(self.packed, self.scales, self.zeros, self.bits, self.group_size, shape)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight^T + bias, (..., N), for an input (..., K)."""
        tensors = (input, self.packed, self.scales, self.zeros, self.bias)
        options = (self.bits, self.group_size, self.out_features, self.in_features)
        return launch_cached("linear_quantized", tensors, None, options, computed)

    __prepare_scriptable__ = refuse_scripting

    def _get_name(self) -> str:
        return "tritile.nn.QuantizedLinear" if type(self) is QuantizedLinear else super()._get_name()

    def extra_repr(self) -> str:
        """Return the sizes, and how the weight is quantized."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        how = f"bits={self.bits}, group_size={self.group_size}, zero_points={self.zeros is not None}"
        return f"{sizes}, bias={self.bias is not None}, {how}"
