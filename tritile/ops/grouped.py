"""`tritile.grouped_matmul`: products of groups whose sizes only the GPU knows, as in mixtures of experts."""

from typing import Any, NamedTuple

import torch

from tritile.core.forgetting import new_memo
from tritile.core.settings import rules
from tritile.ops import matmul as product
from tritile.ops.checks import check_no_overlap, check_room, entangled, reach
from tritile.ops.dispatch import dispatched, diverted
from tritile.ops.groups import OP, Operands, described, empty, result_of
from tritile.ops.matmul import default_precision
from tritile.ops.run import fresh, interpret_product, lasting, on_host, place, prepared, written
from tritile.runtime.launch import Launch, SplitLaunch


class _Prepared(NamedTuple):
    launch: Launch | SplitLaunch
    swapped: bool  # made as out^T = b^T a^T
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    reaches: tuple[int, ...]  # of the operands that there are, and of out


_memo: dict[tuple[Any, ...], _Prepared] = new_memo()


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
    """Products of groups in one launch, as in mixtures of experts, with the meaning of `torch._grouped_mm`.

    Args:
        a: (total, K), rows of which belong to groups; (groups, M, K); or (M, total), whose columns do.
        b: (groups, K, N); (K, total), whose columns belong to groups; or (total, N), whose rows do. Any
            strides. One dtype for a and b: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
        offs: (groups,) int32, where each group ends in what they share: total. None where a and b have three
            dimensions. At most 1,024 groups. It is read on the GPU alone: nothing waits for it.
        scale_a: float32, of fp8 operands: one for each row of a, contiguous. (total,) where groups share
            rows; (groups, M) of a matrix for each group; (groups * M,) where they share K.
        scale_b: the same for each column of b: (total,), (groups, N) or (groups * N,).
        out_dtype: float16, bfloat16 or float32. Default: a's own; bfloat16 for fp8.
        out: the result goes here: its shape and dtype exactly, any strides, no memory shared with the
            operands.
        precision: of float32 products, "ieee" (without `tritile.matmul`'s compensation), "tf32x3" or "tf32",
            by default as there; of fp8, "fast" leaves sums to the tensor cores (torch's use_fast_accum).

    Returns, contiguous: (total, N), a's rows by the b of their group; (M, total), the a of their group by b's
    columns; (groups, M, N), the columns of a by the rows of b of each group, zero for an empty one; and
    (groups, M, N) of three dimensions each, which are a plain batch.

    Groups may have any size, none included. Rows, or columns, of the result past the last offset are zero
    (torch leaves them as they are). An offset below an earlier one counts as that one, and one outside of
    0 to total as the nearest of these: whatever the offsets, nothing else is read or written.
    Sums are kept in float32; of fp8, those of a block of K in the 14 bits that Hopper's tensor cores keep.

    Differentiable by a and b, but for fp8 and scales: by products of the same groups.

    Raises ShapeError, DtypeError, DeviceError, OverlapError, GradientError, InvalidValueError or
    UnsupportedError for arguments that do not fit, before any launch; NotTunedError in mode "strict";
    TuningError in mode "tune" where no config works. Warns once (InterpreterWarning) on host tensors.
    """
    of = Operands(a, b, offs, scale_a, scale_b)
    if dispatched(*of, out):
        scales = {"scale_a": scale_a, "scale_b": scale_b}
        return diverted(OP, a, b, offs, out=out, **scales, out_dtype=out_dtype, precision=precision)
    return eager(of, out, out_dtype, precision)


def eager(
    of: Operands, out: Any = None, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    """`grouped_matmul` of plain tensors, which is what its operator runs on CUDA and CPU."""
    key = hit = None
    try:
        if all(t.is_cuda for t in of if t is not None):
            setting = default_precision() if of.a.dtype is torch.float32 else None
            wanted = (out_dtype, precision, setting, rules())
            key = (*map(place, of), place(out), wanted)
            hit = _memo.get(key)
    except (RuntimeError, AttributeError, TypeError):  # not of a kind that was ever prepared
        key = None
    if hit is None:
        return _first(of, out, out_dtype, precision, key)
    if out is None:
        out = fresh(hit.shape, hit.strides, hit.dtype, hit.device)
    else:
        given = of.given
        if any(
            entangled(t, r, out, hit.reaches[-1]) for t, r in zip(given.values(), hit.reaches, strict=False)
        ):
            check_no_overlap(OP, out, **given)
        written(OP, out)
    hit.launch(*_in_order(of, out, hit.swapped))
    return out


def _in_order(of: Operands, out: torch.Tensor, swapped: bool) -> list[torch.Tensor]:
    """The tensors as `GroupedCall.tensors` has them."""
    offs = () if of.offs is None else (of.offs,)
    scales = () if of.scale_a is None else (of.scale_a, of.scale_b)
    if swapped:
        return [of.b, of.a, out, *offs, *scales[::-1]]
    return [of.a, of.b, out, *offs, *scales]


def _first(
    of: Operands,
    out: Any,
    out_dtype: torch.dtype | None,
    precision: str | None,
    key: tuple[Any, ...] | None,
) -> torch.Tensor:
    """A call that was not met before: check, plan, compile, launch, and remember how under `key`."""
    rules()  # wrong settings of the environment are told of on any device
    given = out is not None
    shape, dtype, precision_of = result_of(of, out, out_dtype, precision)
    if given:
        check_room(OP, out, **of.given)
    if of.a.ndim == of.b.ndim == 3 and of.scale_a is None:  # plain batches have faster kernels
        return product.eager(of.a, of.b, out, dtype, precision)
    out = torch.empty(shape, dtype=dtype, device=of.a.device) if out is None else out
    dense = Operands(*(None if tensor is None else tensor.resolve_neg() for tensor in of))
    if empty(of, out):
        return out.zero_()
    if of.a.is_meta:
        return written(OP, out) if given else out
    if on_host(of.a):
        interpret_product(
            lambda read, *rest: described(dense._replace(a=read(dense.a), b=read(dense.b)), *rest),
            (dense.a,),
            out,
            precision_of,
        )
        return written(OP, out) if given else out
    call = described(dense, out, precision_of)
    launch = prepared(call)
    launch(*call.tensors)
    if given:
        written(OP, out)
    same = all(one is other for one, other in zip(dense, of, strict=True))
    if key is not None and same and lasting():
        sizes = (tuple(out.shape), out.stride())
        reaches = tuple(map(reach, (*of.given.values(), out)))
        _memo[key] = _Prepared(launch, call.swapped, *sizes, out.dtype, out.device, reaches)
    return out
