"""Offer `tritile.linear`, `addmm`, `baddbmm` and `gated_linear`: products with an epilogue, in one launch."""

import functools
from typing import Any, Final

import torch

from tritile.core.precision import explained
from tritile.core.problem import ACTIVATIONS, Activation, Precision
from tritile.core.problem.matmul import GATED_DTYPES
from tritile.core.quantized import QuantizedWeight
from tritile.errors import DtypeError, InvalidValueError, ShapeError, UnsupportedError
from tritile.ops.call import computed, requests
from tritile.ops.checks import check_number, check_rank, check_same_device, check_tensor, name_of
from tritile.ops.dispatch import name_of_role
from tritile.ops.linear_quantized import quantized_linear
from tritile.ops.memo import Tensors, recall
from tritile.ops.products import Product


def check_weight(op: str, x: Any, name: str, weight: Any, ranks: tuple[int, ...]) -> None:
    """Raise a TritileError unless weight is a matrix, or vector, whose rows are as long as those of x.

    `ranks` are the numbers of dimensions that weight may have.
    """
    for own, tensor in (("input", x), (name, weight)):
        check_tensor(op, own, tensor)
    if weight.ndim not in ranks:
        wanted = " or ".join("(N, K)" if rank == 2 else "(K,)" for rank in sorted(ranks, reverse=True))
        raise ShapeError(f"{op}: {name} has shape {tuple(weight.shape)}: wanted {wanted}")
    if x.ndim and x.shape[-1] != weight.shape[-1]:
        shapes = f"input has shape {tuple(x.shape)} and {name} {tuple(weight.shape)}"
        raise ShapeError(f"{op}: {shapes}: K is {x.shape[-1]} in input and {weight.shape[-1]} in {name}")


def _number(op: str, name: str, value: Any, like: torch.Tensor) -> complex:
    check_number(op, name, value)
    if isinstance(value, complex):
        if value.imag and not like.is_complex():
            wanted = f"a real number for {name_of(like.dtype)}"
            raise InvalidValueError(f"{op}: {name} is {value!r}: wanted {wanted}")
        return value if like.is_complex() else value.real
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidValueError(f"{op}: {name} is an integer beyond float64") from error


def check_activation(op: str, activation: Any, of: torch.Tensor | None = None) -> str:
    """Return the activation's name, "" for None. Raise InvalidValueError for an unknown one.

    Raise DtypeError where `of`, the first operand of the product, is given and complex.
    """
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        wanted = ", ".join(ACTIVATIONS)
        raise InvalidValueError(f"{op}: activation is {activation!r}: wanted one of {wanted}, or None")
    if activation and of is not None and of.is_complex():
        dtype = name_of(of.dtype)
        raise DtypeError(f"{op}: activation is {activation!r} for {dtype}: wanted None, or a real dtype")
    return activation or ""


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
        return quantized_linear(input, weight, bias)
    tensors, options = (input, weight, bias, residual), (activation, out_dtype, precision)
    return recall("linear", tensors, out, options, computed)


NOT_WITH_PACKED: Final = ("activation", "residual", "out_dtype", "precision", "out")


def check_bias_alone(*others: Any) -> None:
    """Raise UnsupportedError where `linear` of a QuantizedWeight has one of `NOT_WITH_PACKED`."""
    given = ", ".join(name for name, value in zip(NOT_WITH_PACKED, others, strict=True) if value is not None)
    if given:
        raise UnsupportedError(f"linear: a QuantizedWeight does not combine with {given}: wanted bias only")


@requests("linear")
def linear_of(
    input: Any, weight: Any, bias: Any = None, activation: Any = None, residual: Any = None,
    out_dtype: Any = None, precision: Any = None,
) -> Product:  # fmt: skip
    check_weight("linear", input, "weight", weight, (1, 2))
    tensors, sides = (input, weight, bias, residual), {"bias": bias, "residual": residual}
    activation = check_activation("linear", activation, input)
    return Product("linear", tensors, input, weight.t(), out_dtype, precision, sides, activation)


_RANKS: Final = {"addmm": 2, "baddbmm": 3}


def _weighted_of(
    op: str, added: Any, a: Any, b: Any, beta: Any, alpha: Any, activation: Any, dtype: Any, precision: Any
) -> Product:
    rank, (of_a, of_b) = _RANKS[op], (name_of_role(op, role) for role in "ab")
    for name, tensor in ((of_a, a), (of_b, b)):
        check_rank(op, name, tensor, rank)
    if rank == 3 and a.shape[0] != b.shape[0]:
        shapes = f"{of_a} has shape {tuple(a.shape)} and {of_b} {tuple(b.shape)}"
        raise ShapeError(f"{op}: {shapes}: wanted the same batch size")
    weights = _number(op, "alpha", alpha, a), _number(op, "beta", beta, a)
    check_tensor(op, "input", added)
    activation, sides = check_activation(op, activation, a), {"bias": added}
    return Product(op, (added, a, b), a, b, dtype, precision, sides, activation, *weights)


for _op in _RANKS:
    requests(_op)(functools.partial(_weighted_of, _op))


def _weighted(op: str, tensors: Tensors, out: Any, *options: Any) -> torch.Tensor:
    options = (*options, type(options[0]), type(options[1]))  # True equals 1 in a key, and is refused
    return recall(op, tensors, out, options, computed)


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
    tensors = (input, mat1, mat2)
    return _weighted("addmm", tensors, out, beta, alpha, activation, out_dtype, precision)


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
    tensors = (input, batch1, batch2)
    return _weighted("baddbmm", tensors, out, beta, alpha, activation, out_dtype, precision)


_GATED: Final = "gated_linear"
_GATED_PRECISIONS: Final[tuple[Precision, ...]] = ("ieee", "tf32")


def _check_gated(x: Any, gate: Any, up: Any) -> None:
    for name, weight in (("weight_gate", gate), ("weight_up", up)):
        check_weight(_GATED, x, name, weight, (2,))
        check_same_device(_GATED, x, name, weight)
    if name_of(x.dtype) not in GATED_DTYPES:
        raise DtypeError(f"{_GATED}: input is {name_of(x.dtype)}: wanted one of {', '.join(GATED_DTYPES)}")
    if gate.dtype != up.dtype:
        kinds = f"weight_gate is {name_of(gate.dtype)} and weight_up {name_of(up.dtype)}"
        raise DtypeError(f"{_GATED}: {kinds}: wanted the same dtype")
    if gate.shape != up.shape:
        shapes = f"weight_gate has shape {tuple(gate.shape)} and weight_up {tuple(up.shape)}"
        raise ShapeError(f"{_GATED}: {shapes}: wanted the same shape")


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
    return recall(_GATED, tensors, out, options, computed)


@requests(_GATED)
def gated_of(
    x: Any, weight_gate: Any, weight_up: Any, activation: Any = "silu", bias_gate: Any = None,
    bias_up: Any = None, out_dtype: Any = None, precision: Any = None,
) -> Product:  # fmt: skip
    _check_gated(x, weight_gate, weight_up)
    if precision is not None and precision not in _GATED_PRECISIONS:
        raise InvalidValueError(
            f"{_GATED}: precision is {precision!r}: wanted one of {', '.join(_GATED_PRECISIONS)}, or None "
            f"({explained(_GATED_PRECISIONS, 'float32')})"
        )
    how = check_activation(_GATED, activation)
    tensors, sides = (x, weight_gate, weight_up, bias_gate, bias_up), {"bias": bias_gate, "bias_up": bias_up}
    return Product(_GATED, tensors, x, weight_gate.t(), out_dtype, precision, sides, how, up=weight_up.t())
