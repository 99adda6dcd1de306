"""Offer `tritile.matmul`, `mm` and `bmm`: torch's products for any size, stride and layout."""

from typing import Any, Final

import torch

from tritile.core.problem import FP8_DTYPES, MATMUL_DTYPES, MAX_DEPTH, PRECISIONS_OF
from tritile.core.settings import is_batch_invariant, rules
from tritile.errors import DtypeError, InvalidValueError, ShapeError, UnsupportedError
from tritile.families.numerics import BY_DATA
from tritile.ops.checks import (
    broadcast,
    check_like,
    check_no_overlap,
    check_rank,
    check_room,
    check_same_device,
    check_tensor,
    entangled,
    name_of,
)
from tritile.ops.described import described
from tritile.ops.dispatch import dispatched, diverted
from tritile.ops.recall import CALLS, IN_FP32, UNTELLABLE, default_precision, remember
from tritile.ops.run import fresh, interpret_product, on_host, place, prepared, written
from tritile.runtime.launch import Launch

_HALF: Final = (torch.float16, torch.bfloat16, torch.float32)
_OUT_DTYPES: Final = {
    torch.float16: _HALF,
    torch.bfloat16: _HALF,
    torch.float32: (torch.float32, torch.float16, torch.bfloat16),
    torch.float64: (torch.float64,),
    torch.int8: (torch.int32,),
    torch.float8_e4m3fn: (torch.bfloat16, torch.float16, torch.float32),
    torch.float8_e5m2: (torch.bfloat16, torch.float16, torch.float32),
    torch.complex64: (torch.complex64,),
    torch.complex128: (torch.complex128,),
}  # the operands' own dtype is the default where it is listed, else the first
_BY_REMAINDERS: Final = ("ozaki", "ozaki-3m")
_SCALED: Final = (torch.bfloat16, torch.float16, torch.float32)


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
    allowed = _SCALED if scaled else _OUT_DTYPES[a.dtype]
    if out_dtype is None:
        return a.dtype if a.dtype in allowed else allowed[0]
    if out_dtype not in allowed:
        wanted = ", ".join(map(name_of, allowed))
        raise DtypeError(f"{op}: out_dtype is {out_dtype}: wanted one of {wanted} for {name_of(a.dtype)}")
    return out_dtype


