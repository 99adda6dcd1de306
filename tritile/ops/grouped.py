"""Offer `tritile.grouped_matmul`: products of groups whose sizes only the GPU knows."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from tritile.core.call import Call, GroupedCall, Memory, View
from tritile.core.device import capturing
from tritile.core.of_torch import is_deterministic
from tritile.core.of_triton import INTERPRETING
from tritile.core.precision import explained
from tritile.core.problem import (
    FP8_DTYPES,
    GROUPED_DTYPES,
    GROUPED_PRECISIONS,
    MAX_GROUPS,
    MAX_RAGGED,
    Precision,
)
from tritile.core.settings import is_batch_invariant, uses_aten
from tritile.errors import DtypeError, InvalidValueError, ShapeError, UnsupportedError, brief
from tritile.families import by_torch as torchs
from tritile.ops import reference
from tritile.ops.call import (
    Request,
    Result,
    computed,
    on_host,
    requests,
    run_plain,
    wide,
)
from tritile.ops.checks import (
    check_operand,
    check_out,
    check_out_memory,
    check_same_device,
    check_tensor,
    describe,
    name_of,
    names_of,
)
from tritile.ops.memo import mark_written, recall
from tritile.ops.products import capability, check_gpu, check_precision, matmul_of
from tritile.planning.aten import MOST_GROUPS

OP: Final = "grouped_matmul"
_MM: Final = torch.mm  # bound now: a program may put tritile's functions in the place of torch's
_OUT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
# What groups share, by the number of dimensions of a and b.
_RAGGED: Final = {(2, 3): "rows of a", (3, 2): "columns of b", (2, 2): "k", (3, 3): "none"}


def grouped_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Multiply many groups in one call, as in mixtures of experts and as `torch._grouped_mm` does.

    Args:
        a: (total, K), whose rows belong to groups; (groups, M, K); or (M, total), whose columns belong to
            groups.
        b: (groups, K, N); (K, total), whose columns belong to groups; or (total, N), whose rows do. Any
            strides. a and b have one dtype: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
        offs: (groups,) int32, the end of each group in the dimension that groups share, `total`. None where a
            and b have three dimensions. At most 1,024 groups. Only the GPU reads it, and the host does not
            wait for it, unless groups share K: see below.
        scale_a: float32, for fp8 operands: one for each row of a, contiguous: (total,) where groups share
            rows, else (groups, M).
        scale_b: the same for each column of b: (total,) or (groups, N).
        out_dtype: float16, bfloat16 or float32. Default: a's own; bfloat16 for fp8.
        out: tensor to write the result to: exactly its shape and dtype, any strides, no memory shared with an
            operand.
        precision: for float32, "ieee" (without `tritile.matmul`'s compensation) or "tf32", with its default;
            for fp8, "fast" leaves sums to the tensor cores (torch's use_fast_accum).

    Groups may have any size, zero included. Rows or columns of the result past the last offset are zero
    (torch leaves them unwritten). An offset below an earlier one counts as that one, and one outside of 0 to
    total as the nearest of these: whatever the offsets, nothing else is read or written. Sums are computed in
    float32.

    Groups of fp8 are torch's alone, on Hopper: of float8_e4m3fn, to bfloat16, by contiguous rows of a and
    columns of b that start on 16 bytes, N and K (M and K where groups share columns) multiples of 16, fewer
    than 1,024 groups. They cannot share K. Those that share K are torch's too, in bfloat16 on Hopper; else
    they are multiplied one by one, and the host reads offs, which a CUDA graph cannot capture.

    Differentiable with respect to a and b, except for fp8, by products of the same groups. The gradient of
    what each group has a matrix of is one of groups that share K.

    Returns:
        A contiguous tensor, or out: (total, N), rows of a by the b of their group; (M, total), the a of each
            group by its columns of b; (groups, M, N), the columns of a by the rows of b of each group, zero
            for an empty group; or (groups, M, N), a plain batch, where a and b have three dimensions.

    Raises:
        TritileError: an argument does not fit: ShapeError, DtypeError, DeviceError, OverlapError,
            GradientError, InvalidValueError or UnsupportedError. Nothing is launched.
        NotTunedError, NotCompiledError: in mode "strict".
        TuningError: no config works, in mode "tune".

    Warns once (HostWarning) on host tensors.
    """
    tensors, options = (a, b, offs, scale_a, scale_b), (out_dtype, precision)
    return recall(OP, tensors, out, options, computed)


