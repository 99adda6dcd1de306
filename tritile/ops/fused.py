"""Offer `tritile.linear`, `addmm` and `baddbmm`: products with an epilogue, in one launch."""

from typing import Any, Final, NamedTuple

import torch

from tritile.core import epilogue
from tritile.core.problem import ACTIVATIONS, SIDES
from tritile.core.quantized import QuantizedWeight
from tritile.core.settings import rules
from tritile.errors import DtypeError, InvalidValueError, ShapeError, UnsupportedError
from tritile.ops import matmul as product
from tritile.ops.checks import (
    broadcast,
    check_like,
    check_rank,
    check_room,
    check_same_device,
    check_tensor,
    describe,
    name_of,
)
from tritile.ops.described import Extras, described
from tritile.ops.dispatch import dispatched, diverted
from tritile.ops.linear import quantized_linear
from tritile.ops.recall import Tensors, again, check_apart, met, name_of_role, reaches_of, remember
from tritile.ops.run import interpret_product, on_host, prepared, written

_ZEROS: Final = ("zero_a", "zero_b")  # integers, checked by `scaled_matmul` itself
_ADDED: Final = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that are added to sums in fp32


def _check_side(op: str, name: str, tensor: Any, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    check_tensor(op, name, tensor)
    check_same_device(op, like, name, tensor)
    alike = like.dtype == torch.float64 or like.is_complex()
    wanted = (like.dtype,) if alike else _ADDED
    if tensor.dtype not in wanted:
        dtypes = ", ".join(map(name_of, wanted))
        raise DtypeError(f"{op}: {name} is {describe(tensor)}: wanted {dtypes}")
    try:
        fits = broadcast(tensor.shape, shape) == shape
    except ShapeError:
        fits = False
    if not fits:
        own = tuple(tensor.shape)
        raise ShapeError(f"{op}: {name} has shape {own}: wanted one that broadcasts to {shape}")


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


def _check_number(op: str, name: str, value: Any, like: torch.Tensor) -> complex:
    if isinstance(value, complex):
        if value.imag and not like.is_complex():
            wanted = f"a real number for {name_of(like.dtype)}"
            raise InvalidValueError(f"{op}: {name} is {value!r}: wanted {wanted}")
        return value if like.is_complex() else value.real
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        raise InvalidValueError(f"{op}: {name} is {value!r}: wanted a number")
    return float(value)


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


class Product(NamedTuple):
    """Hold a product a @ b with an epilogue. `tensors` are the caller's, in the order of `ARGUMENTS`."""

    op: str
    tensors: Tensors
    a: Any
    b: Any
    extras: Extras


def checked(
    of: Product, out: Any, out_dtype: torch.dtype | None, precision: str | None
) -> tuple[tuple[int, ...], torch.dtype, str]:
    """Return shape and dtype of the result, and the precision. Raise a TritileError for bad arguments.

    The memory of out is not checked.
    """
    op, _, a, b, extras = of
    names = name_of_role(op, "a"), name_of_role(op, "b")
    shape, dtype, precision = product.result_of(a, b, None, out_dtype, precision, op, extras.scaled, names)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise DtypeError(f"{op}: {names[0]} is {name_of(a.dtype)}: wanted a floating or complex dtype")
    for role in SIDES:
        tensor = getattr(extras, role)
        if tensor is not None and role not in _ZEROS:
            _check_side(op, name_of_role(op, role), tensor, a, shape)
    if out is not None:
        check_like(op, out, shape, dtype, a)
    return shape, dtype, precision


def _complex_product(of: Product, out: torch.Tensor | None, precision: str) -> torch.Tensor:
    """Multiply complex operands, and apply the epilogue with torch: the kernels store real sums.

    Real and imaginary parts are added separately. torch's complex addition multiplies by 1 + 0i, which turns
    the other part of an infinity into NaN.
    """
    extras = of.extras
    sums = product.eager(of.a, of.b, None, None, precision)
    if extras.alpha != 1:
        sums.mul_(extras.alpha)
    read = dict(zip(SIDES, extras.tensors, strict=True))
    for term, weight in ((read["bias"], extras.beta), (read["residual"], 1)):
        if term is not None:
            term = (term if weight == 1 else term * weight).resolve_conj().resolve_neg()
            torch.view_as_real(sums).add_(torch.view_as_real(term))
    return sums if out is None else written(of.op, out.copy_(sums))


def fused_product(
    of: Product,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
    key: tuple[Any, ...] | None,
) -> torch.Tensor:
    """Run a product that is not in the memo of prepared calls, and remember its launch under `key`.

    Raise what `matmul` raises, also for epilogue tensors that do not fit the result.
    """
    rules()  # report a wrong setting of the environment on any device
    op, tensors, a, b, extras = of
    shape, dtype, precision = checked(of, out, out_dtype, precision)
    if out is not None:
        check_room(op, out)
        check_apart(op, out, tensors, reaches_of(tensors, extras.bias if extras.beta == 0 else None))
    if a.is_complex():
        return _complex_product(of, out, precision)
    result = torch.empty(shape, dtype=dtype, device=a.device) if out is None else out
    if result.numel() == 0:
        return result
    if a.is_meta:
        return result if out is None else written(op, result)
    plain_a, plain_b = a.resolve_neg(), b.resolve_neg()
    plain = extras.mapped(torch.Tensor.resolve_neg)
    if a.shape[-1] == 0:
        sums = torch.zeros(shape, dtype=dtype, device=a.device)
        up = None if plain.up is None else sums
        how = (plain.activation, plain.alpha, plain.beta)
        result.copy_(epilogue.finished(sums, plain.tensors, *how, up))
    elif on_host(a):
        interpret_product(
            lambda read, into, how: described(read(plain_a), read(plain_b), into, how, plain.mapped(read)),
            (plain_a, *plain.tensors),
            result,
            precision,
        )
    else:
        call = described(plain_a, plain_b, result, precision, plain)
        launch = prepared(call)
        launch(*call.tensors)
        remember(key, op, launch, call, tensors, result)
    return result if out is None else written(op, result)


def linear(
    input: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return activation(input @ weight^T + bias) + residual, computed in one launch.

    Args:
        input: (..., K), of a floating or complex dtype that `tritile.matmul` takes.
        weight: (N, K), or (K,) for a result without N; of input's dtype. Or a `tritile.QuantizedWeight` of an
            (N, K) matrix, made for input's dtype, bfloat16 or float16: then bias must be (N,) or None, and
            the other arguments None. On Hopper, where input has more than 256 rows, it may be unpacked into a
            workspace of 2 N K bytes that lasts for the call.
        bias: (N,), or any shape that broadcasts to the result's.
        activation: "relu", "gelu", "gelu_tanh" (gelu's approximation by tanh), "silu", or None.
        residual: of a shape that broadcasts to the result's; added last.
        out: tensor to write the result to. It may be residual or bias itself; otherwise it must share no
            memory with an operand.
        out_dtype: as for `tritile.matmul`.
        precision: as for `tritile.matmul`.

    bias and residual are float16, bfloat16 or float32; where input is float64 or complex, they have its
    dtype. Sums and the epilogue are computed in float32 (float64 for float64) and rounded once, when stored.
    Complex results take no activation, and torch adds bias and residual after the product.

    Differentiable with respect to all tensors, as `tritile.matmul` is; with a quantized weight, only with
    respect to input and bias. Where a gradient is wanted, torch applies the activation after the product.

    Returns:
        The result, (..., N), in out where that is given.

    Raises:
        TritileError: as `tritile.matmul` raises it.
    """
    if isinstance(weight, QuantizedWeight):
        check_bias_alone(activation, residual, out, out_dtype, precision)
        return quantized_linear(input, weight, bias)
    if dispatched(input, weight, bias, residual, out):
        words: dict[str, Any] = {"activation": activation, "residual": residual}
        words |= {"out_dtype": out_dtype, "precision": precision}
        return diverted("linear", input, weight, bias, out=out, **words)
    return eager_linear(input, weight, bias, activation, residual, out, out_dtype, precision)


def check_bias_alone(*others: Any) -> None:
    """Raise UnsupportedError where `linear` of a QuantizedWeight has another argument than a bias."""
    names = ("activation", "residual", "out", "out_dtype", "precision")
    given = ", ".join(name for name, value in zip(names, others, strict=True) if value is not None)
    if given:
        raise UnsupportedError(f"linear: a QuantizedWeight does not combine with {given}: wanted bias only")


def eager_linear(
    x: Any, weight: Any, bias: Any, activation: Any, residual: Any, out: Any, out_dtype: Any, precision: Any
) -> torch.Tensor:
    """Run `linear` on plain tensors: the kernel of its operator on CUDA and CPU."""
    tensors = (x, weight, bias, residual)
    key, ready = met("linear", x, tensors, out, (activation, out_dtype, precision))
    if ready is not None:
        return again("linear", ready, tensors, out)
    return fused_product(linear_of(*tensors, activation), out, out_dtype, precision, key)


def linear_of(x: Any, weight: Any, bias: Any, residual: Any, activation: Any) -> Product:
    """Return the product that `linear` computes. Raise a TritileError for bad operands."""
    check_weight("linear", x, "weight", weight, (1, 2))
    extras = Extras(bias=bias, residual=residual, activation=check_activation("linear", activation, x))
    return Product("linear", (x, weight, bias, residual), x, weight.t(), extras)


_RANKS: Final = {"addmm": 2, "baddbmm": 3}


def weighted_of(op: str, added: Any, a: Any, b: Any, beta: Any, alpha: Any, activation: Any) -> Product:
    """Return the product that "addmm" or "baddbmm" computes. Raise a TritileError for bad operands."""
    rank, (of_a, of_b) = _RANKS[op], (name_of_role(op, role) for role in "ab")
    for name, tensor in ((of_a, a), (of_b, b)):
        check_rank(op, name, tensor, rank)
    if rank == 3 and a.shape[0] != b.shape[0]:
        shapes = f"{of_a} has shape {tuple(a.shape)} and {of_b} {tuple(b.shape)}"
        raise ShapeError(f"{op}: {shapes}: wanted the same batch size")
    weights = _check_number(op, "alpha", alpha, a), _check_number(op, "beta", beta, a)
    check_tensor(op, "input", added)
    extras = Extras(None, None, added, None, check_activation(op, activation, a), *weights)
    return Product(op, (added, a, b), a, b, extras)


def _weighted(
    op: str, input: Any, a: Any, b: Any, out: Any, beta: Any, alpha: Any, activation: Any, out_dtype: Any,
    precision: Any,
) -> torch.Tensor:  # fmt: skip
    if dispatched(input, a, b, out):
        words = {"activation": activation, "out_dtype": out_dtype, "precision": precision}
        return diverted(op, input, a, b, out=out, beta=beta, alpha=alpha, **words)
    return eager_weighted(op, input, a, b, out, beta, alpha, activation, out_dtype, precision)


def eager_weighted(
    op: str, input: Any, a: Any, b: Any, out: Any, beta: Any, alpha: Any, activation: Any, out_dtype: Any,
    precision: Any,
) -> torch.Tensor:  # fmt: skip
    """Run `addmm` or `baddbmm` on plain tensors: the kernel of their operators on CUDA and CPU."""
    tensors = (input, a, b)
    # Types too: True equals 1 in a key, and is refused.
    words = (alpha, type(alpha), beta, type(beta), activation, out_dtype, precision)
    key, ready = met(op, a, tensors, out, words)
    if ready is not None:
        return again(op, ready, tensors, out)
    of = weighted_of(op, input, a, b, beta, alpha, activation)
    return fused_product(of, out, out_dtype, precision, key)


def addmm(
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return activation(beta * input + alpha * (mat1 @ mat2)), computed in one launch, as `torch.addmm` does.

    Args:
        input: of a shape that broadcasts to (M, N) and a dtype that `tritile.linear` takes for bias; not read
            where beta is 0.
        mat1: (M, K).
        mat2: (K, N), of mat1's dtype.
        beta: number that multiplies input; complex only for complex operands.
        alpha: number that multiplies the product; complex only for complex operands.
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
    return _weighted("addmm", input, mat1, mat2, out, beta, alpha, activation, out_dtype, precision)


def baddbmm(
    input: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return activation(beta * input + alpha * (batch1 @ batch2)) of batches, as `torch.baddbmm` does.

    Args:
        input: of a shape that broadcasts to (B, M, N); not read where beta is 0.
        batch1: (B, M, K).
        batch2: (B, K, N), of batch1's dtype.
        beta: as for `tritile.addmm`.
        alpha: as for `tritile.addmm`.
        activation: as for `tritile.addmm`.
        out: as for `tritile.addmm`.
        out_dtype: as for `tritile.addmm`.
        precision: as for `tritile.addmm`.

    Returns:
        The result, (B, M, N), in out where that is given.

    Raises:
        TritileError: as `tritile.linear` raises it.
    """
    return _weighted("baddbmm", input, batch1, batch2, out, beta, alpha, activation, out_dtype, precision)
