"""`tritile.matmul`, `mm` and `bmm`: torch's products for any size, stride and layout."""

from typing import Any

import torch

from tritile.core.problem import Precision
from tritile.errors import ShapeError
from tritile.ops.checks import check_tensor, shapes
from tritile.ops.dispatch import is_overridden, public
from tritile.ops.memo import Key, Tensors, launch_cached
from tritile.ops.request import computed


@public
def matmul(
    input: torch.Tensor,
    other: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return the matrix product of two tensors, like `torch.matmul`.

    Args:
        input: (..., M, K) or (K,), with any strides.
        other: (..., K, N) or (K,), with any strides. Batch dimensions broadcast without a copy. input and
            other have the same dtype: float16, bfloat16, float32, float64, complex64, complex128, int8 or, on
            GPUs that support them, float8_e4m3fn and float8_e5m2, which may be mixed. Lazy conjugation and
            negation are applied.
        out: tensor that receives the result. It has exactly the result's shape and dtype, any strides, and
            shares no memory with input or other.
        out_dtype: dtype of the result: float16, bfloat16 or float32, if the operands are fp8, 16-bit or fp32.
            Default: input's dtype; bfloat16 for fp8; int32 for int8.
        precision: how to multiply, by one of the names below. With None, float32 follows torch's setting,
            "ieee" or "tf32", unless `tritile.mode(fp32="fp16x3")` says otherwise. If that is "ieee", as it
            is by default, torch's own kernel may run.

    Precisions of float32:

    - "ieee" multiplies in fp32 and sums with compensation, so that its error is at most that of torch's fp32.
    - "fp16x3" sums three products of fp16 parts on tensor cores, with an error within
      `families.fp16x3.lowering.error_bound`. The GPU detects data that this does not suit, and multiplies
      them in fp32.
    - "tf32" computes one product in TF32, which rounds inputs to 11 bits.

    Precisions of fp8:

    - "ieee", the default, moves partial sums to fp32 after each block of K.
    - "fast" keeps sums in the tensor cores, which hold 14 bits of them on Hopper.

    torch computes complex products on every device, whatever the operands, batches and `out` look like, in
    the precision that torch is set to: they take no `precision`. They raise UnsupportedError in a
    batch-invariant call and, on a GPU, with `backends="triton"`.

    Sums are kept in float32; in float64 for float64; and in int32 for int8, where a sum that overflows is
    undefined. Real tensors in host memory are multiplied by torch, in fp64. Like every operation, this one
    takes tensors on the meta device and then returns one.

    Differentiable with respect to input and other, backward and forward, to any order, by products of the
    same precision. There are no gradients for fp8 or into `out`. torch.compile, torch.func's transforms,
    autocast and tensor subclasses see the operator `torch.ops.tritile.matmul`.

    Returns:
        The product, (..., M, N); the dimension of an operand that is a vector is dropped. It is `out` if that
        was passed.

    Raises:
        TritileError: an argument does not fit: ShapeError, DtypeError, DeviceError, OverlapError,
            GradientError, InvalidValueError or UnsupportedError. Nothing is launched.
        NotTunedError: in mode "strict", if no measurement covers the problem.
        NotCompiledError: in mode "strict", if a kernel would have to be compiled.
        TuningError: in mode "tune", if no config works.

    Warns:
        HostWarning: once per process, if tensors are in host memory.

    Examples:
        >>> a = torch.randn(511, 300, device="cuda", dtype=torch.bfloat16)
        >>> b = torch.randn(300, 77, device="cuda", dtype=torch.bfloat16)
        >>> tritile.matmul(a, b, out_dtype=torch.float32).shape
        torch.Size([511, 77])
    """
    tensors, options = (input, other), (out_dtype, precision)
    return launch_cached("matmul", tensors, out, options, computed)


def check_matrices(op: str, input: Any, mat2: Any, rank: int) -> None:
    """Raise a TritileError unless these are operands of torch's `mm` (rank 2) or `bmm` (rank 3)."""
    for name, tensor in (("input", input), ("mat2", mat2)):
        check_tensor(op, name, tensor, rank=rank)
    if input.shape[-1] != mat2.shape[-2] or input.shape[:-2] != mat2.shape[:-2]:
        expected = "(M, K) and (K, N)" if rank == 2 else "(B, M, K) and (B, K, N)"
        raise ShapeError(f"{op}: {shapes(input=input, mat2=mat2)}: expected {expected}")


def _computed(op: str, tensors: Tensors, out: Any, options: Key, key: Key | None) -> torch.Tensor:
    """Compute `mm` or `bmm`; the last option says which."""
    name = options[-1]
    if not is_overridden(*tensors, out):
        check_matrices(name, tensors[0], tensors[1], 2 if name == "mm" else 3)
    return computed(op, tensors, out, options, key)


@public
def mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return the product of two matrices, (M, K) by (K, N), like `torch.mm`.

    Everything else is as in `tritile.matmul`, errors included. Tensors of other ranks raise ShapeError.
    """
    return launch_cached("matmul", (input, mat2), out, (out_dtype, precision, "mm"), _computed)


@public
def bmm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return the products of two batches of matrices, (B, M, K) by (B, K, N), like `torch.bmm`.

    Everything else is as in `tritile.matmul`, errors included. Tensors of other ranks raise ShapeError, and
    so do batches of different sizes.
    """
    return launch_cached("matmul", (input, mat2), out, (out_dtype, precision, "bmm"), _computed)
