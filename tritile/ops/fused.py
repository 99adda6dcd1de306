"""`tritile.linear`, `addmm` and `baddbmm`: products with what follows them done as they are stored."""

from typing import Any, Final, NamedTuple

import torch

from tritile import epilogue
from tritile.errors import DtypeError, InvalidValueError, OverlapError, ShapeError, UnsupportedError
from tritile.launch import Launch, SplitLaunch
from tritile.ops import matmul as product
from tritile.ops.checks import (
    check_no_overlap,
    check_out,
    check_same_device,
    check_tensor,
    describe,
    name_of,
    overlap,
    same_place,
)
from tritile.ops.described import Extras, described
from tritile.ops.linear import quantized_linear
from tritile.ops.run import (
    PLAIN,
    differentiating_forward,
    fresh,
    interpret,
    lasting,
    new_memo,
    on_host,
    place,
    prepared,
    written,
)
from tritile.problem import ACTIVATIONS, SIDES
from tritile.quantized import QuantizedWeight
from tritile.settings import current_mode

_NAMES: Final = (*SIDES, "scale_a", "scale_b")
_ADDED: Final = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of what is added to sums in fp32


class _Prepared(NamedTuple):
    launch: Launch | SplitLaunch
    swapped: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_memo: dict[tuple[Any, ...], _Prepared] = new_memo()


