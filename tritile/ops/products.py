"""Check and describe products, with or without an epilogue."""

from dataclasses import dataclass
from typing import Any, Final

import torch

from tritile.core import epilogue
from tritile.core.precision import explained
from tritile.core.problem import FP8_DTYPES, MATMUL_DTYPES, PRECISIONS_OF, SIDES, suits
from tritile.core.settings import is_batch_invariant
from tritile.core.views import MatmulCall
from tritile.errors import DtypeError, InvalidValueError, ShapeError, UnsupportedError
from tritile.families.numerics import BY_DATA
from tritile.ops import reference
from tritile.ops.asked import Asked, Change, Result, asks
from tritile.ops.checks import (
    broadcast,
    check_beside,
    check_out,
    check_out_memory,
    check_same_device,
    check_tensor,
    name_of,
    names_of,
)
from tritile.ops.described import NOTHING, Extras, described
from tritile.ops.memo import IN_FP32, Tensors, check_out_apart, default_precision, reaches_of
from tritile.ops.signatures import name_of_role

_HALF: Final = (torch.float32, torch.float16, torch.bfloat16)  # stored from, and added to, sums in fp32
_FROM_FP8: Final = (torch.bfloat16, torch.float16, torch.float32)
_OUT_DTYPES: Final = {
    torch.float16: _HALF,
    torch.bfloat16: _HALF,
    torch.float32: _HALF,
    torch.float64: (torch.float64,),
    torch.int8: (torch.int32,),
    torch.float8_e4m3fn: _FROM_FP8,
    torch.float8_e5m2: _FROM_FP8,
    torch.complex64: (torch.complex64,),
    torch.complex128: (torch.complex128,),
}  # the operands' own dtype is the default where it is listed, else the first


def _check_dtypes(
    op: str, names: tuple[str, str], a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None,
    scaled: bool,
) -> torch.dtype:  # fmt: skip
    mixed = name_of(a.dtype) in FP8_DTYPES and name_of(b.dtype) in FP8_DTYPES
    if a.dtype != b.dtype and not mixed:
        kinds = f"{names[0]} is {name_of(a.dtype)} and {names[1]} {name_of(b.dtype)}"
        raise DtypeError(f"{op}: {kinds}: wanted the same dtype")
    if a.dtype not in _OUT_DTYPES:
        raise DtypeError(f"{op}: {names[0]} is {name_of(a.dtype)}: wanted one of {', '.join(MATMUL_DTYPES)}")
    allowed = _FROM_FP8 if scaled else _OUT_DTYPES[a.dtype]
    if out_dtype is None:
        return a.dtype if a.dtype in allowed else allowed[0]
    if out_dtype not in allowed:
        wanted = f"one of {names_of(allowed)} for {name_of(a.dtype)}"
        raise DtypeError(f"{op}: out_dtype is {out_dtype}: wanted {wanted}")
    return out_dtype


def check_precision(op: str, dtype: torch.dtype, precision: str | None) -> str:
    """Return the precision of a product, torch's setting where `precision` is None, or "ieee" without one.

    Raises:
        InvalidValueError: the dtype has no such precision.
        UnsupportedError: a batch-invariant call cannot have it.
    """
    allowed = PRECISIONS_OF.get(name_of(dtype))
    if precision is not None and allowed is None:
        wanted = ", ".join(PRECISIONS_OF)
        raise InvalidValueError(
            f"{op}: precision is {precision!r} for {name_of(dtype)}: wanted None, or operands of {wanted}"
        )
    if precision is not None and allowed is not None and precision not in allowed:
        raise InvalidValueError(
            f"{op}: precision is {precision!r}: wanted one of {', '.join(allowed)} for {name_of(dtype)} "
            f"({explained(allowed, name_of(dtype))})"
        )
    setting = default_precision() if precision is None and dtype in IN_FP32 else "ieee"
    precision = precision or ("ieee" if setting == "none" else setting)
    if precision == BY_DATA and is_batch_invariant():
        raise UnsupportedError(
            f"{op}: precision is {precision!r} in a batch-invariant call, but its result for a row can "
            "depend on other rows: wanted another precision"
        )
    if dtype.is_complex and is_batch_invariant():
        raise UnsupportedError(
            f"{op}: operands are {name_of(dtype)} in a batch-invariant call, but only torch multiplies "
            "these, and a row of its result can depend on other rows: wanted real operands"
        )
    return precision


