"""Multiply by a quantized weight: `tritile.linear` of a `QuantizedWeight`."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tritile.core.call import Memory, QuantizedCall
from tritile.core.quantized import QuantizedWeight
from tritile.core.settings import is_batch_invariant
from tritile.errors import DtypeError, ShapeError
from tritile.ops import reference
from tritile.ops.checks import check_tensor, name_of
from tritile.ops.memo import Key, Tensors
from tritile.ops.products import HALF
from tritile.ops.request import Request, Result, interpret, requests


def quantized_call(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> QuantizedCall:
    """Return the call of arguments that were checked: x (M, K) of any strides, out (M, N), contiguous."""
    (m, k), n = x.shape, weight.shape[0]
    rows = x.stride(0) if m > 1 else -(-k // 16) * 16  # the stride of a single row does not matter
    return QuantizedCall(
        Memory.of("x", x).view((m, k), (rows, x.stride(1) if k > 1 else 1)),
        Memory.of("words", weight.packed),
        Memory.of("scales", weight.scales),
        None if weight.zeros is None else Memory.of("zeros", weight.zeros),
        None if bias is None else Memory.of("bias", bias).view((m, n), (0, bias.stride(0))),
        Memory.of("out", out).view((m, n), (n, 1)),
        weight.bits,
        weight.group_size,
        is_batch_invariant(),
    )


@dataclass(frozen=True)
class QuantizedLinear(Request):
    """Hold x (..., K) @ weight^T + bias, for a `QuantizedWeight`.

    The weight is unpacked while it is multiplied or, if torch makes the product, before that. The config
    decides whether its values are rounded to x's dtype, as those of `weight.dequantize()` are and those that
    torch gets, or stay exact while sums over a group are scaled instead. Sums and bias are added in float32
    and rounded once, when stored.
    """

    x: Any
    weight: QuantizedWeight
    bias: Any = None
    op: str = "linear_quantized"

    @property
    def tensors(self) -> Tensors:  # type: ignore[override]
        weight = self.weight
        return self.x, weight.packed, weight.scales, weight.zeros, self.bias

    def checked(self, out: Any) -> Result:
        x, weight, bias, (n, k) = self.x, self.weight, self.bias, self.weight.shape
        check_tensor("linear", "input", x)
        if x.dtype != weight.dtype:
            raise DtypeError(
                f"linear: input is {name_of(x.dtype)}, but weight is quantized for {name_of(weight.dtype)}: "
                f"expected {name_of(weight.dtype)}, or a weight from quantize(..., dtype=...)"
            )
        check_tensor("linear", "weight", weight.packed, like=x)
        if x.ndim == 0 or x.shape[-1] != k:
            label = f"input has shape {tuple(x.shape)} and weight {weight.shape}"
            raise ShapeError(f"linear: {label}: expected input (..., {k})")
        if bias is not None:
            check_tensor("linear", "bias", bias, like=x, dtypes=HALF)
            if tuple(bias.shape) != (n,):
                raise ShapeError(f"linear: bias has shape {tuple(bias.shape)}: expected ({n},)")
        return (*x.shape[:-1], n), x.dtype, "ieee"

    def call(self, out: torch.Tensor, precision: str) -> QuantizedCall:
        """Return the call, folded to views. Rows that have no single stride are copied."""
        n, k = self.weight.shape
        bias = None if self.bias is None else self.bias.resolve_neg()
        return quantized_call(self.x.resolve_neg().reshape(-1, k), self.weight, bias, out.view(-1, n))

    def interpret(self, out: torch.Tensor, precision: str) -> None:
        """Run the kernels in Triton's interpreter: in float32 if the weight is for bfloat16, else as is.

        A weight for float16 cannot be multiplied in float32: its numbers become float16 by bit patterns.
        """
        if self.weight.dtype == torch.bfloat16 or self.bias is None:
            super().interpret(out, precision)
        else:
            interpret(replace(self, bias=self.bias.float()).call(out, precision))

    def compute(self, out: torch.Tensor) -> None:
        reference.linear_quantized(self.x, self.weight, self.bias, out)


@requests("linear_quantized")
def _quantized_of(op: str, tensors: Tensors, options: Key) -> QuantizedLinear:
    (x, packed, scales, zeros, bias), (bits, group_size, n, k) = tensors, options
    return QuantizedLinear(x, QuantizedWeight(packed, scales, zeros, bits, group_size, (n, k)), bias)
