"""`tritile.grouped_matmul`: products of groups whose sizes only the GPU knows."""

import itertools
from dataclasses import dataclass
from typing import Any, Final

import torch

from tritile.choose.aten import MOST_GROUPS
from tritile.core.call import Call, GroupedCall, Memory, View
from tritile.core.device import capturing
from tritile.core.problem import (
    FP8_DTYPES,
    GROUPED_DTYPES,
    GROUPED_PRECISIONS,
    MAX_GROUPS,
    MAX_RAGGED,
    Precision,
)
from tritile.core.settings import is_batch_invariant
from tritile.core.triton_private import INTERPRETING
from tritile.errors import DtypeError, ShapeError, UnsupportedError
from tritile.ops import aten, reference
from tritile.ops.checks import (
    check_gpu,
    check_out,
    check_out_memory,
    check_same_dtype,
    check_tensor,
    describe,
    name_of,
    shapes,
)
from tritile.ops.dispatch import public
from tritile.ops.memo import Key, Tensors, launch_cached, mark_written
from tritile.ops.products import check_precision
from tritile.ops.request import Request, Result, computed, on_host, request_of, requests, run_plain

OP: Final = "grouped_matmul"
_OUT_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


@public
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
    """Multiply many groups in one call, as mixtures of experts do, like `torch._grouped_mm`.

    The ranks of a and b say which dimension the groups divide among them, its size being `total`:

    | a | b | result | |
    | --- | --- | --- | --- |
    | (total, K) | (groups, K, N) | (total, N) | rows of a by the b of their group |
    | (groups, M, K) | (K, total) | (M, total) | the a of each group by its columns of b |
    | (M, total) | (total, N) | (groups, M, N) | columns of a by rows of b: groups share K |
    | (groups, M, K) | (groups, K, N) | (groups, M, N) | a plain batch, without offs |

    Args:
        a: as in the table, with any strides.
        b: as in the table, with any strides. a and b have the same dtype: float16, bfloat16, float32,
            float8_e4m3fn or float8_e5m2.
        offs: (groups,) int32, contiguous: where each group ends in the dimension of size `total`; at most
            1,024 groups. None for a plain batch. Only the GPU reads it, and the host does not wait for it,
            unless groups share K: see below.
        scale_a: float32, for fp8 operands, contiguous: one scale for each row of a, (total,) if groups divide
            rows of a, else (groups, M).
        scale_b: the same for each column of b: (total,) or (groups, N). Pass both scales or neither.
        out_dtype: float16, bfloat16 or float32. Default: a's dtype; bfloat16 for fp8.
        out: tensor that receives the result. It has exactly the result's shape and dtype, any strides, and
            shares no memory with an operand.
        precision: for float32, "ieee" (without the compensation of `tritile.matmul`) or "tf32"; None is
            torch's setting, "ieee" if it was never set. For fp8, "ieee" or "fast", which keeps sums in the
            tensor cores (torch's use_fast_accum).

    Groups may have any size, zero included. Rows or columns of the result past the last offset are zero
    (torch leaves them unwritten), and so is the product of an empty group that shares K. An offset below the
    one before it counts as equal to that one; an offset outside of 0 to `total` counts as the nearer of the
    two. So no offset makes the call read or write anything else. Sums are kept in float32.

    On a GPU some groups are computed only by torch:

    - fp8, on Hopper: float8_e4m3fn to bfloat16, with contiguous rows of a and columns of b that start on 16
      bytes, N and K multiples of 16 (M and K if groups divide columns of b), and fewer than 1,024 groups.
      They cannot share K.
    - Groups that share K, in bfloat16 on Hopper. Elsewhere they are multiplied one after the other, and the
      host reads offs, so that a CUDA graph cannot capture the call.

    Differentiable with respect to a and b, except for fp8, by products of the same groups. The gradient of an
    operand with a matrix for each group is a product of groups that share K.

    Returns:
        A contiguous tensor, or `out` if that was passed.

    Raises:
        TritileError: an argument does not fit: ShapeError, DtypeError, DeviceError, OverlapError,
            GradientError, InvalidValueError or UnsupportedError. Nothing is launched.
        NotTunedError: in mode "strict", if no measurement covers the problem.
        NotCompiledError: in mode "strict", if a kernel would have to be compiled.
        TuningError: in mode "tune", if no config works.

    Warns:
        HostWarning: once per process, if tensors are in host memory.

    Examples:
        >>> tokens = torch.randn(10, 64, device="cuda", dtype=torch.bfloat16)
        >>> experts = torch.randn(3, 64, 32, device="cuda", dtype=torch.bfloat16)
        >>> ends = torch.tensor([4, 4, 10], dtype=torch.int32, device="cuda")  # 4, 0 and 6 tokens
        >>> tritile.grouped_matmul(tokens, experts, ends).shape
        torch.Size([10, 32])
    """
    tensors, options = (a, b, offs, scale_a, scale_b), (out_dtype, precision)
    return launch_cached(OP, tensors, out, options, computed)


