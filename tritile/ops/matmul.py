"""`tritile.matmul`: `torch.matmul` for any size, stride and layout."""

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
}  # the first of each is the default, except that 16-bit types keep their own
_BY_REMAINDERS: Final = ("ozaki", "ozaki-3m")
_SCALED: Final = (torch.bfloat16, torch.float16, torch.float32)


def _check_dtypes(
    op: str, names: tuple[str, str], a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None,
    scaled: bool,
) -> torch.dtype:  # fmt: skip
    mixed = name_of(a.dtype) in FP8_DTYPES and name_of(b.dtype) in FP8_DTYPES
    if a.dtype != b.dtype and not mixed:
        kinds = f"{names[0]} is {name_of(a.dtype)} and {names[1]} {name_of(b.dtype)}"
        raise DtypeError(f"{op}: {kinds}: wanted one dtype")
    if a.dtype not in _OUT_DTYPES:
        raise DtypeError(f"{op}: {name_of(a.dtype)} is not offered: wanted {', '.join(MATMUL_DTYPES)}")
    allowed = _SCALED if scaled else _OUT_DTYPES[a.dtype]
    if out_dtype is None:
        return a.dtype if a.dtype in allowed else allowed[0]
    if out_dtype not in allowed:
        wanted = ", ".join(map(name_of, allowed))
        raise DtypeError(f"{op}: out_dtype of {name_of(a.dtype)} is {out_dtype}: wanted {wanted}")
    return out_dtype


def check_precision(op: str, dtype: torch.dtype, precision: str | None) -> str:
    """The precision of a product.

    Raises InvalidValueError for one that is none of its dtype, and UnsupportedError for one that no
    batch-invariant call can have.
    """
    allowed = PRECISIONS_OF.get(name_of(dtype))
    if precision is not None and allowed is None:
        wanted = " and ".join(PRECISIONS_OF)
        raise InvalidValueError(f"{op}: precision is for {wanted} operands, not {name_of(dtype)}")
    if precision is not None and allowed is not None and precision not in allowed:
        raise InvalidValueError(
            f"{op}: precision is {precision!r}: wanted one of {', '.join(allowed)} for {name_of(dtype)}"
        )
    precision = precision or (default_precision() if dtype in IN_FP32 else "ieee")
    if precision.startswith(BY_DATA) and is_batch_invariant():
        raise UnsupportedError(
            f"{op}: precision {precision!r} in a batch-invariant call: data decide how it multiplies, "
            "those of other rows too: wanted another precision"
        )
    return precision


def _check_depth(op: str, a: torch.Tensor, precision: str) -> None:
    deepest = MAX_DEPTH // 2 if a.is_complex() else MAX_DEPTH
    if precision in _BY_REMAINDERS and a.shape[-1] > deepest:
        raise UnsupportedError(
            f"{op}: sums of {a.shape[-1]} products in precision {precision!r}: wanted {deepest} at most"
        )


def check_gpu(op: str, a: torch.Tensor) -> None:
    """Raises UnsupportedError where the operand's GPU does not multiply its dtype."""
    if a.device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return  # the last for tensors that stand for those of a GPU elsewhere
    major, minor = torch.cuda.get_device_capability(a.device)
    name = name_of(a.dtype)
    needed = (8, 9) if name in FP8_DTYPES else (8, 0) if name == "bfloat16" else (7, 5)
    if (major, minor) < needed:
        raise UnsupportedError(
            f"{op}: {name} needs compute capability {needed[0]}.{needed[1]}, and "
            f"{torch.cuda.get_device_name(a.device)} has {major}.{minor}"
        )