def _check_side(op: str, name: str, tensor: Any, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    check_tensor(op, name, tensor)
    check_same_device(op, like, name, tensor)
    wanted = (torch.float64,) if like.dtype == torch.float64 else _ADDED
    if tensor.dtype not in wanted:
        dtypes = ", ".join(map(name_of, wanted))
        raise DtypeError(f"{op}: {name} is {describe(tensor)}: wanted {dtypes}")
    try:
        fits = torch.broadcast_shapes(tensor.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeError(f"{op}: {name} is {tuple(tensor.shape)}: wanted a shape that broadcasts to {shape}")


def _check_weight(op: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValueError(f"{op}: {name} is {value!r}: wanted a number")
    return float(value)


def check_activation(op: str, activation: Any) -> str:
    """The activation's name, "" for None. Raises InvalidValueError for what is none."""
    if activation is not None and activation not in ACTIVATIONS:
        wanted = ", ".join(ACTIVATIONS)
        raise InvalidValueError(f"{op}: activation is {activation!r}: wanted one of {wanted}, or None")
    return activation or ""


def _check_apart(op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, extras: Extras) -> None:
    """An output that shares no memory with any input, or lies just where something that is added does."""
    check_no_overlap(op, out, a, b)
    for name, tensor in zip(_NAMES, (*extras.tensors, *(extras.blocks or ())), strict=False):
        if tensor is not None and not same_place(out, tensor) and overlap(out, tensor):
            raise OverlapError(f"{op}: out overlaps {name} in part: wanted memory of its own, or all of it")


def _checked(
    op: str, a: Any, b: Any, extras: Extras, out: Any, out_dtype: torch.dtype | None, precision: str | None
) -> tuple[tuple[int, ...], torch.dtype, str]:
    out_dtype = out_dtype or getattr(out, "dtype", None)
    shape, dtype, precision = product.check(a, b, None, out_dtype, precision, op, scaled=extras.scaled)
    if not dtype.is_floating_point:
        raise DtypeError(f"{op}: a is {name_of(a.dtype)}: wanted a floating dtype")
    for name, tensor in zip(SIDES, extras[:4], strict=True):
        if tensor is not None:
            _check_side(op, name, tensor, a, shape)
    if out is not None:
        check_out(op, out, shape, dtype)
        check_same_device(op, a, "out", out)
        _check_apart(op, out, a, b, extras)
    return shape, dtype, precision


def _on_host(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, precision: str, extras: Extras) -> None:
    """Interpreted. Types that the interpreter gets wrong are widened before and rounded by torch after."""
    if out.dtype == torch.float64:
        return interpret(described(a, b, out, precision, extras))
    wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    if a.dtype != torch.int8:
        precision = precision if a.dtype == torch.float32 else "ieee"
        a, b = a.float(), b.float()
    interpret(described(a, b, wide, precision, extras.mapped(torch.Tensor.float)))
    out.copy_(wide)
    return None


def _ordered(call_swapped: bool, a: Any, b: Any, out: Any, extras: Extras) -> list[torch.Tensor]:
    """The tensors in the order in which a launch takes them."""
    scale_a, scale_b, bias, residual = extras.tensors
    blocks = extras.blocks or ()
    if call_swapped:
        a, b, scale_a, scale_b, blocks = b, a, scale_b, scale_a, blocks[::-1]
    return [a, b, out, *(t for t in (scale_a, scale_b, bias, residual, *blocks) if t is not None)]


def fused_product(
    op: str,
    a: Any,
    b: Any,
    extras: Extras,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> torch.Tensor:
    """a @ b with an epilogue. Raises what `matmul` does, and for tensors that do not fit the result."""
    key = None
    tensors = (a, b, *extras.all)
    if all(t is None or (type(t) in PLAIN and t.is_cuda) for t in tensors) and not differentiating_forward():
        try:
            setting = product.default_precision() if a.dtype is torch.float32 else None
            wanted = (op, out_dtype, precision, setting, current_mode(), torch.is_grad_enabled())
            key = (*map(place, tensors), place(out), wanted, extras[4:7], extras.shared)
            hit = _memo.get(key)
        except (RuntimeError, AttributeError, TypeError):  # not of a kind that was ever prepared
            return _first(op, a, b, extras, out, out_dtype, precision, None)
        if hit is not None:
            if out is None:
                out = fresh(hit.shape, hit.strides, hit.dtype, hit.device)
            else:
                _check_apart(op, out, a, b, extras)
                written(out)
            hit.launch(*_ordered(hit.swapped, a, b, out, extras))
            return out
    return _first(op, a, b, extras, out, out_dtype, precision, key)


def _first(
    op: str,
    a: Any,
    b: Any,
    extras: Extras,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
    key: tuple[Any, ...] | None,
) -> torch.Tensor:
    current_mode()  # a wrong TRITILE_MODE is told of on any device
    shape, dtype, precision = _checked(op, a, b, extras, out, out_dtype, precision)
    given = out is not None
    result = torch.empty(shape, dtype=dtype, device=a.device) if out is None else out
    if result.numel() == 0:
        return result
    plain_a, plain_b = a.resolve_neg(), b.resolve_neg()
    plain = extras.mapped(torch.Tensor.resolve_neg)
    if a.shape[-1] == 0:
        sums = torch.zeros(shape, dtype=dtype, device=a.device)
        result.copy_(epilogue.finished(sums, plain.tensors, *plain[4:7]))
    elif on_host(a):
        _on_host(plain_a, plain_b, result, precision, plain)
    else:
        call = described(plain_a, plain_b, result, precision, plain)
        launch = prepared(call)
        launch(*call.tensors)
        same = zip((plain_a, plain_b, *plain.tensors), (a, b, *extras.tensors), strict=True)
        if key is not None and lasting() and all(x is y for x, y in same):
            strides = result.stride()
            _memo[key] = _Prepared(launch, call.swapped, shape, strides, dtype, result.device)
    return written(result) if given else result


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """activation(x @ weight^T + bias) + residual in one launch, torch's linear and what follows it.

    Args:
        x: (..., K), of a floating dtype of `tritile.matmul`.
        weight: (N, K), or (K,) for a result without N; of x's dtype. Or what `tritile.quantize` made of an
            (N, K) for x's dtype, bfloat16 or float16: then bias is (N,), and nothing else is taken.
        bias: (N,), or any shape that broadcasts to the result's.
        activation: "relu", "gelu", "gelu_tanh" (gelu's approximation by tanh), "silu", or None.
        residual: of a shape that broadcasts to the result's, added last.
        out: the result goes here. It may be residual or bias itself, and share no memory otherwise.
        out_dtype: as `tritile.matmul` takes it.
        precision: likewise.

    bias and residual are float16, bfloat16 or float32 (float64 where x is). Sums, and all that follows
    them, are kept in float32 (float64 for float64), and rounded once, as they are stored.

    Raises as `tritile.matmul` does, before any launch.
    """
    if isinstance(weight, QuantizedWeight):
        others: dict[str, Any] = {"activation": activation, "residual": residual, "out": out}
        others |= {"out_dtype": out_dtype, "precision": precision}
        given = ", ".join(name for name, value in others.items() if value is not None)
        if given:
            raise UnsupportedError(f"linear: {given} with a QuantizedWeight: wanted bias alone")
        return quantized_linear(x, weight, bias)
    extras = Extras(bias=bias, residual=residual, activation=check_activation("linear", activation))
    if isinstance(weight, torch.Tensor) and weight.ndim not in (1, 2):
        raise ShapeError(f"linear: weight is {tuple(weight.shape)}: wanted (N, K) or (K,)")
    turned = weight.t() if isinstance(weight, torch.Tensor) else weight
    return fused_product("linear", x, turned, extras, out, out_dtype, precision)


def _weighted(
    op: str, rank: int, added: Any, a: Any, b: Any, beta: Any, alpha: Any, activation: str | None
) -> Extras:
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(op, name, tensor)
        if tensor.ndim != rank:
            raise ShapeError(f"{op}: {name} is {tuple(tensor.shape)}: wanted {rank} dimensions")
    if rank == 3 and a.shape[0] != b.shape[0]:
        raise ShapeError(f"{op}: a is {tuple(a.shape)} and b {tuple(b.shape)}: wanted one batch size")
    weights = _check_weight(op, "alpha", alpha), _check_weight(op, "beta", beta)
    if added is None:
        raise DtypeError(f"{op}: input is None: wanted a torch.Tensor")
    return Extras(None, None, added, None, check_activation(op, activation), *weights)


def addmm(
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """activation(beta * input + alpha * (a @ b)) in one launch, with the meaning of `torch.addmm`.

    Args:
        input: of a shape that broadcasts to (M, N); not read where beta is 0.
        a: (M, K).
        b: (K, N).
        beta: a number, by which input is multiplied.
        alpha: a number, by which the product is.
        activation: as `tritile.linear` takes it.
        out: the result goes here. It may be input itself, and share no memory otherwise.
        out_dtype: as `tritile.matmul` takes it.
        precision: likewise.

    Raises as `tritile.linear` does.
    """
    extras = _weighted("addmm", 2, input, a, b, beta, alpha, activation)
    return fused_product("addmm", a, b, extras, out, out_dtype, precision)


def baddbmm(
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """The same as `tritile.addmm` for a (B, M, K) and b (B, K, N), with the meaning of `torch.baddbmm`."""
    extras = _weighted("baddbmm", 3, input, a, b, beta, alpha, activation)
    return fused_product("baddbmm", a, b, extras, out, out_dtype, precision)
