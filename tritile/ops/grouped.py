"""Offer `tritile.grouped_matmul`: products of groups whose sizes only the GPU knows."""

from typing import Any

import torch

from tritile.core.settings import rules
from tritile.ops import matmul as product
from tritile.ops.checks import check_out_memory
from tritile.ops.dispatch import call_operator, needs_dispatch
from tritile.ops.groups import OP, Operands, described, empty, result_of
from tritile.ops.memo import Key, launch_again, learnt, look_up, recall, remember
from tritile.ops.run import interpret_product, mark_written, on_host, prepared


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
        scales = {"scale_a": scale_a, "scale_b": scale_b}
        return call_operator(OP, a, b, offs, out=out, **scales, out_dtype=out_dtype, precision=precision)
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
    return _run_unprepared(of, out, out_dtype, precision, key)


def _run_unprepared(
    of: Operands, out: Any, out_dtype: torch.dtype | None, precision: str | None, key: Key | None
) -> torch.Tensor:
    """Run a call that is not in the memo of prepared calls, and remember its launch under `key`."""
    rules()  # report a wrong setting of the environment on any device
    shape, dtype, how = result_of(of, out, out_dtype, precision)
    if out is not None:
        check_out_memory(OP, out, **of.given)
    if of.a.ndim == of.b.ndim == 3 and of.scale_a is None:  # plain batches have faster kernels
        return product.eager(of.a, of.b, out, dtype, precision)
    result = torch.empty(shape, dtype=dtype, device=of.a.device) if out is None else out
    if empty(of, result):
        return result.zero_()
    if of.a.is_meta:
        return result if out is None else mark_written(OP, result)
    dense = Operands(*(None if tensor is None else tensor.resolve_neg() for tensor in of))
    if on_host(of.a):
        interpret_product(
            lambda read, *rest: described(dense._replace(a=read(dense.a), b=read(dense.b)), *rest),
            (dense.a,),
            result,
            how,
        )
    else:
        call = described(dense, result, how)
        launch = prepared(call)
        launch(*call.tensors)
        remember(key, OP, launch, call, of, result)
    return result if out is None else mark_written(OP, result)
