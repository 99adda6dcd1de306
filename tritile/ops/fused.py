"""Offer `tritile.linear`, `addmm`, `baddbmm` and `gated_linear`: products with an epilogue, in one launch."""

from typing import Any, Final

import torch

from tritile.core.epilogue import Activation
from tritile.core.problem import GATED_DTYPES, Precision
from tritile.core.quantized import QuantizedWeight
from tritile.errors import DtypeError, ShapeError, UnsupportedError
from tritile.ops.checks import check_same_dtype, check_tensor, name_of, shapes
from tritile.ops.memo import Key, Tensors, recall
from tritile.ops.products import Product, product_of
from tritile.ops.request import computed, requests

NOT_WITH_PACKED: Final = ("activation", "residual", "out_dtype", "precision", "out")


def linear(
    input: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return activation(input @ weight^T + bias) + residual, computed in one launch.

    Args:
        input: (..., K), of a floating or complex dtype that `tritile.matmul` takes.
        weight: (N, K), or (K,) for a result without N; of input's dtype. Or a `tritile.QuantizedWeight` of an
            (N, K) matrix, made for input's dtype, bfloat16 or float16: then bias must be (N,) or None, and
            the other arguments None. Where torch multiplies by it, it is unpacked into a workspace of 2 N K
            bytes that lasts for the call.
        bias: (N,), or any shape that broadcasts to the result's.
        activation: "relu", "gelu", "gelu_tanh" (gelu's approximation by tanh), "silu", or None.
        residual: of a shape that broadcasts to the result's; added last.
        out: tensor to write the result to. It may be residual or bias itself; otherwise it must share no
            memory with an operand.
        out_dtype: as for `tritile.matmul`.
        precision: as for `tritile.matmul`.

    bias and residual are float16, bfloat16 or float32; where input is float64 or complex, they have its
    dtype. Sums and the epilogue are computed in float32 (float64 for float64) and rounded once, when stored.
    Complex products are torch's, bias and residual included, and take no activation.

    Differentiable with respect to all tensors, as `tritile.matmul` is; with a quantized weight, only with
    respect to input and bias. Where a gradient is wanted, torch applies the activation after the product.

    Returns:
        The result, (..., N), in out where that is given.

    Raises:
        TritileError: as `tritile.matmul` raises it.
    """
    if isinstance(weight, QuantizedWeight):
        check_bias_alone(activation, residual, out_dtype, precision, out)
        parts = (input, weight.packed, weight.scales, weight.zeros, bias)
        return recall(
            "linear_quantized", parts, None, (weight.bits, weight.group_size, *weight.shape), computed
        )
    tensors, options = (input, weight, bias, residual), (activation, out_dtype, precision)
    return recall("linear", tensors, out, options, computed)


def check_bias_alone(*others: Any) -> None:
    """Raise UnsupportedError where `linear` of a QuantizedWeight has one of `NOT_WITH_PACKED`."""
    refused = ", ".join(
        name for name, value in zip(NOT_WITH_PACKED, others, strict=True) if value is not None
    )
    if refused:
        raise UnsupportedError(f"linear: a QuantizedWeight does not combine with {refused}: wanted bias only")


def _check_weight(op: str, x: Any, name: str, weight: Any, ranks: tuple[int, ...]) -> None:
    """Raise a TritileError unless weight is a matrix, or vector, whose rows are as long as those of x."""
    check_tensor(op, "input", x)
    check_tensor(op, name, weight)
    if weight.ndim not in ranks:
        wanted = " or ".join("(N, K)" if rank == 2 else "(K,)" for rank in ranks)
        raise ShapeError(f"{op}: {name} has shape {tuple(weight.shape)}: wanted {wanted}")
    if x.ndim and x.shape[-1] != weight.shape[-1]:
        label = shapes(**{"input": x, name: weight})
        raise ShapeError(f"{op}: {label}: K is {x.shape[-1]} in input and {weight.shape[-1]} in {name}")


@requests("linear")
def _linear_of(op: str, tensors: Tensors, options: Key) -> Product:
    _check_weight(op, tensors[0], "weight", tensors[1], (2, 1))
    return product_of(op, tensors, options)


def addmm(
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return activation(beta * input + alpha * (mat1 @ mat2)), computed in one launch, as `torch.addmm` does.

    Args:
        input: of a shape that broadcasts to (M, N) and a dtype that `tritile.linear` takes for bias; not read
            where beta is 0.
        mat1: (M, K).
        mat2: (K, N), of mat1's dtype.
        beta: number that multiplies input; complex only for complex operands.
        alpha: number that multiplies the product; complex only for complex operands. Where it is 0, mat1 and
            mat2 are not read, and have zeros for gradients.
        activation: as for `tritile.linear`.
        out: tensor to write the result to. It may be input itself; otherwise it must share no memory with an
            operand.
        out_dtype: as for `tritile.matmul`.
        precision: as for `tritile.matmul`.

    Returns:
        The result, (M, N), in out where that is given.

    Raises:
        TritileError: as `tritile.linear` raises it.
    """
    options = (beta, alpha, activation, out_dtype, precision, type(beta), type(alpha))  # True is 1 in a key
    return recall("addmm", (input, mat1, mat2), out, options, computed)


def baddbmm(
    input: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return activation(beta * input + alpha * (batch1 @ batch2)) of batches, as `torch.baddbmm` does.

    Batches are (B, M, K) and (B, K, N), of one dtype, and the result is (B, M, N). input has a shape that
    broadcasts to it. Other arguments, and what is raised, are as for `tritile.addmm`.
    """
    options = (beta, alpha, activation, out_dtype, precision, type(beta), type(alpha))
    return recall("baddbmm", (input, batch1, batch2), out, options, computed)


@requests("addmm", "baddbmm")
def _weighted_of(op: str, tensors: Tensors, options: Key) -> Product:
    (added, a, b), names = tensors, ("mat1", "mat2") if op == "addmm" else ("batch1", "batch2")
    for name, tensor in zip(names, (a, b), strict=True):
        check_tensor(op, name, tensor, rank=2 if op == "addmm" else 3)
    if op == "baddbmm" and a.shape[0] != b.shape[0]:
        raise ShapeError(f"{op}: {shapes(batch1=a, batch2=b)}: wanted the same batch size")
    check_tensor(op, "input", added)
    return product_of(op, tensors, options)


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
        precision: for float32: "ieee" or "tf32", as for `tritile.matmul`.

    Sums and the epilogue are computed in float32 (float64 for float64) and rounded once. Where a gradient is
    wanted, which needs both products, they are computed one by one.

    Returns:
        The result, (..., N), in out where that is given.

    Raises:
        TritileError: as `tritile.linear` raises it.
    """
    tensors, options = (input, weight_gate, weight_up, bias_gate, bias_up), (activation, out_dtype, precision)
    return recall("gated_linear", tensors, out, options, computed)


@requests("gated_linear")
def _gated_of(op: str, tensors: Tensors, options: Key) -> Product:
    x, gate, up, *_ = tensors
    for name, weight in (("weight_gate", gate), ("weight_up", up)):
        _check_weight(op, x, name, weight, (2,))
        check_tensor(op, name, weight, like=x)
    if name_of(x.dtype) not in GATED_DTYPES:
        raise DtypeError(f"{op}: input is {name_of(x.dtype)}: wanted one of {', '.join(GATED_DTYPES)}")
    check_same_dtype(op, weight_gate=gate, weight_up=up)
    if gate.shape != up.shape:
        raise ShapeError(f"{op}: {shapes(weight_gate=gate, weight_up=up)}: wanted the same shape")
    return product_of(op, tensors, options)