class Operands(NamedTuple):
    """Hold the tensors of a call, None where one is not given."""

    a: Any
    b: Any
    offs: Any
    scale_a: Any
    scale_b: Any


def _check_dtypes(of: Operands, out_dtype: torch.dtype | None) -> torch.dtype:
    a, b = of.a, of.b
    if a.dtype != b.dtype:
        raise DtypeError(f"{OP}: a is {name_of(a.dtype)} and b {name_of(b.dtype)}: wanted the same dtype")
    if name_of(a.dtype) not in GROUPED_DTYPES:
        raise DtypeError(f"{OP}: a is {name_of(a.dtype)}: wanted one of {', '.join(GROUPED_DTYPES)}")
    if out_dtype is not None and out_dtype not in _OUT_DTYPES:
        raise DtypeError(f"{OP}: out_dtype is {out_dtype}: wanted one of {names_of(_OUT_DTYPES)}")
    if of.scale_a is not None and name_of(a.dtype) not in FP8_DTYPES:
        raise DtypeError(f"{OP}: scale_a is given for {name_of(a.dtype)}: scales are for fp8 operands")
    return out_dtype or (a.dtype if a.dtype in _OUT_DTYPES else torch.bfloat16)


def _check_precision(dtype: torch.dtype, precision: str | None) -> str:
    found, allowed = check_precision(OP, dtype, precision), GROUPED_PRECISIONS.get(name_of(dtype), ("ieee",))
    if found not in allowed:
        name = name_of(dtype)
        wanted = f"{', '.join(allowed)} for {name} ({explained(allowed, name)})"
        raise InvalidValueError(f"{OP}: precision is {found!r}: wanted one of {wanted}")
    return found


def _check_offs(of: Operands, groups: int | None) -> None:
    """Raise a TritileError unless offs is (groups,) int32, contiguous; or None where groups share nothing."""
    a, offs = of.a, of.offs
    if a.ndim == 3 and of.b.ndim == 3:
        if offs is not None:
            raise ShapeError(f"{OP}: offs is {describe(offs)}: wanted None, as a and b have 3 dimensions")
        return
    if offs is None:
        shapes = f"a is {tuple(a.shape)} and b {tuple(of.b.shape)}"
        raise ShapeError(f"{OP}: {shapes}, and offs is None: wanted offs, the end of each group")
    check_operand(OP, a, "offs", offs, (torch.int32,))
    if offs.ndim != 1 or (groups is not None and offs.shape[0] != groups):
        wanted = "(groups,)" if groups is None else f"({groups},)"
        raise ShapeError(f"{OP}: offs has shape {tuple(offs.shape)}: wanted {wanted}")
    if offs.shape[0] > 1 and offs.stride(0) != 1:
        raise ShapeError(f"{OP}: offs has a stride of {offs.stride(0)}: wanted contiguous elements")
    if offs.shape[0] > MAX_GROUPS:
        raise UnsupportedError(f"{OP}: offs has {offs.shape[0]} groups: wanted at most {MAX_GROUPS}")


