"""Offer `tritile.grouped_matmul`: products of groups whose sizes only the GPU knows."""

from dataclasses import dataclass
from typing import Any

import torch

from tritile.core.views import Call
from tritile.ops import matmul
from tritile.ops.asked import Asked, Change, Result, run_unprepared, unchanged
from tritile.ops.checks import check_out_memory
from tritile.ops.dispatch import call_operator, needs_dispatch
from tritile.ops.groups import OP, Operands, described, result_of
from tritile.ops.memo import launch_again, learnt, look_up, recall
from tritile.ops.products import matmul_of


def grouped_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Multiply many groups in one launch, as in mixtures of experts and as `torch._grouped_mm` does.

    Args:
        a: (total, K), whose rows belong to groups; (groups, M, K); or (M, total), whose columns belong to
            groups.
        b: (groups, K, N); (K, total), whose columns belong to groups; or (total, N), whose rows do. Any
            strides. a and b have one dtype: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
        offs: (groups,) int32, the end of each group in the dimension that groups share, `total`. None where a
            and b have three dimensions. At most 1,024 groups. Only the GPU reads it: the host does not wait
            for it.
        scale_a: float32, for fp8 operands: one for each row of a, contiguous. (total,) where groups share
            rows; (groups, M) where each group has a matrix; (groups * M,) where they share K.
        scale_b: the same for each column of b: (total,), (groups, N) or (groups * N,).
        out_dtype: float16, bfloat16 or float32. Default: a's own; bfloat16 for fp8.
        out: tensor to write the result to: exactly its shape and dtype, any strides, no memory shared with an
            operand.
        precision: for float32, "ieee" (without `tritile.matmul`'s compensation), "tf32x3" or "tf32", with its
            default; for fp8, "fast" leaves sums to the tensor cores (torch's use_fast_accum).

    Groups may have any size, zero included. Rows or columns of the result past the last offset are zero
    (torch leaves them unwritten). An offset below an earlier one counts as that one, and one outside of 0 to
    total as the nearest of these: whatever the offsets, nothing else is read or written. Sums are computed in
    float32; those of fp8 within a block of K in the 14 bits that Hopper's tensor cores keep.

    Differentiable with respect to a and b, except for fp8 and with scales, by products of the same groups.

    Returns:
        A contiguous tensor, or out: (total, N), rows of a by the b of their group; (M, total), the a of each
            group by its columns of b; (groups, M, N), the columns of a by the rows of b of each group, zero
            for an empty group; or (groups, M, N), a plain batch, where a and b have three dimensions.

    Raises:
        TritileError: an argument does not fit: ShapeError, DtypeError, DeviceError, OverlapError,
            GradientError, InvalidValueError or UnsupportedError. Nothing is launched.
        NotTunedError, NotCompiledError: in mode "strict".
        TuningError: no config works, in mode "tune".

    Warns once (InterpreterWarning) on host tensors.
    """
    tensors, options = (a, b, offs, scale_a, scale_b), (out_dtype, precision)
    done = recall(OP, tensors, out, options)
    if done is not None:
        return done
    if needs_dispatch(*tensors, out):
        return call_operator(OP, (*tensors, *options), out)
    return learnt(OP, a, tensors, out, options, eager(*tensors, out, out_dtype, precision))


def eager(
    a: Any, b: Any, offs: Any = None, scale_a: Any = None, scale_b: Any = None, out: Any = None,
    out_dtype: torch.dtype | None = None, precision: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run `grouped_matmul` on plain tensors: the kernel of its operator on CUDA and CPU."""
    of = Operands(a, b, offs, scale_a, scale_b)
    key, ready, addresses = look_up(OP, a, of, out, (out_dtype, precision))
    if ready is not None:
        return launch_again(OP, ready, of, out, addresses)
    return run_unprepared(Groups(of, out_dtype, precision), out, key)


def grouped_of(
    a: Any, b: Any, offs: Any = None, scale_a: Any = None, scale_b: Any = None, out_dtype: Any = None,
    precision: Any = None,
) -> "Groups":  # fmt: skip
    """Return the products that `grouped_matmul` computes."""
    return Groups(Operands(a, b, offs, scale_a, scale_b), out_dtype, precision)


@dataclass(frozen=True)
class Groups(Asked):
    """Hold the products of all groups."""

    tensors: Operands
    out_dtype: torch.dtype | None
    precision: str | None
    op: str = OP

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to multiply, so that the whole result is zero."""
        a, b, *_ = self.tensors
        return 0 in (a.shape[0], a.shape[-1], b.shape[0])

    @property
    def _is_batch(self) -> bool:
        """Tell whether it is a plain batch, for which products have faster kernels."""
        a, b, _, scale_a, _ = self.tensors
        return bool(a.ndim == b.ndim == 3 and scale_a is None)

    def checked(self, out: Any) -> Result:
        """Do as `Asked.checked`."""
        return result_of(self.tensors, out, self.out_dtype, self.precision)

    def check_memory(self, out: torch.Tensor) -> None:
        """Raise OverlapError where the memory of out overlaps."""
        check_out_memory(OP, out, **self.tensors.given)

    def call(self, change: Change, out: torch.Tensor, how: str) -> Call:
        """Return the described call."""
        parts = Operands(*(None if t is None else change(t).resolve_neg() for t in self.tensors))
        if self._is_batch:
            product = matmul_of(parts.a, parts.b, out.dtype, self.precision)
            return product.call(unchanged, out, product.checked(None)[2])
        return described(parts, out, how)

    def run_otherwise(self, out: torch.Tensor | None, dtype: torch.dtype, how: str) -> torch.Tensor | None:
        """Return the products of a plain batch, else None."""
        a, b, *_ = self.tensors
        return matmul.eager(a, b, out, dtype, self.precision) if self._is_batch else None
