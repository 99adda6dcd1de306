"""`tritile.permute`, `transpose` and `contiguous`: copies with the dimensions in any order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import handle_torch_function

from tritile.core.call import Memory, PermuteCall
from tritile.core.permutation import PermuteProblem
from tritile.core.torch_private import neg_view
from tritile.errors import ShapeError
from tritile.ops import reference
from tritile.ops.checks import check_out, check_out_memory, check_tensor, same_memory
from tritile.ops.dispatch import PLAIN, is_overridden, needs_dispatch, public
from tritile.ops.memo import Key, Tensors, launch_cached
from tritile.ops.request import Request, Result, computed, interpret, requests

_SEQUENCES: Final = (list, tuple)
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(x: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Return a tensor at the address of x, of integers of `itemsize` bytes, at most 8.

    Only its address and dtype count.
    """
    x = neg_view(x) if x.is_neg() else x
    x = x.conj() if x.is_conj() else x
    kind = _INTEGERS[min(itemsize, 8)]
    if x.element_size() == 16:
        x = torch.view_as_real(x)
    x = x.view(_INTEGERS[x.element_size()])
    if kind == x.dtype:
        return x
    return torch.empty(0, dtype=kind, device=x.device).set_(
        x.untyped_storage(), x.storage_offset() * x.element_size() // kind.itemsize, (1,), (1,)
    )


def _flips(x: torch.Tensor) -> tuple[int, int]:
    """Return the bits to invert in the first and last word of an element, to conjugate and negate it."""
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


def permute_call(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int]) -> PermuteCall:
    """Return the call that copies x to out, with the dimensions of x in the order `dims`."""
    flip = _flips(x)
    # A wider word must be aligned both in memory and within the storage.
    x_at, out_at = (t.data_ptr() | int(t.storage_offset()) * t.element_size() for t in (x, out))
    problem = PermuteProblem.of(
        [x.shape[d] for d in dims],
        [x.stride()[d] for d in dims],
        out.stride(),
        x.element_size(),
        (x_at % 16, out_at % 16),
        widen=flip == (0, 0),
    )
    # A copy of x onto itself with equal strides moves nothing.
    in_place = same_memory(x, out) and problem.x_strides != problem.out_strides
    x, out = (_as_integers(tensor, problem.itemsize) for tensor in (x, out))
    return PermuteCall(problem, Memory.of("x", x), Memory.of("out", out), flip, in_place)


def _check_dimension(op: str, name: str, dim: Any, low: int, high: int, ndim: int) -> None:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ShapeError(f"{op}: {name} is {dim!r}: expected an integer")
    if not low <= dim <= high:
        raise ShapeError(f"{op}: {name} is {dim}: expected {low} to {high} for {ndim} dimensions")


def dims_of(op: str, ndim: int, options: Key) -> list[int]:
    """Return the order of dimensions, counted from the start, by the options of `permute` or `transpose`.

    Raises ShapeError unless it is a permutation of dimensions that exist.
    """
    order = list(range(ndim))
    if op == "transpose":
        for name, dim in zip(("dim0", "dim1"), options, strict=False):
            _check_dimension(op, name, dim, min(-ndim, -2), max(ndim - 1, 0), ndim)
        if ndim > 1:  # a vector, or a scalar, is its own transpose
            one, other, *_ = options
            order[one], order[other] = order[other], order[one]
        return order
    dims = options[0]
    if not isinstance(dims, _SEQUENCES):
        raise ShapeError(f"permute: dims is {dims!r}: expected a list or tuple of {ndim} dimensions")
    if len(dims) == ndim:
        for place, dim in enumerate(dims):
            _check_dimension(op, f"dims[{place}]", dim, -ndim, ndim - 1, ndim)
        found = [dim % ndim for dim in dims]
        if sorted(found) == order:
            return found
    raise ShapeError(f"permute: dims is {tuple(dims)}: expected each of the {ndim} dimensions once")


