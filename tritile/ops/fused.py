"""`tritile.linear`, `addmm`, `baddbmm` and `gated_linear`: products with an epilogue, in one launch."""

from typing import Any, Final

import torch

from tritile.core.epilogue import Activation
from tritile.core.problem import GATED_DTYPES, Precision
from tritile.core.quantized import QuantizedWeight
from tritile.errors import DtypeError, ShapeError, UnsupportedError
from tritile.ops.checks import check_same_dtype, check_tensor, name_of, shapes
from tritile.ops.dispatch import public
from tritile.ops.memo import Key, Tensors, launch_cached
from tritile.ops.products import Product, product_of
from tritile.ops.request import computed, requests

NOT_WITH_PACKED: Final = ("activation", "residual", "out_dtype", "precision", "out")


@public
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
        input: (..., K), in a floating or complex dtype that `tritile.matmul` takes.
        weight: (N, K), or (K,) for a result without N, in input's dtype. Or a `tritile.QuantizedWeight` of
            shape (N, K) that was made for input's dtype, bfloat16 or float16. Then bias is (N,) or None, and
            every other argument None; if torch multiplies by it, it is unpacked into a workspace of 2 N K
            bytes, which is freed after the call.
        bias: (N,), or any shape that broadcasts to the result's.
        activation: "relu", "gelu", "gelu_tanh" (the tanh approximation of gelu), "silu", or None.
        residual: tensor to add last, of a shape that broadcasts to the result's.
        out: tensor that receives the result. It may be residual or bias itself; otherwise it shares no memory
            with an operand.
        out_dtype: as in `tritile.matmul`.
        precision: as in `tritile.matmul`.

    bias and residual are float16, bfloat16 or float32; if input is float64 or complex, they have its dtype.
    Sums and the epilogue are computed in float32 (float64 for float64) and rounded once, when stored. torch
    computes complex products with their bias and residual; they take no activation.

    Differentiable with respect to all tensors, like `tritile.matmul`; with a quantized weight, only with
    respect to input and bias. If a gradient is needed, torch applies the activation after the product.

    Returns:
        The result, (..., N). It is `out` if that was passed.

    Raises:
        TritileError: the same errors as `tritile.matmul`.

    Examples:
        >>> x = torch.randn(4, 10, 300, device="cuda", dtype=torch.bfloat16)
        >>> weight = torch.randn(77, 300, device="cuda", dtype=torch.bfloat16)
        >>> bias = torch.randn(77, device="cuda")
        >>> tritile.linear(x, weight, bias, activation="gelu").shape
        torch.Size([4, 10, 77])
    """
    if isinstance(weight, QuantizedWeight):
        check_only_bias(activation, residual, out_dtype, precision, out)
        parts = (input, weight.packed, weight.scales, weight.zeros, bias)
        return launch_cached(
            "linear_quantized", parts, None, (weight.bits, weight.group_size, *weight.shape), computed
        )
    tensors, options = (input, weight, bias, residual), (activation, out_dtype, precision)
    return launch_cached("linear", tensors, out, options, computed)


def check_only_bias(*others: Any) -> None:
    """Raise UnsupportedError if `linear` of a QuantizedWeight has one of `NOT_WITH_PACKED`."""
    refused = ", ".join(
        name for name, value in zip(NOT_WITH_PACKED, others, strict=True) if value is not None
    )
    if refused:
        raise UnsupportedError(f"linear: weight is a QuantizedWeight, which takes only bias, not {refused}")


def _check_weight(op: str, x: Any, name: str, weight: Any, ranks: tuple[int, ...]) -> None:
    """Raise a TritileError unless weight is a matrix or vector whose rows are as long as those of x."""
    check_tensor(op, "input", x)
    check_tensor(op, name, weight)
    if weight.ndim not in ranks:
        expected = " or ".join("(N, K)" if rank == 2 else "(K,)" for rank in ranks)
        raise ShapeError(f"{op}: {name} has shape {tuple(weight.shape)}: expected {expected}")
    if x.ndim and x.shape[-1] != weight.shape[-1]:
        label = shapes(**{"input": x, name: weight})
        raise ShapeError(f"{op}: {label}: K is {x.shape[-1]} in input and {weight.shape[-1]} in {name}")


@requests("linear")
def _linear_of(op: str, tensors: Tensors, options: Key) -> Product:
    _check_weight(op, tensors[0], "weight", tensors[1], (2, 1))
    return product_of(op, tensors, options)


@public
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
    """Return activation(beta * input + alpha * (mat1 @ mat2)), computed in one launch, like `torch.addmm`.

    Args:
        input: tensor to add, of a shape that broadcasts to (M, N) and a dtype that `tritile.linear` takes for
            bias. It is not read if beta is 0.
        mat1: (M, K).
        mat2: (K, N), in mat1's dtype.
        beta: factor of input; complex only for complex operands.
        alpha: factor of the product; complex only for complex operands. If it is 0, mat1 and mat2 are not
            read, and their gradients are zero.
        activation: as in `tritile.linear`.
        out: tensor that receives the result. It may be input itself; otherwise it shares no memory with an
            operand.
        out_dtype: as in `tritile.matmul`.
        precision: as in `tritile.matmul`.

    Returns:
        The result, (M, N). It is `out` if that was passed.

    Raises:
        TritileError: the same errors as `tritile.linear`.

    Examples:
        >>> c = torch.zeros(77, device="cuda")
        >>> a, b = torch.ones(50, 30, device="cuda"), torch.ones(30, 77, device="cuda")
        >>> tritile.addmm(c, a, b, alpha=0.5)[0, 0].item()
        15.0
    """
    options = (beta, alpha, activation, out_dtype, precision, type(beta), type(alpha))  # True is 1 in a key
    return launch_cached("addmm", (input, mat1, mat2), out, options, computed)


@public
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
    """Return activation(beta * input + alpha * (batch1 @ batch2)) of batches, like `torch.baddbmm`.

    batch1 is (B, M, K), batch2 is (B, K, N) in the same dtype, and the result is (B, M, N), to which input
    broadcasts. Everything else is as in `tritile.addmm`, errors included.
    """
    options = (beta, alpha, activation, out_dtype, precision, type(beta), type(alpha))
    return launch_cached("baddbmm", (input, batch1, batch2), out, options, computed)


@requests("addmm", "baddbmm")
def _weighted_of(op: str, tensors: Tensors, options: Key) -> Product:
    (added, a, b), names = tensors, ("mat1", "mat2") if op == "addmm" else ("batch1", "batch2")
    for name, tensor in zip(names, (a, b), strict=True):
        check_tensor(op, name, tensor, rank=2 if op == "addmm" else 3)
    if op == "baddbmm" and a.shape[0] != b.shape[0]:
        raise ShapeError(f"{op}: {shapes(batch1=a, batch2=b)}: expected the same batch size")
    check_tensor(op, "input", added)
    return product_of(op, tensors, options)


@public
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

    With "silu" this is SwiGLU, with "gelu" GEGLU, with "relu" ReGLU (Shazeer, arXiv 2002.05202). Each tile of
    input is loaded once for both products, and neither product is stored.

    Args:
        input: (..., K), in float16, bfloat16, float32 or float64.
        weight_gate: (N, K), in input's dtype, with any strides.
        weight_up: (N, K), in input's dtype, with any strides. The two weights may be halves of one (2 N, K).
        activation: activation of the gate, as in `tritile.linear`.
        bias_gate: (N,), or any shape that broadcasts to the result's, in a dtype that `tritile.linear` takes
            for bias.
        bias_up: the same for the second product.
        out: tensor that receives the result. It may be one of the biases itself; otherwise it shares no
            memory with an operand.
        out_dtype: as in `tritile.matmul`.
        precision: for float32, "ieee" or "tf32", as in `tritile.matmul`.

    Sums and the epilogue are computed in float32 (float64 for float64) and rounded once, when stored. If a
    gradient is needed, the two products are computed one after the other, because the gradient needs both.

    Returns:
        The result, (..., N). It is `out` if that was passed.

    Raises:
        TritileError: the same errors as `tritile.linear`.

    Examples:
        >>> x = torch.randn(10, 300, device="cuda", dtype=torch.bfloat16)
        >>> gate, up = torch.randn(2, 77, 300, device="cuda", dtype=torch.bfloat16)
        >>> tritile.gated_linear(x, gate, up).shape
        torch.Size([10, 77])
    """
    tensors, options = (input, weight_gate, weight_up, bias_gate, bias_up), (activation, out_dtype, precision)
    return launch_cached("gated_linear", tensors, out, options, computed)


@requests("gated_linear")
def _gated_of(op: str, tensors: Tensors, options: Key) -> Product:
    x, gate, up, *_ = tensors
    for name, weight in (("weight_gate", gate), ("weight_up", up)):
        _check_weight(op, x, name, weight, (2,))
        check_tensor(op, name, weight, like=x)
    if name_of(x.dtype) not in GATED_DTYPES:
        raise DtypeError(f"{op}: input is {name_of(x.dtype)}: expected one of {', '.join(GATED_DTYPES)}")
    check_same_dtype(op, weight_gate=gate, weight_up=up)
    if gate.shape != up.shape:
        raise ShapeError(f"{op}: {shapes(weight_gate=gate, weight_up=up)}: expected the same shape")
    return product_of(op, tensors, options)