def _check_offs(a: torch.Tensor, b: torch.Tensor, offs: Any) -> None:
    """Raise a TritileError unless offs is (groups,) int32, contiguous; or None if groups share nothing."""
    if a.ndim == b.ndim == 3:
        if offs is not None:
            raise ShapeError(f"{OP}: offs is {describe(offs)}: expected None, as a and b have 3 dimensions")
        if a.shape[0] != b.shape[0]:
            raise ShapeError(f"{OP}: {shapes(a=a, b=b)}: a has {a.shape[0]} groups and b {b.shape[0]}")
        return
    if offs is None:
        raise ShapeError(f"{OP}: {shapes(a=a, b=b)}, and offs is None: expected the end of each group")
    check_tensor(OP, "offs", offs, like=a, dtypes=(torch.int32,))
    groups = next((each.shape[0] for each in (a, b) if each.ndim == 3), None)
    if offs.ndim != 1 or (groups is not None and offs.shape[0] != groups):
        expected = "(groups,)" if groups is None else f"({groups},)"
        raise ShapeError(f"{OP}: offs has shape {tuple(offs.shape)}: expected {expected}")
    if offs.shape[0] > 1 and offs.stride(0) != 1:
        raise ShapeError(f"{OP}: offs has a stride of {offs.stride(0)}: expected contiguous elements")
    if offs.shape[0] > MAX_GROUPS:
        raise UnsupportedError(f"{OP}: offs has {offs.shape[0]} groups: expected at most {MAX_GROUPS}")


def _check_scales(a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any) -> None:
    """Raise a TritileError unless scales are both None, or contiguous float32, one a row and a column."""
    if (scale_a is None) != (scale_b is None):
        only = "scale_b" if scale_a is None else "scale_a"
        raise ShapeError(f"{OP}: only {only} was passed: expected scale_a and scale_b, or neither")
    if scale_a is None:
        return
    for name, scale, shape in (
        ("scale_a", scale_a, tuple(a.shape[:-1])),
        ("scale_b", scale_b, (*b.shape[:-2], b.shape[-1])),
    ):
        check_tensor(OP, name, scale, like=a, dtypes=(torch.float32,))
        if tuple(scale.shape) != shape or not scale.is_contiguous():
            found = f"shape {tuple(scale.shape)} and strides {scale.stride()}"
            raise ShapeError(f"{OP}: {name} has {found}: expected {shape}, contiguous")


def _view(name: str, tensor: torch.Tensor) -> View:
    (rows, columns), (*batch, row, column) = tensor.shape[-2:], tensor.stride()
    return Memory.of(name, tensor).view((rows, columns), (row, column), tuple(batch))


