"""Offer `tritile.gated_linear`: both products of a gated unit, and their combination, in one launch."""

from typing import Any, Final

import torch

from tritile.core.precision import explained
from tritile.core.problem import Activation, Precision
from tritile.core.problem.matmul import GATED_DTYPES
from tritile.errors import DtypeError, InvalidValueError, ShapeError
from tritile.ops.asked import asks, computed
from tritile.ops.checks import check_same_device, name_of
from tritile.ops.described import Extras
from tritile.ops.fused import check_activation, check_weight
from tritile.ops.memo import recall
from tritile.ops.products import Product

_OP: Final = "gated_linear"
_PRECISIONS: Final[tuple[Precision, ...]] = ("ieee", "tf32x3", "tf32")


def _check_weights(x: Any, gate: Any, up: Any) -> None:
    for name, weight in (("weight_gate", gate), ("weight_up", up)):
        check_weight(_OP, x, name, weight, (2,))
        check_same_device(_OP, x, name, weight)
    if name_of(x.dtype) not in GATED_DTYPES:
        raise DtypeError(f"{_OP}: input is {name_of(x.dtype)}: wanted one of {', '.join(GATED_DTYPES)}")
    if gate.dtype != up.dtype:
        kinds = f"weight_gate is {name_of(gate.dtype)} and weight_up {name_of(up.dtype)}"
        raise DtypeError(f"{_OP}: {kinds}: wanted the same dtype")
    if gate.shape != up.shape:
        shapes = f"weight_gate has shape {tuple(gate.shape)} and weight_up {tuple(up.shape)}"
        raise ShapeError(f"{_OP}: {shapes}: wanted the same shape")


def gated_linear(
    input: torch.Tensor,
    weight_gate: torch.Tensor,
    weight_up: torch.Tensor,
    *,
    activation: Activation | None = "silu",
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return activation(input @ weight_gate^T + bias_gate) * (input @ weight_up^T + bias_up), in one launch.

    With "silu" this is SwiGLU, with "gelu" GEGLU, with "relu" ReGLU (Shazeer, arXiv 2002.05202). Both
    products share each tile of input that is loaded, and neither is stored.

    Args:
        input: (..., K), float16, bfloat16, float32 or float64.
        weight_gate: (N, K), of input's dtype, any strides.
        weight_up: (N, K), of input's dtype, any strides: the two weights may be halves of one (2 N, K).
        activation: of the gate, as for `tritile.linear`.
        bias_gate: (N,), or any shape that broadcasts to the result's, of a dtype that `tritile.linear` adds.
        bias_up: the same for the second product.
        out: tensor to write the result to. It may be one of the biases itself; otherwise it must share no
            memory with an operand.
        out_dtype: as for `tritile.matmul`.
        precision: for float32: "ieee", "tf32x3" or "tf32", as for `tritile.matmul`.

    Sums and the epilogue are computed in float32 (float64 for float64) and rounded once. Where a gradient is
    wanted, which needs both products, they are computed one by one.

    Returns:
        The result, (..., N), in out where that is given.

    Raises:
        TritileError: as `tritile.linear` raises it.
    """
    tensors, options = (input, weight_gate, weight_up, bias_gate, bias_up), (activation, out_dtype, precision)
    return recall(_OP, tensors, out, options, computed)


@asks(_OP)
def gated_of(
    x: Any, weight_gate: Any, weight_up: Any, activation: Any = "silu", bias_gate: Any = None,
    bias_up: Any = None, out_dtype: Any = None, precision: Any = None,
) -> Product:  # fmt: skip
    _check_weights(x, weight_gate, weight_up)
    if precision is not None and precision not in _PRECISIONS:
        raise InvalidValueError(
            f"{_OP}: precision is {precision!r}: wanted one of {', '.join(_PRECISIONS)}, or None "
            f"({explained(_PRECISIONS, 'float32')})"
        )
    how = check_activation(_OP, activation)
    extras = Extras(bias=bias_gate, bias_up=bias_up, activation=how, up=weight_up.t())
    tensors = (x, weight_gate, weight_up, bias_gate, bias_up)
    return Product(_OP, tensors, x, weight_gate.t(), extras, out_dtype, precision)