def check_precision(op: str, dtype: torch.dtype, precision: str | None) -> str:
    """Return the precision of a product, torch's setting where `precision` is None.

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
            f"{op}: precision is {precision!r}: wanted one of {', '.join(allowed)} for {name_of(dtype)}"
        )
    precision = precision or (default_precision() if dtype in IN_FP32 else "ieee")
    if precision.startswith(BY_DATA) and is_batch_invariant():
        raise UnsupportedError(
            f"{op}: precision is {precision!r} in a batch-invariant call, but its result for a row can "
            "depend on other rows: wanted another precision"
        )
    return precision


def _check_depth(op: str, a: torch.Tensor, precision: str) -> None:
    deepest = MAX_DEPTH // 2 if a.is_complex() else MAX_DEPTH
    if precision in _BY_REMAINDERS and a.shape[-1] > deepest:
        raise UnsupportedError(
            f"{op}: K is {a.shape[-1]} in precision {precision!r}: wanted at most {deepest}"
        )


def check_gpu(op: str, a: torch.Tensor) -> None:
    """Raise UnsupportedError where the operand's GPU does not multiply its dtype."""
    if a.device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return  # without CUDA here, a fake tensor of a GPU elsewhere
    major, minor = torch.cuda.get_device_capability(a.device)
    name = name_of(a.dtype)
    needed = (8, 9) if name in FP8_DTYPES else (8, 0) if name == "bfloat16" else (7, 5)
    if (major, minor) < needed:
        raise UnsupportedError(
            f"{op}: {name} needs compute capability {needed[0]}.{needed[1]}, but "
            f"{torch.cuda.get_device_name(a.device)} has {major}.{minor}"
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


def result_of(
    a: Any, b: Any, out: Any, out_dtype: torch.dtype | None, precision: str | None, op: str = "matmul",
    scaled: bool = False, names: tuple[str, str] = ("input", "other"),
) -> tuple[tuple[int, ...], torch.dtype, str]:  # fmt: skip
    """Return shape and dtype of the result, and the precision. Raise a TritileError for bad arguments.

    out may be None; its memory is not checked. `scaled` says that sums are multiplied by scales, so that a
    result of int8 is not an integer. `names` are those of a and b in messages.
    """
    for name, tensor in zip(names, (a, b), strict=True):
        check_tensor(op, name, tensor)
    check_same_device(op, a, names[1], b)
    dtype = _check_dtypes(op, names, a, b, out_dtype, scaled)
    precision = check_precision(op, a.dtype, precision)
    for operand in (a, b):
        check_gpu(op, operand)
    shape = _result_shape(op, names, a, b)
    _check_depth(op, a, precision)
    if out is not None:
        check_like(op, out, shape, dtype, a)
    return shape, dtype, precision


def matmul(
    input: torch.Tensor,
    other: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return the matrix product of two tensors, as `torch.matmul` does.

    Args:
        input: (..., M, K), or (K,). Any strides.
        other: (..., K, N), or (K,). Any strides. Batch dimensions broadcast without a copy. input and other
            have one dtype: float16, bfloat16, float32, float64, complex64, complex128, int8 or, on GPUs that
            have them, float8_e4m3fn and float8_e5m2, which may be mixed. Lazy conjugation and negation are
            applied on the way.
        out: tensor to write the result to: exactly its shape and dtype, any strides, no memory shared with
            input or other.
        out_dtype: dtype of the result: float16, bfloat16 or float32, for fp8, 16-bit and fp32 operands.
            Default: input's dtype; bfloat16 for fp8; int32 for int8.
        precision: how to multiply, one of the names below; None for torch's setting in fp32 (`ieee` or
            `tf32`), and for "ieee" elsewhere.

    Precisions of float32: "ieee" multiplies in fp32 and adds with compensation; its error is at or below that
    of torch's fp32. "fp16x3" computes three products of fp16 parts on tensor cores. From K = 256 on its error
    is below that of one fp32 sum, within `core.problem.error_bound`. Where the data do not suit it, which the
    GPU finds out, other kernels multiply. "tf32x3" computes three products in TF32, for an error near fp32's.
    "tf32" computes one, with inputs rounded to 11 bits.

    Precisions of fp8: "ieee", the default, moves sums to fp32 block by block of K. "fast" leaves them to the
    tensor cores, which on Hopper keep 14 bits.

    Precisions of float64: "ieee", the default, multiplies in fp64. "ozaki" multiplies in int8 on tensor
    cores, for K up to 131,072 (half that for complex128). Each element errs by at most 2^-53 (|a b| + sqrt(K)
    |row of a| |column of b|), in Euclidean norms, which suits rows and columns of numbers of similar
    magnitude. Rows and columns whose root mean square is above 4 times their mean magnitude (zeros not
    counted), or that hold an infinity or NaN, are multiplied in fp64 all the same. The workspaces take 14 (M
    K + K N + M N) bytes.

    Precisions of complex64 and complex128: those of float32 and float64, for the real products that a complex
    one consists of: four, or three with "-3m" appended ("tf32x3-3m"). With four, each part of a result is a
    sum of 2 K real products and errs as such, element by element; NaN and infinities spread as in these,
    without C's recovery of infinities. Three take three quarters of the multiplications. The error of the
    imaginary part is then small beside (|re a| + |im a|) (|re b| + |im b|), not beside the part itself, and
    it may be NaN where sums overflow. Operands that must be rewritten first take a workspace of up to four
    times the size of one of them.

    Sums are computed in float32; in float64 for float64, in int32 for int8, where a sum beyond int32 is
    undefined. Tensors in host memory are computed in Triton's interpreter. Tensors on the meta device give a
    result there, as with every operation.

    Differentiable with respect to input and other, backward and forward, any number of times, by products of
    the same precision; not in fp8, and not into `out`. torch's compiler, transforms, autocast and subclasses
    see the operator `torch.ops.tritile.matmul`.

    Returns:
        The product, (..., M, N) without the dimensions of a vector, in out where that is given.

    Raises:
        TritileError: an argument does not fit: ShapeError, DtypeError, DeviceError, OverlapError,
            GradientError, InvalidValueError or UnsupportedError. Nothing is launched.
        NotTunedError, NotCompiledError: in mode "strict".
        TuningError: no config works, in mode "tune".

    Warns once (InterpreterWarning) on host tensors.
    """
    if dispatched(input, other, out):
        return diverted("matmul", input, other, out=out, out_dtype=out_dtype, precision=precision)
    return eager(input, other, out, out_dtype, precision)


def _matrices(op: str, input: Any, mat2: Any, rank: int) -> None:
    """Raise a TritileError unless these are operands of torch's `mm` (rank 2) or `bmm` (rank 3)."""
    for name, tensor in (("input", input), ("mat2", mat2)):
        check_rank(op, name, tensor, rank)
    if input.shape[-1] != mat2.shape[-2] or input.shape[:-2] != mat2.shape[:-2]:
        wanted = "(M, K) and (K, N)" if rank == 2 else "(B, M, K) and (B, K, N)"
        shapes = f"input has shape {tuple(input.shape)} and mat2 {tuple(mat2.shape)}"
        raise ShapeError(f"{op}: {shapes}: wanted {wanted}")


def mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return the product of two matrices, (M, K) by (K, N), as `torch.mm` does.

    Args:
        input: (M, K).
        mat2: (K, N).
        out: as for `tritile.matmul`.
        out_dtype: as for `tritile.matmul`.
        precision: as for `tritile.matmul`.

    Returns:
        The product, (M, N), in out where that is given.

    Raises:
        ShapeError: an operand is not a matrix, or the shapes do not fit.
        TritileError: otherwise as `tritile.matmul` raises it.
    """
    _matrices("mm", input, mat2, 2)
    return matmul(input, mat2, out=out, out_dtype=out_dtype, precision=precision)


def bmm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Return the products of two batches of matrices, (B, M, K) by (B, K, N), as `torch.bmm` does.

    Args:
        input: (B, M, K).
        mat2: (B, K, N).
        out: as for `tritile.matmul`.
        out_dtype: as for `tritile.matmul`.
        precision: as for `tritile.matmul`.

    Returns:
        The products, (B, M, N), in out where that is given.

    Raises:
        ShapeError: an operand does not have three dimensions, or the shapes do not fit.
        TritileError: otherwise as `tritile.matmul` raises it.
    """
    _matrices("bmm", input, mat2, 3)
    return matmul(input, mat2, out=out, out_dtype=out_dtype, precision=precision)


def eager(
    a: Any, b: Any, out: Any = None, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    """Run `matmul` on plain tensors: the kernel of its operator on CUDA and CPU."""
    key = ready = None
    try:
        setting = default_precision() if a.dtype in IN_FP32 else None
        key = ("matmul", (out_dtype, precision), setting, rules(), place(out), place(a), place(b))
        ready = CALLS.get(key)
    except UNTELLABLE:
        key = None
    if ready is None:
        return _first(a, b, out, out_dtype, precision, key)
    if out is None:
        out = fresh(ready.shape, ready.strides, ready.dtype, ready.device)
    else:
        of_a, of_b, of_out = ready.reaches
        if entangled(a, of_a, out, of_out) or entangled(b, of_b, out, of_out):
            check_no_overlap("matmul", out, input=a, other=b)
        written("matmul", out)
    if ready.order[0]:
        ready.launch(b, a, out)
    else:
        ready.launch(a, b, out)
    return out


def checked(
    a: Any, b: Any, out: Any, out_dtype: torch.dtype | None, precision: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """Check the arguments. Return operands without lazy negation, the output, and the precision.

    The output is allocated where none is given.
    """
    shape, dtype, precision = result_of(a, b, out, out_dtype, precision)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.device)
    else:
        check_room("matmul", out, input=a, other=b)
    return a.resolve_neg(), b.resolve_neg(), out, precision


def _first(
    a: Any,
    b: Any,
    out: Any,
    out_dtype: torch.dtype | None,
    precision: str | None,
    key: tuple[Any, ...] | None,
) -> torch.Tensor:
    """Run a call that is not in the memo of prepared calls, and remember its launch under `key`."""
    rules()  # report a wrong setting of the environment on any device
    given = out is not None
    dense_a, dense_b, out, precision = checked(a, b, out, out_dtype, precision)
    if out.numel() == 0:
        return out
    if a.shape[-1] == 0:
        return out.zero_()
    if a.is_meta:
        return written("matmul", out) if given else out
    if on_host(a):
        interpret_product(
            lambda read, *rest: described(read(dense_a), read(dense_b), *rest), (dense_a,), out, precision
        )
        return written("matmul", out) if given else out
    call = described(dense_a, dense_b, out, precision)
    launch = prepared(call)
    launch(*call.tensors)
    if given:
        written("matmul", out)
    # A split launch of a complex product has offsets in real elements; tensors of a later call are complex.
    if type(launch) is Launch or not a.is_complex():
        remember(key, "matmul", launch, call, (a, b), out)
    return out