def grouped_call(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, scale_a: Any, scale_b: Any,
    out: torch.Tensor, precision: str,
) -> GroupedCall:  # fmt: skip
    """Return the call of arguments that were checked, whose groups share rows of a or columns of b.

    out has the shape of the result. If they share columns of b, the call is out^T = b^T a^T.
    """
    left, right, result = _view("a", a), _view("b", b), _view("out", out)
    both = (("scale_a", scale_a), ("scale_b", scale_b))
    scales = tuple(Memory.of(name, scale) for name, scale in both if scale is not None)
    if a.ndim == 3:
        left, right, result, scales = right.transposed, left.transposed, result.transposed, scales[::-1]
    ends, invariant = Memory.of("offs", offs), is_batch_invariant()
    return GroupedCall(len(offs), left, right, result, ends, precision, scales, invariant)


def _sharing_k(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, dtype: torch.dtype, precision: str | None
) -> torch.Tensor:
    """Return the product of each group of columns of a and rows of b, (groups, M, N).

    By torch's grouped product, or group by group, for which the host reads the offsets. Raises
    UnsupportedError if it may not, while a CUDA graph is captured, and if torch refuses.
    """
    made = aten.sharing_k(a, b, offs, dtype)
    if made is not None:
        return made
    if capturing():
        raise UnsupportedError(
            f"{OP}: groups share K, and the host cannot read offs while a CUDA graph is captured: "
            f"expected bfloat16, on Hopper, and at most {MOST_GROUPS} groups"
        )
    ends = list(itertools.accumulate((min(max(end, 0), a.shape[1]) for end in offs.tolist()), max))
    made = a.new_empty((len(ends), a.shape[0], b.shape[1]), dtype=dtype)
    by_torch = aten.may_make_groups() and precision is None and a.dtype == dtype
    for out, start, end in zip(made, [0, *ends], ends, strict=False):
        if by_torch:
            aten.MM(a[:, start:end], b[start:end], out=out)
        else:
            run_plain("matmul", (a[:, start:end], b[start:end]), out, (dtype, precision))
    return made


