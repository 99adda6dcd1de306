"""Offer `tritile.nn.Float8Linear`: a linear layer that multiplies in fp8, with a scale for each row."""

from typing import Any, ClassVar, Final

import torch

from tritile.core import epilogue
from tritile.core.problem import Activation
from tritile.errors import DtypeError, InvalidValueError, ShapeError
from tritile.nn.packed import PackedLinear
from tritile.ops.checks import describe, name_of, names_of
from tritile.ops.fused import check_activation
from tritile.ops.matmul import matmul
from tritile.ops.scaled import scaled_matmul

_FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(_FP8).max
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def _by_row(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in fp8, each scaled so that its largest element is fp8's largest, and scales (rows, 1)."""
    wide = rows.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales).to(_FP8), scales


def _multiplied(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    activation: Activation | None = None,
) -> torch.Tensor:  # fmt: skip
    rows, of_rows = _by_row(x.reshape(-1, x.shape[-1]))
    how: dict[str, Any] = {"bias": bias, "activation": activation, "out_dtype": x.dtype}
    out = scaled_matmul(rows, weight.t(), of_rows, scale.t(), **how)
    return out.view(*x.shape[:-1], weight.shape[0])


class _Multiply(torch.autograd.Function):
    """Multiply, with gradients of x and bias as if x had not been rounded to fp8."""

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return _multiplied(x, weight, scale, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, weight, scale, bias = inputs
        ctx.save_for_backward(weight, scale)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        weight, scale = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = matmul(grad, (weight.float() * scale).to(grad.dtype))
        if ctx.needs_input_grad[3]:
            of_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return of_x, None, None, of_bias


class Float8Linear(PackedLinear):
    """Multiply in fp8 (e4m3) by `tritile.scaled_matmul`, as a linear layer.

    The weight (N, K) is an fp8 buffer, beside `scale` (N, 1) in float32, one for each row. Each row of the
    input is rounded to fp8, scaled by its largest element, with torch's operations. Sums, scales and bias are
    in float32. `.to(dtype)` changes only the bias.

    The input and the bias have gradients, the weight has none. The gradient of the input is computed with the
    fp8 weight in the dtype of the input, as if the input had not been rounded.

    Args:
        in_features: K, the last dimension of the input.
        out_features: N, the last dimension of the result.
        bias: add a bias (N,), a parameter, initially zero.
        device: device of weight and bias. A GPU must have fp8: compute capability 8.9 and up.
        dtype: dtype of the bias. The input is bfloat16, float16 or float32, and the result has its dtype.
        activation: "relu", "gelu", "gelu_tanh", "silu", or None.

    The weight is initially zero; `from_linear` makes a layer from a trained one. A call raises DtypeError, or
    what `tritile.scaled_matmul` raises.

    Raises:
        ShapeError, InvalidValueError: an argument does not fit.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    _types: ClassVar = {"weight": (_FP8,), "scale": (torch.float32,)}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        activation: Activation | None = None,
    ) -> None:
        check_activation("nn.Float8Linear", activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=_FP8, device=device))
        self.register_buffer("scale", torch.ones(out_features, 1, dtype=torch.float32, device=device))

    @classmethod
    def from_linear(cls, layer: torch.nn.Linear, *, activation: Activation | None = None) -> "Float8Linear":
        """Return a layer with the weight of another, rounded to fp8, and with its bias itself.

        The error of each element is at most 2^-4 of the element or 2^-10 of the row's scale, whichever is
        more, apart from the rounding of its quotient by the scale to fp32. Only the sizes of a layer on the
        meta device count.

        Args:
            layer: a layer with a weight (N, K) of bfloat16, float16 or float32.
            activation: as for the class.

        Raises:
            DtypeError: the weight has another dtype.
            InvalidValueError: the weight has an infinity or NaN.
        """
        weight = layer.weight.detach()
        if weight.dtype not in _DTYPES:
            raise DtypeError(f"Float8Linear: weight is {name_of(weight.dtype)}: wanted {names_of(_DTYPES)}")
        sizes = (layer.in_features, layer.out_features)
        made = cls(*sizes, False, "meta", weight.dtype, activation=activation)
        if not weight.is_meta:
            if not bool(torch.isfinite(weight).all()):
                raise InvalidValueError("Float8Linear: weight has infinities or NaN: wanted finite numbers")
            made.weight, made.scale = _by_row(weight)
        made.bias = layer.bias
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return activation(input @ weight^T + bias), (..., N), for an input (..., K)."""
        if not isinstance(input, torch.Tensor) or input.dtype not in _DTYPES:
            raise DtypeError(f"Float8Linear: input is {describe(input)}: wanted {names_of(_DTYPES)}")
        if input.ndim == 0 or input.shape[-1] != self.in_features:
            shape, wanted = tuple(input.shape), f"(..., {self.in_features})"
            raise ShapeError(f"Float8Linear: input has shape {shape}: wanted {wanted}")
        if not input.is_meta and torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        given = (input, self.weight, self.scale, self.bias)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
            return epilogue.activated(_Multiply.apply(*given), self.activation or "")
        return _multiplied(*given, self.activation)

    def extra_repr(self) -> str:
        """Return the sizes, and the activation if there is one."""
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return super().extra_repr() + activation