def _check_scales(of: Operands, wanted: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Raise a TritileError unless scales are float32, contiguous and of these shapes, both or neither."""
    if (of.scale_a is None) != (of.scale_b is None):
        given = "scale_b" if of.scale_a is None else "scale_a"
        raise ShapeError(f"{OP}: only {given} is given: wanted scale_a and scale_b, or neither")
    if of.scale_a is None:
        return
    for name, scale, shape in zip(("scale_a", "scale_b"), of[3:], wanted, strict=True):
        check_operand(OP, of.a, name, scale, (torch.float32,))
        if tuple(scale.shape) != shape or not scale.is_contiguous():
            found = f"shape {tuple(scale.shape)} and strides {scale.stride()}"
            raise ShapeError(f"{OP}: {name} has {found}: wanted {shape}, contiguous")


def _shapes(of: Operands) -> tuple[tuple[int, ...], int | None, int, tuple[Any, Any]]:
    """Return the result's shape, the number of groups, the shared size and the shapes of the scales.

    The number of groups is None where only offs tells it; the shared size is 0 where groups share nothing.
    """
    a, b, offs = of.a, of.b, of.offs
    shapes = f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}"
    ragged = _RAGGED.get((a.ndim, b.ndim))
    if ragged is None:
        raise ShapeError(f"{OP}: {shapes}: wanted two or three dimensions each")
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(f"{OP}: {shapes}: K is {a.shape[-1]} in a and {b.shape[-2]} in b")
    m, n = a.shape[-2], b.shape[-1]
    if ragged == "rows of a":
        groups = b.shape[0]
        return (m, n), groups, m, ((m,), (groups, n))
    if ragged == "columns of b":
        groups = a.shape[0]
        return (m, n), groups, n, ((groups, m), (n,))
    if ragged == "none":
        groups = a.shape[0]
        if groups != b.shape[0]:
            raise ShapeError(f"{OP}: {shapes}: a has {groups} groups and b {b.shape[0]}")
        return (groups, m, n), groups, 0, ((groups, m), (groups, n))
    count = offs.shape[0] if isinstance(offs, torch.Tensor) and offs.ndim == 1 else 0
    return (count, m, n), None, a.shape[1], ((), ())


def _view(name: str, tensor: torch.Tensor) -> View:
    """Return the view of a matrix, or of one for each group."""
    *batch, row, column = tensor.stride()
    rows, columns = tensor.shape[-2:]
    return View(Memory.of(name, tensor), (rows, columns), (row, column), tuple(batch))


def grouped_call(of: Operands, out: torch.Tensor, precision: str) -> GroupedCall:
    """Return the call of arguments that were checked, whose groups share rows of a or columns of b.

    out has the shape of the result. Where they share columns of b, the call is out^T = b^T a^T.
    """
    a, b, result = _view("a", of.a), _view("b", of.b), _view("out", out)
    given = (("scale_a", of.scale_a), ("scale_b", of.scale_b))
    scales = tuple(Memory.of(name, scale) for name, scale in given if scale is not None)
    if of.a.ndim == 3:
        a, b, result, scales = b.transposed, a.transposed, result.transposed, scales[::-1]
    offs = Memory.of("offs", of.offs)
    return GroupedCall(len(of.offs), a, b, result, offs, precision, scales, is_batch_invariant())


def _as_rows(of: Operands, options: tuple[Any, ...]) -> torch.Tensor:
    """Return a batch of fp8 products with scales, as one whose groups share rows of a."""
    groups, m, k = of.a.shape
    ends = torch.arange(m, groups * m + 1, m, dtype=torch.int32, device=of.a.device)
    rows = of.a.reshape(groups * m, k), of.b, ends, of.scale_a.view(-1), of.scale_b
    return run_plain(OP, rows, None, options).view(groups, m, -1)


def _sharing_k(of: Operands, dtype: torch.dtype, precision: str | None) -> torch.Tensor:
    """Return the product of each group of columns of a and rows of b, (groups, M, N).

    In bfloat16 by torch's grouped product; else group by group, for which the host reads the offsets. Raises
    UnsupportedError where it may not, while a CUDA graph is captured, and where torch refuses.
    """
    (a, b, offs, *_), uses_torch = of, uses_aten() and not (is_batch_invariant() or is_deterministic())
    one_launch = uses_torch and capability(a.device) == (9, 0) and len(offs) <= MOST_GROUPS
    if one_launch and a.dtype == dtype == torch.bfloat16:
        try:
            return torchs.sharing_k(a, b, offs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise UnsupportedError(f"{OP}: torch refuses groups that share K: {brief(error)}") from error
    if capturing():
        raise UnsupportedError(
            f"{OP}: groups share K, and the host reads offs, which it cannot while a CUDA graph is captured: "
            f"wanted bfloat16, on Hopper, and at most {MOST_GROUPS} groups"
        )
    total, uses_torch = a.shape[1], uses_torch and precision is None and a.dtype == dtype
    ends = list(itertools.accumulate((min(max(end, 0), total) for end in offs.tolist()), max))
    made = a.new_empty((len(ends), a.shape[0], b.shape[1]), dtype=dtype)
    for out, start, end in zip(made, [0, *ends], ends, strict=False):
        if uses_torch:
            _MM(a[:, start:end], b[start:end], out=out)
        else:
            run_plain("matmul", (a[:, start:end], b[start:end]), out, (dtype, precision))
    return made


@dataclass(frozen=True)
class Groups(Request):
    tensors: Operands
    out_dtype: torch.dtype | None
    precision: str | None
    op: str = OP

    @property
    def is_empty(self) -> bool:  # type: ignore[override]
        a, b, *_ = self.tensors
        return 0 in (a.shape[0], a.shape[-1], b.shape[0])

    @property
    def _is_batch(self) -> bool:
        # A plain batch, for which products have faster kernels.
        a, b, _, scale_a, _ = self.tensors
        return bool(a.ndim == b.ndim == 3 and scale_a is None)

    @property
    def _is_one_call(self) -> bool:
        a, b, *_ = self.tensors
        return bool(a.ndim != b.ndim)

    def checked(self, out: Any) -> Result:
        of = self.tensors
        for name, tensor in (("a", of.a), ("b", of.b)):
            check_tensor(OP, name, tensor)
        check_same_device(OP, of.a, "b", of.b)
        dtype = _check_dtypes(of, self.out_dtype)
        precision = _check_precision(of.a.dtype, self.precision)
        check_gpu(OP, of.a)
        if of.a.ndim == of.b.ndim == 2 and name_of(of.a.dtype) in FP8_DTYPES:
            raise UnsupportedError(f"{OP}: groups of fp8 share K: wanted bfloat16, float16 or float32")
        shape, groups, shared, scales = _shapes(of)
        _check_offs(of, groups)
        _check_scales(of, scales)
        if shared > MAX_RAGGED:
            raise UnsupportedError(f"{OP}: groups share a dimension of {shared}: wanted at most {MAX_RAGGED}")
        if out is not None:
            check_out(OP, out, shape, dtype, of.a)
        return shape, dtype, precision

    def check_memory(self, out: torch.Tensor) -> None:
        given = {name: tensor for name, tensor in self.tensors._asdict().items() if tensor is not None}
        check_out_memory(OP, out, **given)

    def call(self, out: torch.Tensor, how: str) -> Call:
        if not (self._is_batch or self._is_one_call):
            a, b, *_ = self.tensors
            shapes = f"a has {a.ndim} dimensions and b {b.ndim}"
            raise UnsupportedError(
                f"{OP}: {shapes}: such a call is made of others, and has no plan of its own"
            )
        parts = Operands(*(None if t is None else t.resolve_neg() for t in self.tensors))
        if self._is_batch:
            product = matmul_of(parts.a, parts.b, out.dtype, self.precision)
            return product.call(out, product.checked(None)[2])
        return grouped_call(parts, out, how)

    def compute(self, out: torch.Tensor) -> None:
        reference.grouped(*self.tensors, out)

    def widened(self) -> "Groups":
        return replace(self, tensors=Operands(*map(wide, self.tensors)))

    def run_otherwise(self, out: torch.Tensor | None, how: str) -> torch.Tensor | None:
        a, b, offs, *_ = of = self.tensors
        options = self.out_dtype, self.precision
        if self._is_batch:
            return run_plain("matmul", (a, b), out, options)
        is_empty = 0 in (*a.shape, *b.shape) or (offs is not None and not len(offs))
        if self._is_one_call or a.is_meta or is_empty or (on_host(a) and not INTERPRETING):
            return None
        of = Operands(*(None if tensor is None else tensor.resolve_neg() for tensor in of))
        if offs is None:
            made = _as_rows(of, options)
        else:
            made = _sharing_k(of, self.out_dtype or a.dtype, self.precision)
        return made if out is None else mark_written(OP, out.copy_(made))


@requests(OP)
def _groups_of(
    a: Any, b: Any, offs: Any, scale_a: Any, scale_b: Any, out_dtype: Any, precision: Any
) -> Groups:
    return Groups(Operands(a, b, offs, scale_a, scale_b), out_dtype, precision)