def unset_precision(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return how to multiply where neither the caller nor torch's setting says so: "ieee" or "fp16x3".

    Products of float32 are made of parts in fp16 where that is faster and errs no more than torch's fp32.
    """
    sizes = a.ndim > 1 and b.ndim > 1 and suits(a.shape[-2], b.shape[-1], a.shape[-1])
    real = a.dtype == torch.float32 and sizes and not is_batch_invariant()
    return "fp16x3" if real and capability(a.device) == (9, 0) else "ieee"


def capability(device: torch.device) -> tuple[int, int] | None:
    # Without CUDA here a tensor of a GPU is a fake one, of a GPU elsewhere.
    here = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if here else None


def check_gpu(op: str, a: torch.Tensor) -> None:
    """Raise UnsupportedError where the operand's GPU does not multiply its dtype."""
    name, found = name_of(a.dtype), capability(a.device)
    needed = (8, 9) if name in FP8_DTYPES else (8, 0) if name == "bfloat16" else (7, 5)
    if found is not None and found < needed:
        raise UnsupportedError(
            f"{op}: {name} needs compute capability {needed[0]}.{needed[1]}, but "
            f"{torch.cuda.get_device_name(a.device)} has {found[0]}.{found[1]}"
        )


def _result_shape(op: str, names: tuple[str, str], a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Return the shape that torch.matmul gives. Raise ShapeError where it gives none."""
    shapes = f"{names[0]} has shape {tuple(a.shape)} and {names[1]} {tuple(b.shape)}"
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"{op}: {shapes}: wanted at least one dimension each")
    inner = b.shape[0] if b.ndim == 1 else b.shape[-2]
    if a.shape[-1] != inner:
        raise ShapeError(f"{op}: {shapes}: K is {a.shape[-1]} in {names[0]} and {inner} in {names[1]}")
    try:
        batch = broadcast(a.shape[:-2], b.shape[:-2])
    except ShapeError as error:
        raise ShapeError(f"{op}: {shapes}: batch dimensions do not broadcast") from error
    rows = a.shape[-2:-1] if a.ndim > 1 else ()
    columns = b.shape[-1:] if b.ndim > 1 else ()
    return (*batch, *rows, *columns)


def _check_side(op: str, name: str, tensor: Any, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    alike = like.dtype == torch.float64 or like.is_complex()
    check_beside(op, like, name, tensor, (like.dtype,) if alike else _HALF)
    try:
        fits = broadcast(tensor.shape, shape) == shape
    except ShapeError:
        fits = False
    if not fits:
        own = tuple(tensor.shape)
        raise ShapeError(f"{op}: {name} has shape {own}: wanted one that broadcasts to {shape}")


@dataclass(frozen=True)
class Product(Asked):
    """Hold a product a @ b with an epilogue. A product without any has the very `NOTHING` as its extras."""

    op: str
    tensors: Tensors
    a: Any
    b: Any
    extras: Extras = NOTHING
    out_dtype: torch.dtype | None = None
    precision: str | None = None

    @property
    def first(self) -> Any:
        return self.a

    @property
    def is_empty(self) -> bool:  # type: ignore[override]
        """True if the product is zeros, whatever the factors hold: K is 0, or alpha, as in torch."""
        return bool(self.a.shape[-1] == 0 or self.extras.alpha == 0)

    def checked(self, out: Any) -> Result:
        op, a, b, extras = self.op, self.a, self.b, self.extras
        names = name_of_role(op, "a"), name_of_role(op, "b")
        for name, tensor in zip(names, (a, b), strict=True):
            check_tensor(op, name, tensor)
        check_same_device(op, a, names[1], b)
        dtype = _check_dtypes(op, names, a, b, self.out_dtype, extras.scaled)
        precision = check_precision(op, a.dtype, self.precision)
        for operand in (a, b):
            check_gpu(op, operand)
        shape = _result_shape(op, names, a, b)
        unnamed = self.precision is None and a.dtype == torch.float32 and default_precision() == "none"
        if unnamed and not extras.scaled and extras.up is None:
            precision = unset_precision(a, b)
        if extras is not NOTHING and not (dtype.is_floating_point or dtype.is_complex):
            raise DtypeError(f"{op}: {names[0]} is {name_of(a.dtype)}: wanted a floating or complex dtype")
        for role in SIDES:
            tensor = getattr(extras, role)
            if tensor is not None:
                _check_side(op, name_of_role(op, role), tensor, a, shape)
        if out is not None:
            check_out(op, out, shape, dtype, a)
        return shape, dtype, precision

    def check_memory(self, out: torch.Tensor) -> None:
        """Raise OverlapError where the memory of out overlaps. It may be exactly a tensor that is added."""
        check_out_memory(self.op, out)
        unread = self.extras.bias if self.extras.beta == 0 else None
        check_out_apart(self.op, out, self.tensors, reaches_of(self.tensors, unread))

    def call(self, change: Change, out: torch.Tensor, how: str) -> MatmulCall:
        def plain(tensor: torch.Tensor) -> torch.Tensor:
            # torch, which multiplies complex numbers, reads lazily negated ones as they lie
            return change(tensor) if tensor.is_complex() else change(tensor).resolve_neg()

        if self.extras.blocks is not None and not out.is_contiguous():
            out = out.new_empty(out.shape)  # torch's result is copied to out
        return described(plain(self.a), plain(self.b), out, how, self.extras.mapped(plain))

    def compute(self, out: torch.Tensor) -> None:
        reference.product(self.a, self.b, self.extras, out)

    def fill(self, out: torch.Tensor) -> None:
        if self.extras is NOTHING:
            out.zero_()
            return
        extras, sums = self.extras.mapped(torch.Tensor.resolve_neg), torch.zeros_like(out)
        up = None if extras.up is None else sums
        how = (extras.activation, extras.alpha, extras.beta)
        out.copy_(epilogue.finished(sums, extras.tensors, *how, up))


@asks("matmul")
def matmul_of(input: Any, other: Any, out_dtype: Any = None, precision: Any = None) -> Product:
    return Product("matmul", (input, other), input, other, NOTHING, out_dtype, precision)