@public
def permute(input: torch.Tensor, dims: Sequence[int], *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a contiguous copy of input with its dimensions reordered: `input.permute(dims).contiguous()`.

    Args:
        input: any shape and strides, in any dense dtype of 1 to 16 bytes per element. Lazy conjugation and
            negation are applied.
        dims: for each dimension of the result, which dimension of input it is; negative numbers count from
            the end.
        out: tensor that receives the result. It has exactly the result's shape and dtype, any strides, and
            shares no memory with input, except that it may be input itself if two dimensions of the same size
            are exchanged.

    Differentiable, by a copy back. Tensors in host memory are copied by torch.

    Returns:
        The copy. It is `out` if that was passed.

    Raises:
        TritileError: an argument does not fit: ShapeError, DtypeError, DeviceError, OverlapError,
            GradientError or UnsupportedError. Nothing is launched.
        NotTunedError: in mode "strict", if no measurement covers the problem.
        NotCompiledError: in mode "strict", if a kernel would have to be compiled.
        TuningError: in mode "tune", if no config works.

    Warns:
        HostWarning: once per process, if tensors are in host memory.

    Examples:
        >>> x = torch.randn(8, 3, 50, 60, device="cuda")
        >>> tritile.permute(x, (0, 2, 3, 1)).shape
        torch.Size([8, 50, 60, 3])
    """
    return launch_cached("permute", (input,), out, options_of(dims), _computed)


def options_of(dims: Any) -> Key:
    """Return dims as `permute`'s options, with their types: True equals 1 in a key, and is refused."""
    return (tuple(dims), *map(type, dims)) if isinstance(dims, _SEQUENCES) else (dims,)


def contiguous(input: torch.Tensor) -> torch.Tensor:
    """Return input if it is contiguous, else a contiguous copy of the sliced, expanded or permuted view.

    Unlike the result of torch's, this one is never lazily conjugated or negated.

    Args:
        input: any tensor that `tritile.permute` takes.

    Returns:
        input itself, or its copy.

    Raises:
        TritileError: the same errors as `tritile.permute`, if a copy is needed.
    """
    if type(input) not in PLAIN and is_overridden(input):
        made: torch.Tensor = handle_torch_function(contiguous, (input,), input)
        return made
    return permute(input, tuple(range(input.ndim))) if copied(input) else input


def copied(input: Any) -> bool:
    """True if `contiguous` copies its argument. Raises a TritileError if that is not a dense tensor."""
    if not isinstance(input, torch.Tensor) or input.is_nested or input.layout != torch.strided:
        check_tensor("contiguous", "input", input)
    return not input.is_contiguous() or input.is_conj() or input.is_neg()


@public
def transpose(
    input: torch.Tensor, dim0: int = -2, dim1: int = -1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a contiguous copy with two dimensions exchanged: `input.transpose(dim0, dim1).contiguous()`.

    Args:
        input: as in `tritile.permute`. A vector or scalar is its own transpose.
        dim0: a dimension to exchange; negative numbers count from the end.
        dim1: the other dimension.
        out: as in `tritile.permute`.

    Returns:
        The copy. It is `out` if that was passed.

    Raises:
        TritileError: the same errors as `tritile.permute`.

    Examples:
        >>> x = torch.randn(8, 50, 60, device="cuda")
        >>> tritile.transpose(x).shape
        torch.Size([8, 60, 50])
    """
    return launch_cached("transpose", (input,), out, (dim0, dim1, type(dim0), type(dim1)), _computed)


def _computed(op: str, tensors: Tensors, out: Any, options: Key, key: Key | None) -> torch.Tensor:
    if needs_dispatch(*tensors, out):  # torch has one operator, and would refuse wrong dims in its own words
        op, options = "permute", (dims_of(op, tensors[0].ndim, options),)
    return computed(op, tensors, out, options, key)


@requests("permute", "transpose")
@dataclass(frozen=True)
class Permutation(Request):
    """Hold a copy. `options` has the order of dimensions, or the two that "transpose" exchanges."""

    op: str
    tensors: Tensors
    options: Key

    @property
    def dims(self) -> list[int]:
        return dims_of(self.op, self.first.ndim, self.options)

    def checked(self, out: Any) -> Result:
        check_tensor(self.op, "input", self.first)
        shape, dtype = tuple(self.first.shape[d] for d in self.dims), self.first.dtype
        check_out(self.op, out, shape, dtype, self.first)
        return shape, dtype, ""

    def check_memory(self, out: torch.Tensor) -> None:
        x = self.first
        moved = [i for i, dim in enumerate(self.dims) if i != dim]
        mirrors = len(moved) == 2 and x.shape[moved[0]] == x.shape[moved[1]]
        check_out_memory(self.op, out, input=None if mirrors and same_memory(x, out) else x)

    def call(self, out: torch.Tensor, precision: str) -> PermuteCall:
        x = self.first
        # Negating an integer takes more than inverting its sign bit.
        whole = x.is_neg() and not (x.is_floating_point() or x.is_complex())
        return permute_call(x.resolve_neg() if whole else x, out, self.dims)

    def compute(self, out: torch.Tensor) -> None:
        reference.permute(self.first, self.dims, out)

    def interpret(self, out: torch.Tensor, precision: str) -> None:
        interpret(self.call(out, precision))
