"""`tritile.transpose`: a contiguous transposed copy of any tensor."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from tritile.errors import ShapeError
from tritile.launch import Launch, SplitLaunch
from tritile.ops.checks import check_no_overlap, check_out, check_tensor
from tritile.ops.run import (
    PLAIN,
    differentiating_forward,
    interpret,
    lasting,
    new_memo,
    on_host,
    place,
    prepared,
    written,
)
from tritile.settings import current_mode
from tritile.views import TransposeCall, View, merged

_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Prepared(NamedTuple):
    launch: Launch | SplitLaunch
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device


_memo: dict[tuple[Any, ...], _Prepared] = new_memo()


def _words(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose first element is x's, in words of 1 to 8 bytes, for its address and dtype alone."""
    x = torch._neg_view(x) if x.is_neg() else x
    x = x.conj() if x.is_conj() else x
    size = x.element_size()
    if size == 16:
        return torch.view_as_real(x).view(torch.int64)
    return x.view(_WORDS[size])


def _flips(x: torch.Tensor) -> tuple[int, int]:
    """Bits to invert in the first and last word of each element, for lazy conjugation and negation."""
    if not (x.is_conj() or x.is_neg()):
        return 0, 0
    bits = 8 * x.element_size()
    if not x.is_complex():
        return 0, _signed(1 << (bits - 1), bits)
    real, imaginary = x.is_neg(), x.is_conj() != x.is_neg()
    if bits == 128:
        return real * _signed(1 << 63, 64), imaginary * _signed(1 << 63, 64)
    flip = real * (1 << (bits // 2 - 1)) | imaginary * (1 << (bits - 1))
    return 0, _signed(flip, bits)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def described(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int]) -> TransposeCall:
    """The call that copies x, its dimensions in the order `dims`, to out.

    Dimensions that stay together are merged. Of the rest, the one along which x is densest becomes n,
    the one along which out is densest m; where both are one, m is the next densest of out.
    """
    sizes, (x_strides, out_strides) = merged(
        [x.shape[d] for d in dims], [x.stride()[d] for d in dims], out.stride()
    )
    axes = list(range(len(sizes)))
    dense_x = min(axes, key=lambda i: (x_strides[i] == 0, x_strides[i], -i), default=None)
    rest = sorted((i for i in axes if i != dense_x), key=lambda i: (out_strides[i], x_strides[i]))
    dense_out = rest[0] if rest else None

    def of(values: Sequence[int], axis: int | None, empty: int) -> int:
        return empty if axis is None else values[axis]

    shape = (of(sizes, dense_out, 1), of(sizes, dense_x, 1))
    batch = [i for i in axes if i not in (dense_x, dense_out)]

    def view(tensor: torch.Tensor, strides: Sequence[int]) -> View:
        inner = (of(strides, dense_out, 1), of(strides, dense_x, 1))
        return View(_words(tensor), shape, inner, tuple(strides[i] for i in batch), x.element_size())

    batch_shape = tuple(sizes[i] for i in batch)
    return TransposeCall(view(x, x_strides), view(out, out_strides), batch_shape, _flips(x))


def swapped(ndim: int, dim0: Any, dim1: Any) -> list[int]:
    """The order of dimensions with two exchanged. Raises ShapeError for a dimension there is not."""
    dims = list(range(ndim))
    for name, dim in (("dim0", dim0), ("dim1", dim1)):
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise ShapeError(f"transpose: {name} is {dim!r}: wanted a whole number")
        low = min(-ndim, -2)  # a vector, or a scalar, is its own transpose
        if not low <= dim < max(ndim, 1):
            raise ShapeError(
                f"transpose: {name} is {dim}: wanted {low} to {max(ndim, 1) - 1} for {ndim} dimensions"
            )
    if ndim > 1:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return dims


def transpose(
    x: torch.Tensor, dim0: int = -2, dim1: int = -1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A contiguous copy of x with two dimensions exchanged: `x.transpose(dim0, dim1).contiguous()`.

    Args:
        x: any shape (a vector, or a scalar, is its own transpose) and strides, any dense dtype of 1 to 16
            bytes an element; lazy conjugation and negation are carried out on the way.
        dim0: a dimension to exchange; a negative one counts from the end.
        dim1: the other.
        out: the result goes here: its shape and dtype exactly, any strides, no memory shared with x.

    Tensors in host memory are copied in Triton's interpreter.

    Raises ShapeError, DtypeError, DeviceError, OverlapError, GradientError or UnsupportedError for
    arguments that do not fit, before any launch; NotTunedError in mode "strict"; TuningError in mode
    "tune" where no config works. Warns once (InterpreterWarning) on host tensors.
    """
    key = None
    if type(x) in PLAIN and x.is_cuda and not differentiating_forward():
        try:
            dims = (dim0, type(dim0), dim1, type(dim1))
            key = (place(x), dims, place(out), current_mode(), torch.is_grad_enabled())
            hit = _memo.get(key)
        except (RuntimeError, AttributeError, TypeError):  # not of a kind that was ever prepared
            return _first(x, dim0, dim1, out, None)
        if hit is not None:
            if out is None:
                out = torch.empty_strided(hit.shape, hit.strides, dtype=x.dtype, device=hit.device)
            else:
                check_no_overlap("transpose", out, x)
                written(out)
            if type(hit.launch) is Launch:  # which asks tensors for nothing but their addresses
                hit.launch(x, out)
            else:
                hit.launch(_words(x), _words(out))
            return out
    return _first(x, dim0, dim1, out, key)


def checked(x: Any, dim0: int, dim1: int, out: Any) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """x, the order of its dimensions, and the output: a fresh one where none came."""
    check_tensor("transpose", "x", x)
    dims = swapped(x.ndim, dim0, dim1)
    shape = tuple(x.shape[d] for d in dims)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_out("transpose", out, shape, x.dtype, x)
    # Negating a whole number is more than inverting its sign bit.
    whole = x.is_neg() and not (x.is_floating_point() or x.is_complex())
    return x.resolve_neg() if whole else x, dims, out


def _first(x: Any, dim0: int, dim1: int, out: Any, key: tuple[Any, ...] | None) -> torch.Tensor:
    """A call that was not met before: check, plan, compile, launch, and remember how under `key`."""
    current_mode()  # a wrong TRITILE_MODE is told of on any device
    given = out is not None
    dense, dims, out = checked(x, dim0, dim1, out)
    if out.numel() == 0:
        return out
    call = described(dense, out, dims)
    if on_host(x):
        interpret(call)
        return written(out) if given else out
    launch = prepared(call)
    launch(*call.tensors)
    if given:
        written(out)
    if key is not None and dense is x and lasting():
        _memo[key] = _Prepared(launch, tuple(out.shape), out.stride(), out.device)
    return out
