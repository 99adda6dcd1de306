"""Offer `tritile.matmul`, `mm` and `bmm`: torch's products for any size, stride and layout."""

from typing import Any

import torch

from tritile.core.problem import Precision
from tritile.errors import ShapeError
from tritile.ops.checks import check_tensor, shapes
from tritile.ops.memo import Key, Tensors, recall
from tritile.ops.request import computed


def matmul(
    input: torch.Tensor,
    other: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
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
        precision: how to multiply, one of the names below. None: in fp32 what torch is set to (`ieee` or
            `tf32`), and where nobody set it, "fp16x3" on Hopper for large results, M N >= 2^22 with both
            sides from 512 and K from 384 to 8448, or M N >= 2^24 with K to 32768, where it is faster and errs
            less than torch's fp32; "ieee" otherwise, by torch's own kernel where a table says that it is
            faster.

    Precisions of float32: "ieee" multiplies in fp32 and adds with compensation, so that it errs no more than
    torch's fp32. "fp16x3" computes three products of fp16 parts on tensor cores, with an error within
    `core.problem.error_bound`; the GPU finds data that do not suit it, and multiplies these in fp32. "tf32"
    computes one product in TF32, with inputs rounded to 11 bits. Of fp8: "ieee", the default, moves sums to
    fp32 block by block of K. "fast" leaves them to the tensor cores, which on Hopper keep 14 bits.

    Complex products are torch's own, whatever operands, batches and `out` look like, in the precision that
    torch is set to: for complex64 "ieee" or "tf32", of which the other one is refused by name. There are none
    in batch-invariant calls, nor where `backends` leave torch out.

    Sums are computed in float32; in float64 for float64, in int32 for int8, where a sum beyond int32 is
    undefined. Tensors in host memory are computed by torch, in fp64. Tensors on the meta device give a result
    there, as with every operation.

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

    Warns once (HostWarning) on host tensors.
    """
    tensors, options = (input, other), (out_dtype, precision)
    return recall("matmul", tensors, out, options, computed)


def check_matrices(op: str, input: Any, mat2: Any, rank: int) -> None:
    """Raise a TritileError unless these are operands of torch's `mm` (rank 2) or `bmm` (rank 3)."""
    for name, tensor in (("input", input), ("mat2", mat2)):
        check_tensor(op, name, tensor, rank=rank)
    if input.shape[-1] != mat2.shape[-2] or input.shape[:-2] != mat2.shape[:-2]:
        wanted = "(M, K) and (K, N)" if rank == 2 else "(B, M, K) and (B, K, N)"
        raise ShapeError(f"{op}: {shapes(input=input, mat2=mat2)}: wanted {wanted}")


def _computed(op: str, tensors: Tensors, out: Any, options: Key, key: Key | None) -> torch.Tensor:
    """Compute `mm` or `bmm`, whichever is named behind the options of `matmul`."""
    name = options[-1]
    check_matrices(name, tensors[0], tensors[1], 2 if name == "mm" else 3)
    return computed(op, tensors, out, options, key)


def mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return the product of two matrices, (M, K) by (K, N), as `torch.mm` does.

    Arguments are those of `tritile.matmul`, which also says what is raised. Other shapes raise ShapeError.
    """
    return recall("matmul", (input, mat2), out, (out_dtype, precision, "mm"), _computed)


def bmm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision | None = None,
) -> torch.Tensor:
    """Return the products of two batches of matrices, (B, M, K) by (B, K, N), as `torch.bmm` does.

    Arguments are those of `tritile.matmul`, which also says what is raised. Other shapes raise ShapeError.
    """
    return recall("matmul", (input, mat2), out, (out_dtype, precision, "bmm"), _computed)