def _result_shape(op: str, names: tuple[str, str], a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape torch.matmul gives. Raises ShapeError where it gives none."""
    shapes = f"{names[0]} {tuple(a.shape)} and {names[1]} {tuple(b.shape)}"
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"{op}: {shapes}: wanted at least one dimension each")
    inner = b.shape[0] if b.ndim == 1 else b.shape[-2]
    if a.shape[-1] != inner:
        last = f"the last dimension of {names[0]}, {a.shape[-1]}"
        raise ShapeError(f"{op}: {shapes}: {last}, is not {names[1]}'s {inner}")
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
    """Shape and dtype of the result, and the precision. Raises a TritileError for bad arguments.

    Of out, which may be None, all but its memory is checked. `scaled`: sums are multiplied by scales, and
    so are no whole numbers any more. `names`: of a and b.
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
    """The matrix product of two tensors, with the meaning of `torch.matmul`.

    Args:
        input: (..., M, K), or (K,).
        other: (..., K, N), or (K,). Batch dimensions broadcast, without a copy. Any strides.
            One dtype for both: float16, bfloat16, float32, float64, complex64, complex128, int8, and on
            GPUs that have it float8_e4m3fn and float8_e5m2. Lazy conjugation is carried out on the way.
        out: the result goes here: its shape and dtype exactly, any strides, no memory shared with input or
            other.
        out_dtype: of the result: fp32 or either 16-bit type for fp8, 16-bit and fp32 operands. Default:
            input's own; bfloat16 for fp8; int32 for int8.
        precision: of float32 products. "ieee" multiplies in fp32 and adds with compensation, which
            keeps the error at or below that of torch's fp32; "fp16x3" takes three products of fp16 parts
            on tensor cores, with less error than fp32 in one sum from K = 256 on (at the most:
            `core.problem.error_bound`), and where data do not suit that, as is found on the GPU, other
            kernels; "tf32x3" takes three products in TF32, for an error near fp32's; "tf32" takes one,
            with inputs rounded to 11 bits. Default: what torch's fp32 matmul setting asks for. Of fp8
            products: "fast" leaves sums to the tensor cores, which on Hopper keep 14 bits of them;
            "ieee", the default, moves these to fp32 as it goes. Of complex64 products: these of float32, of
            complex128 ones these of float64, for the real products that they are made of: four, or three
            where "-3m" is appended ("tf32x3-3m").
            Of float64 products: "ieee", the default, multiplies in fp64; "ozaki" in int8 on tensor cores, for
            K up to 131,072 (half that for complex128): each element errs by at most
            2^-53 (|a b| + sqrt(K) |row of a| |column of b|), in Euclidean norms, which suits rows and columns
            of numbers of like sizes. Those whose root mean square is above 4 times their mean magnitude
            (zeros not counted), or that have an infinity or NaN, are multiplied in fp64 all the same. It
            takes workspaces of 14 (M K + K N + M N) bytes.

    Sums are kept in float32 (float64 for float64; int32 for int8, where a sum beyond int32 is not
    defined). Tensors in host memory are computed in Triton's interpreter; those on the meta device give a
    result there, as with every operation.

    By four real products, each part of a complex result is a sum of 2 K real products and errs as such,
    element by element; NaN and infinities spread as in these, with no recovery of infinities as in C. Three
    take three quarters of the multiplications; the imaginary part then errs by as much as is small beside
    (|re a| + |im a|) (|re b| + |im b|), and not beside itself, and may be NaN where sums overflow. Either
    way operands that are made over take a workspace, of up to four times the size of one of them.

    Differentiable by input and other, backward and forward, any number of times, by products of the same
    precision; not in fp8, nor into `out`. torch's compiler, transforms, autocast and subclasses meet it as
    `torch.ops.tritile.matmul`.

    Raises ShapeError, DtypeError, DeviceError, OverlapError, GradientError, InvalidValueError or
    UnsupportedError for arguments that do not fit, before any launch; in mode "strict"
    NotTunedError or NotCompiledError; TuningError in mode "tune" where no config works. Warns once
    (InterpreterWarning) on host tensors.
    """
    if dispatched(input, other, out):
        return diverted("matmul", input, other, out=out, out_dtype=out_dtype, precision=precision)
    return eager(input, other, out, out_dtype, precision)


def _matrices(op: str, input: Any, mat2: Any, rank: int) -> None:
    """Raises ShapeError where these are no operands of torch's `mm` (rank 2) or `bmm` (3), DtypeError, ..."""
    for name, tensor in (("input", input), ("mat2", mat2)):
        check_rank(op, name, tensor, rank)
    if input.shape[-1] != mat2.shape[-2] or input.shape[:-2] != mat2.shape[:-2]:
        wanted = "(M, K) and (K, N)" if rank == 2 else "(B, M, K) and (B, K, N)"
        shapes = f"input is {tuple(input.shape)} and mat2 {tuple(mat2.shape)}"
        raise ShapeError(f"{op}: {shapes}: wanted {wanted}")


def mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """Multiply two matrices, (M, K) by (K, N), with the meaning of `torch.mm`.

    The other arguments are those of `tritile.matmul`. Raises ShapeError for operands of other dimensions,
    and as `tritile.matmul` does.
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
    """Multiply two batches of matrices, (B, M, K) by (B, K, N), with the meaning of `torch.bmm`.

    The other arguments are those of `tritile.matmul`. Raises ShapeError for operands of other dimensions, or
    of two batch sizes, and as `tritile.matmul` does.
    """
    _matrices("bmm", input, mat2, 3)
    return matmul(input, mat2, out=out, out_dtype=out_dtype, precision=precision)


def eager(
    a: Any, b: Any, out: Any = None, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    """`matmul` of plain tensors, which is what its operator runs on CUDA and CPU."""
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
    """Operands without lazy negation, the output (a fresh one where none came), and the precision."""
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
    """A call that was not met before: check, plan, compile, launch, and remember how under `key`."""
    rules()  # wrong settings of the environment are told of on any device
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
    # Pieces of a complex product start at so many real numbers: tensors of another call count complex ones.
    if type(launch) is Launch or not a.is_complex():
        remember(key, "matmul", launch, call, (a, b), out)
    return out