@dataclass(frozen=True)
class Groups(Request):
    """Hold the products of groups: of rows of a, of columns of b, of K, or of a batch.

    A plain batch is one of `tritile.matmul`, which has faster kernels. Groups that share K, and a batch with
    scales, have no kernel of tritile's own either.
    """

    op: str
    tensors: Tensors
    out_dtype: torch.dtype | None
    precision: str | None

    @property
    def is_empty(self) -> bool:  # type: ignore[override]
        a, b, *_ = self.tensors
        return 0 in (a.shape[0], a.shape[-1], b.shape[0])

    @property
    def _is_batch(self) -> bool:
        a, b, _, scale_a, _ = self.tensors
        return bool(a.ndim == b.ndim == 3 and scale_a is None)

    @property
    def _has_kernel(self) -> bool:
        a, b, *_ = self.tensors
        return bool(a.ndim != b.ndim)

    def _checked_dtype(self) -> torch.dtype:
        a, b, _, scale_a, _ = self.tensors
        check_same_dtype(OP, a=a, b=b)
        name, is_fp8 = name_of(a.dtype), name_of(a.dtype) in FP8_DTYPES
        if name not in GROUPED_DTYPES:
            raise DtypeError(f"{OP}: a is {name}: expected one of {', '.join(GROUPED_DTYPES)}")
        if self.out_dtype is not None and self.out_dtype not in _OUT_DTYPES:
            expected = ", ".join(map(str, _OUT_DTYPES))
            raise DtypeError(f"{OP}: out_dtype is {self.out_dtype!r}: expected one of {expected}")
        if scale_a is not None and not is_fp8:
            raise DtypeError(f"{OP}: scale_a is for fp8 operands, but a is {name}: expected None")
        if is_fp8 and a.ndim == b.ndim == 2:
            raise UnsupportedError(
                f"{OP}: a is {name}, and groups share K: expected bfloat16, float16 or float32"
            )
        return self.out_dtype or (torch.bfloat16 if is_fp8 else a.dtype)

    def checked(self, out: Any) -> Result:
        a, b, offs, *scales = self.tensors
        check_tensor(OP, "a", a)
        check_tensor(OP, "b", b, like=a)
        dtype = self._checked_dtype()
        precision = check_precision(OP, a.dtype, self.precision, GROUPED_PRECISIONS)
        check_gpu(OP, a)
        if not {a.ndim, b.ndim} <= {2, 3}:
            raise ShapeError(f"{OP}: {shapes(a=a, b=b)}: expected two or three dimensions each")
        if a.shape[-1] != b.shape[-2]:
            raise ShapeError(f"{OP}: {shapes(a=a, b=b)}: K is {a.shape[-1]} in a and {b.shape[-2]} in b")
        _check_offs(a, b, offs)
        _check_scales(a, b, *scales)
        m, n = a.shape[-2], b.shape[-1]
        shared = {(2, 3): m, (3, 2): n, (2, 2): a.shape[1]}.get((a.ndim, b.ndim), 0)
        if shared > MAX_RAGGED:
            raise UnsupportedError(
                f"{OP}: groups divide {shared} rows or columns: expected at most {MAX_RAGGED}"
            )
        groups = a.shape[0] if offs is None else offs.shape[0]
        shape = (m, n) if self._has_kernel else (groups, m, n)
        check_out(OP, out, shape, dtype, a)
        return shape, dtype, precision

    def check_memory(self, out: torch.Tensor) -> None:
        names = ("a", "b", "offs", "scale_a", "scale_b")
        check_out_memory(OP, out, **dict(zip(names, self.tensors, strict=True)))

    def call(self, out: torch.Tensor, precision: str) -> Call:
        a, b, offs, scale_a, scale_b = _resolved(self.tensors)
        if self._is_batch:
            product = request_of("matmul", a, b, out.dtype, self.precision)
            return product.call(out, product.checked(None)[2])
        if not self._has_kernel:
            dims = f"a has {a.ndim} dimensions and b {b.ndim}"
            raise UnsupportedError(f"{OP}: {dims}: such a call has no plan, because it runs other operations")
        return grouped_call(a, b, offs, scale_a, scale_b, out, precision)

    def compute(self, out: torch.Tensor) -> None:
        a, b, offs, scale_a, scale_b = self.tensors
        reference.grouped(a, b, offs, scale_a, scale_b, out)

    def run_delegated(self, out: torch.Tensor | None, precision: str) -> torch.Tensor | None:
        a, b, offs, scale_a, scale_b = self.tensors
        options = self.out_dtype, self.precision
        if self._is_batch:
            return run_plain("matmul", (a, b), out, options)
        is_empty = 0 in (*a.shape, *b.shape) or (offs is not None and not len(offs))
        if self._has_kernel or a.is_meta or is_empty or (on_host(a) and not INTERPRETING):
            return None
        a, b, offs, scale_a, scale_b = _resolved(self.tensors)
        if offs is None:  # a batch of fp8 with scales: groups that share rows of a
            groups, m, k = a.shape
            ends = torch.arange(m, groups * m + 1, m, dtype=torch.int32, device=a.device)
            rows = a.reshape(groups * m, k), b, ends, scale_a.view(-1), scale_b
            result = run_plain(OP, rows, None, options).view(groups, m, -1)
        else:
            result = _sharing_k(a, b, offs, self.out_dtype or a.dtype, self.precision)
        return result if out is None else mark_written(OP, out.copy_(result))


def _resolved(tensors: Tensors) -> Tensors:
    return tuple(None if tensor is None else tensor.resolve_neg() for tensor in tensors)


@requests(OP)
def _groups_of(op: str, tensors: Tensors, options: Key) -> Groups:
    return Groups(op, tensors, *options[:2])
