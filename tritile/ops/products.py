"""Check products, with or without an epilogue, and fold their tensors to views."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from tritile.core import epilogue
from tritile.core.call import MatmulCall, Memory, View
from tritile.core.epilogue import SIDES
from tritile.core.permutation import merged
from tritile.core.problem import AS_TORCH, FP8_DTYPES, PRECISIONS_OF
from tritile.core.settings import fp32_by_parts, is_batch_invariant, rules
from tritile.errors import DtypeError, InvalidValueError, ShapeError, UnsupportedError, did_you_mean
from tritile.families.numerics import BY_DATA, explained
from tritile.ops import reference
from tritile.ops.aten import complex_product
from tritile.ops.checks import (
    broadcast,
    check_activation,
    check_gpu,
    check_out,
    check_out_memory,
    check_same_dtype,
    check_tensor,
    name_of,
    names_of,
    number_of,
    shapes,
)
from tritile.ops.dispatch import OPTIONS, TENSORS, WEIGHTS, name_of_role
from tritile.ops.memo import Key, Tensors, check_out_apart, default_precision, mark_written, reaches_of
from tritile.ops.request import Request, Result, on_host, requests

_RIGHTS: Final = ("b", "up")
HALF: Final = (torch.float32, torch.float16, torch.bfloat16)  # stored from, and added to, sums in fp32
_FROM_FP8: Final = (torch.bfloat16, torch.float16, torch.float32)
_OUT_DTYPES: Final = {
    torch.float16: HALF,
    torch.bfloat16: HALF,
    torch.float32: HALF,
    torch.float64: (torch.float64,),
    torch.int8: (torch.int32,),
    torch.float8_e4m3fn: _FROM_FP8,
    torch.float8_e5m2: _FROM_FP8,
    torch.complex64: (torch.complex64,),
    torch.complex128: (torch.complex128,),
}  # the operands' own dtype is the default where it is listed, else the first
_GATED_PRECISIONS: Final = {"float32": ("ieee", "tf32"), "float64": ("ieee",)}


# --- Checks ---


def check_precision(
    op: str,
    dtype: torch.dtype,
    precision: str | None,
    among: Mapping[str, Sequence[str]] = PRECISIONS_OF,
) -> str:
    """Return the precision of a product, torch's setting if `precision` is None, or "ieee" without one.

    `among`: those that operands of each dtype may name. A setting that tritile does not know is `AS_TORCH`.

    Raises:
        InvalidValueError: the dtype has no such precision.
        UnsupportedError: a batch-invariant call cannot have it, or tritile does not know torch's setting and
            torch has no kernel for the operation.
    """
    name, allowed = name_of(dtype), among.get(name_of(dtype), ())
    if precision is None:
        setting = default_precision() if dtype == torch.float32 else "ieee"
        precision = "ieee" if setting == "none" else setting
        if precision not in ("ieee", "tf32"):
            _check_torch_computes(op, setting, among)
            precision = AS_TORCH
    elif not allowed:
        raise InvalidValueError(
            f"{op}: precision is {precision!r} for {name} operands: expected None, which is the only choice "
            f"except for {', '.join(among)}"
        )
    elif precision not in allowed:
        raise InvalidValueError(
            f"{op}: precision is {precision!r}{did_you_mean(precision, allowed)}: "
            f"expected one of {', '.join(allowed)} for {name} ({explained(allowed, name)})"
        )
    if precision == BY_DATA and is_batch_invariant():
        raise UnsupportedError(
            f"{op}: precision is {precision!r} in a batch-invariant call, but in that precision a row of the "
            "result can depend on other rows: expected another precision"
        )
    return precision


def _check_torch_computes(op: str, setting: str, among: Mapping[str, Sequence[str]]) -> None:
    """Raise UnsupportedError if torch cannot compute a call in its setting, as tritile cannot."""
    if is_batch_invariant():
        why = "a row of torch's result can depend on other rows"
    elif among is not PRECISIONS_OF:
        why = "torch has no kernel for this operation"
    else:
        return
    raise UnsupportedError(
        f"{op}: torch.backends.cuda.matmul.fp32_precision is {setting!r}, which tritile does not "
        f"compute, and {why}: expected precision={among['float32'][0]!r} by name, or another setting"
    )


def _result_shape(op: str, names: tuple[str, str], a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of torch.matmul's result. Raise ShapeError if it has none."""
    label = shapes(**dict(zip(names, (a, b), strict=True)))
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"{op}: {label}: expected at least one dimension each")
    inner = b.shape[0] if b.ndim == 1 else b.shape[-2]
    if a.shape[-1] != inner:
        raise ShapeError(f"{op}: {label}: K is {a.shape[-1]} in {names[0]} and {inner} in {names[1]}")
    try:
        batch = broadcast(a.shape[:-2], b.shape[:-2])
    except ShapeError as error:
        raise ShapeError(f"{op}: {label}: batch dimensions do not broadcast") from error
    return (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))


def _check_side(op: str, name: str, tensor: Any, like: torch.Tensor, shape: tuple[int, ...]) -> None:
    own = like.dtype == torch.float64 or like.is_complex()
    check_tensor(op, name, tensor, like=like, dtypes=(like.dtype,) if own else HALF)
    try:
        fits = broadcast(tensor.shape, shape) == shape
    except ShapeError:
        fits = False
    if not fits:
        found = tuple(tensor.shape)
        raise ShapeError(f"{op}: {name} has shape {found}: expected one that broadcasts to {shape}")


# --- The call ---


def _batch_strides(tensor: torch.Tensor, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor's batch dimensions, broadcast to `batch`: 0 for an expanded one."""
    missing = len(batch) - (tensor.ndim - 2)
    own = [0 if size == 1 else step for size, step in zip(tensor.shape[:-2], tensor.stride(), strict=False)]
    return (*[0] * missing, *own)


def _folded(views: dict[str, View], batch: tuple[int, ...]) -> tuple[dict[str, View], tuple[int, ...]]:
    """Fold batch dimensions into M if b is one matrix for all of them.

    A dimension can be folded if one step along it is M steps along M, in every tensor that has rows.
    """
    while batch:
        size, m = batch[-1], views["a"].shape[0]
        with_rows = [view for name, view in views.items() if name not in _RIGHTS]
        fits = m == 1 or all(view.batch_strides[-1] == m * view.strides[0] for view in with_rows)
        if not fits or any(views[name].batch_strides[-1] for name in _RIGHTS if name in views):
            break
        for name, view in views.items():
            (rows, columns), (row, column) = view.shape, view.strides
            if name not in _RIGHTS:
                rows, row = m * size, row if m > 1 else view.batch_strides[-1]
            views[name] = view.view((rows, columns), (row, column), view.batch_strides[:-1])
        batch = batch[:-1]
    return views, batch


def matmul_call(
    input: torch.Tensor,
    other: torch.Tensor,
    out: torch.Tensor,
    precision: str = "ieee",
    *,
    activation: str = "",
    alpha: complex = 1.0,
    beta: complex = 1.0,
    up: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, ...] = (),
    block_scales: str = "",
    **sides: torch.Tensor | None,
) -> MatmulCall:
    """Return the call of a product whose arguments were checked. out has the shape of the result.

    `sides` are the epilogue's tensors, by the names of `core.epilogue.SIDES`, of shapes that broadcast to the
    result's. `up` is the second matrix of a gated product. `scales` are those of input and other
    within the sum; `block_scales` says how many rows and columns share one.

    A column-major result is computed as the row-major result of the transposed operands. Batch-invariant
    calls are not transposed: a result of many rows and one column is column-major, one of a single row is
    not.
    """
    batch = broadcast(input.shape[:-2], other.shape[:-2])

    def as_rows(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.unsqueeze(-1) if other.ndim == 1 else tensor
        return rows.unsqueeze(-2) if input.ndim == 1 else rows

    present = {name: tensor for name in SIDES if (tensor := sides.get(name)) is not None}
    matrices = {
        "a": input.unsqueeze(0) if input.ndim == 1 else input,
        "b": other.unsqueeze(1) if other.ndim == 1 else other,
        "out": as_rows(out),
        **{name: as_rows(tensor.expand(out.shape)) for name, tensor in present.items()},
        **({} if up is None else {"up": up}),
    }
    batch, steps = merged(batch, *(_batch_strides(tensor, batch) for tensor in matrices.values()))
    views: dict[str, View] = {}
    for (name, tensor), of_batch in zip(matrices.items(), steps, strict=True):
        (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
        if name in present:
            row, column = row if rows > 1 else 0, column if columns > 1 else 0
        views[name] = Memory.of(name, tensor).view((rows, columns), (row, column), of_batch)
    views, batch = _folded(views, batch)
    call = MatmulCall(
        views["a"], views["b"], views["out"], batch, precision, {name: views[name] for name in present},
        activation, alpha, beta, views.get("up"),
        tuple(Memory.of(name, scale) for name, scale in zip(("scale_a", "scale_b"), scales, strict=False)),
        block_scales, invariant=is_batch_invariant(),
    )  # fmt: skip
    transposes = call.out.layout == "column" and up is None and not call.invariant
    return call.transposed if transposes else call


# --- The request ---


@dataclass(frozen=True)
class Product(Request):
    """Hold a product of input and other with an epilogue: see `matmul_call` for what its fields mean."""

    op: str
    tensors: Tensors
    input: Any
    other: Any
    out_dtype: torch.dtype | None = None
    precision: str | None = None
    sides: Mapping[str, Any] = field(default_factory=dict)
    activation: str = ""
    alpha: complex = 1.0
    beta: complex = 1.0
    up: Any = None
    scales: tuple[Any, ...] = ()
    block_scales: str = ""

    @property
    def first(self) -> Any:
        return self.input

    @property
    def is_empty(self) -> bool:  # type: ignore[override]
        """True if the product is zeros, whatever the factors hold: K is 0, or alpha, as in torch."""
        return bool(self.input.shape[-1] == 0 or self.alpha == 0)

    def _epilogue(self, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Return the epilogue as keywords, its tensors changed. A bias with beta = 0 is not read."""
        sides = {name: change(side) for name, side in self.sides.items() if name != "bias" or self.beta != 0}
        return sides | {
            "activation": self.activation,
            "alpha": self.alpha,
            "beta": self.beta,
            "up": None if self.up is None else change(self.up),
            "scales": tuple(map(change, self.scales)),
            "block_scales": self.block_scales,
        }

    def _checked_dtype(self, names: tuple[str, str]) -> torch.dtype:
        op, (name, *_), dtype = self.op, names, self.input.dtype
        if not {name_of(dtype), name_of(self.other.dtype)} <= set(FP8_DTYPES):  # which may be mixed
            check_same_dtype(op, **dict(zip(names, (self.input, self.other), strict=True)))
        if dtype not in _OUT_DTYPES:
            raise DtypeError(f"{op}: {name} is {name_of(dtype)}: expected one of {names_of(_OUT_DTYPES)}")
        is_scaled = bool(self.scales) or "scale_a" in self.sides
        allowed = _FROM_FP8 if is_scaled else _OUT_DTYPES[dtype]
        found = self.out_dtype or (dtype if dtype in allowed else allowed[0])
        if found not in allowed:
            expected = f"one of {', '.join(map(str, allowed))} for {name_of(dtype)} operands"
            raise DtypeError(f"{op}: out_dtype is {found!r}: expected {expected}")
        if op != "matmul" and not (found.is_floating_point or found.is_complex):
            raise DtypeError(f"{op}: {name} is {name_of(dtype)}: expected a floating or complex dtype")
        return found

    def checked(self, out: Any) -> Result:
        op, a, b = self.op, self.input, self.other
        names = name_of_role(op, "a"), name_of_role(op, "b")
        check_tensor(op, names[0], a)
        check_tensor(op, names[1], b, like=a)
        dtype = self._checked_dtype(names)
        among = PRECISIONS_OF if self.up is None else _GATED_PRECISIONS
        named = self.precision
        if named is None and a.dtype == torch.float32 and self.up is None and fp32_by_parts():
            named = BY_DATA
        precision = check_precision(op, a.dtype, named, among)
        for operand in (a, b):
            check_gpu(op, operand)
        if a.is_complex() and is_batch_invariant():
            raise UnsupportedError(
                f"{op}: operands are {name_of(a.dtype)} in a batch-invariant call, but only torch multiplies "
                "these, and a row of its result can depend on other rows: expected real operands"
            )
        shape = _result_shape(op, names, a, b)
        for role, tensor in self.sides.items():
            _check_side(op, name_of_role(op, role), tensor, a, shape)
        check_out(op, out, shape, dtype, a)
        return shape, dtype, precision

    def check_memory(self, out: torch.Tensor) -> None:
        """Raise OverlapError if the memory of out overlaps. It may be exactly a tensor that is added."""
        check_out_memory(self.op, out)
        unread = self.sides.get("bias") if self.beta == 0 else None
        check_out_apart(self.op, out, self.tensors, reaches_of(self.tensors, unread))

    def run_delegated(self, out: torch.Tensor | None, precision: str) -> torch.Tensor | None:
        """Have torch compute a product of complex numbers."""
        if not self.input.is_complex() or self.input.is_meta:
            return None
        if not (on_host(self.input) or rules().aten):
            raise UnsupportedError(
                f'{self.op}: only torch computes complex products, and backends is "triton": expected '
                '"triton,aten", or real operands'
            )
        result = complex_product(self, out)
        return result if out is None else mark_written(self.op, result)

    def call(self, out: torch.Tensor, precision: str) -> MatmulCall:
        if self.input.is_complex():
            raise UnsupportedError(
                f"{self.op}: torch computes complex products: tritile has nothing to plan, tune or explain"
            )
        plain = torch.Tensor.resolve_neg
        if self.scales and not out.is_contiguous():
            out = out.new_empty(out.shape)  # torch's result is copied to out
        return matmul_call(plain(self.input), plain(self.other), out, precision, **self._epilogue(plain))

    def compute(self, out: torch.Tensor) -> None:
        reference.product(self.input, self.other, out, **self._epilogue(lambda tensor: tensor))

    def fill(self, out: torch.Tensor) -> None:
        operands, sums = self._epilogue(torch.Tensor.resolve_neg), torch.zeros_like(out)
        sides = [operands.get(side) for side in SIDES]
        up = None if self.up is None else sums
        scales: tuple[Any, Any] = self.alpha, self.beta
        out.copy_(epilogue.apply_epilogue(sums, sides, self.activation, *scales, up))


@requests("matmul")
def product_of(op: str, tensors: Tensors, options: Key) -> Product:
    """Return the request of a product, by the roles of its tensors and the names of its options."""
    roles = {role: tensor for (role, _), tensor in zip(TENSORS[op], tensors, strict=True)}
    named = dict(zip(OPTIONS[op], options, strict=False))
    a, b, up = roles["a"], roles["b"], roles.get("up")
    if op in WEIGHTS:
        b, up = b.t(), None if up is None else up.t()
    sides = {name: roles[name] for name in SIDES if roles.get(name) is not None}
    weights: dict[str, Any] = {
        name: number_of(op, name, named[name], a) for name in ("alpha", "beta") if name in named
    }
    activation = check_activation(op, named.get("activation"), a)
    out_dtype, precision = named.get("out_dtype"), named.get("precision")
    return Product(op, tensors, a, b, out_dtype, precision, sides, activation, **weights, up=up)
