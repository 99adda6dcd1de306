"""Say which calls torch's own kernel may make, and how: the backend `aten` of an operation.

| operation | torch's call |
| --- | --- |
| matmul | matmul; of int8 _int_mm, of fp8 _scaled_mm with scales of 1 |
| linear | linear; addmm into out; else matmul, and launches for the epilogue |
| addmm, baddbmm | addmm; else matmul, and launches for the epilogue |
| scaled_matmul | _scaled_mm; with scales for each 128 of K, scaled_mm, and launches for the epilogue |
| grouped_matmul | _grouped_mm, _scaled_grouped_mm |
| linear_quantized | linear, by the weight unpacked in memory |
| fp32 in a setting that tritile does not know | as above; else matmul, which copies, and launches |

torch has to compute the same, with a result of the same dtype and layout, from the tensors as they lie. What
of this follows from sizes and layouts is in `tritile.choose.aten`; here is what follows from arguments and
from torch's settings. Every setting that is read is part of what a prepared call is remembered by.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from tritile.choose.aten import MOST_GROUPS
from tritile.core.epilogue import apply_epilogue, apply_epilogue_in_dtype
from tritile.core.problem import AS_TORCH, BLOCK_SCALES, MatmulProblem, QuantizedProblem, Tiled
from tritile.core.settings import is_batch_invariant, uses_aten
from tritile.core.torch_private import int_mm, is_deterministic, scaled_mm
from tritile.errors import UnsupportedError, brief
from tritile.families import torch_kernels
from tritile.families.quantized.unpacked import Unpack
from tritile.ops.checks import capability
from tritile.ops.memo import ByTorch, Key, Tensors, default_precision

# Bound now: a program may put tritile's functions in the place of torch's.
MM: Final = torch.mm
_MULTIPLY: Final = torch.matmul
_ADD: Final = torch.addmm
_ADD_BATCHES: Final = torch.baddbmm
_LINEAR: Final = torch.nn.functional.linear

BYTES: Final = frozenset({torch.int8, torch.float8_e4m3fn, torch.float8_e5m2})  # torch.matmul takes none


def torch_call_of(of: Any, problem: Tiled, how: str, out: Any) -> ByTorch | None:
    """Return torch's call for a request; None if torch may not make it.

    `problem` describes it, and `how` is its precision.

    Under `torch.use_deterministic_algorithms` it may only if tritile has no kernel for it: cuBLAS then needs
    a workspace of its own. Nor in "ieee" by name: tritile's sums of float32 are compensated, torch's are not.
    """
    make, only = _MAKES.get(of.op), problem.needs_torch
    if make is None or (is_deterministic() and not only):
        return None
    if of.first.dtype == torch.float32:
        setting = default_precision()
        is_as_set = how in (AS_TORCH, "ieee" if setting == "none" else setting)
        if not is_as_set or (of.precision == "ieee" and not only):
            return None
    if _rounds_twice(problem):
        return None
    # Else torch would multiply, and then refuse to view it as matrices.
    whole = out is None or out.ndim <= 2 or out.is_contiguous()
    if how == AS_TORCH:
        is_wide = of.out_dtype in (None, torch.float32)
        return (make(of, out) if whole and is_wide else None) or _in_any_layout(of, out)
    return make(of, out) if whole else None


def _rounds_twice(problem: Tiled) -> bool:
    """True if a bias is added to rows that do not start on 16 bytes: torch rounds sums to 16 bits first."""
    product = problem.product if isinstance(problem, QuantizedProblem) else problem
    if not isinstance(product, MatmulProblem) or product.itemsize != 2:
        return False
    return bool(product.epilogue) and min(product.aligns) < 16


# --- Operands as they lie ---


def _is_matrix(tensor: torch.Tensor) -> bool:
    """True if the last two dimensions are a matrix as BLAS has it: contiguous along one, without overlap."""
    (m, n), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    by_rows = (column == 1 or n == 1) and (row >= n or m == 1)
    by_columns = (row == 1 or m == 1) and (column >= m or n == 1)
    return by_rows or by_columns


def _as_they_lie(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if torch.matmul copies no operand, and multiplies as many matrices as tritile would.

    a has batch dimensions that fold into its rows, or those of b, none of them expanded.
    """
    if b.ndim < 2 or a.ndim < b.ndim or not (_is_matrix(a) and _is_matrix(b)):
        return False
    if a.ndim == 2:
        return True
    try:
        if b.ndim == 2:
            a.view(-1, a.shape[-1])
            return True
        if a.shape[:-2] != b.shape[:-2]:
            return False
        for operand in (a, b):
            operand.view(-1, *operand.shape[-2:])
            steps = zip(operand.shape[:-2], operand.stride(), strict=False)
            if any(size > 1 and step == 0 for size, step in steps):
                return False
    except RuntimeError:
        return False
    return True


def _is_row(bias: torch.Tensor, like: torch.Tensor) -> bool:
    """True for a bias that cuBLAS adds itself."""
    return bias.ndim == 1 and bias.dtype == like.dtype


def _copied_to(out: Any, make: ByTorch) -> ByTorch:
    """Return a call that writes to `out` last, as that may be what is added."""
    return make if out is None else lambda *tensors: tensors[-1].copy_(make(*tensors[:-1]))


# --- Products, with or without an epilogue ---


def _matmul(of: Any, out: Any) -> ByTorch | None:
    a, b = of.tensors
    if a.dtype in BYTES:
        return _of_bytes(of, out)
    if not _as_they_lie(a, b):
        return None
    return _MULTIPLY if out is None else lambda a, b, out: _MULTIPLY(a, b, out=out)


def _of_bytes(of: Any, out: Any) -> ByTorch | None:
    """Return torch's product of fp8 or int8 matrices without scales."""
    a, b = of.tensors
    if a.ndim != 2 or b.ndim != 2 or not (out is None or out.is_contiguous()):
        return None
    if a.dtype == torch.int8:
        return int_mm if out is None else lambda a, b, out: int_mm(a, b, out=out)
    how, one = _of_fp8(of), torch_kernels.one(a.device)
    return None if one is None else lambda a, b, out=None: scaled_mm(a, b, one, one, **how, out=out)


def _of_fp8(of: Any) -> dict[str, Any]:
    return {"out_dtype": of.out_dtype or torch.bfloat16, "use_fast_accum": of.precision == "fast"}


def _linear(of: Any, out: Any) -> ByTorch | None:
    x, weight, bias, residual = of.tensors
    if x.dtype in BYTES or weight.ndim != 2 or x.ndim < 2 or not _as_they_lie(x, weight.t()):
        return None
    if residual is not None or of.activation or not (bias is None or _is_row(bias, x)):
        return _composed_of(of, out)
    if bias is not None and x.ndim > 2 and (out is not None or not x.is_contiguous()):
        return None  # torch adds the bias by another launch
    if out is None:
        return lambda x, weight, bias, residual: _LINEAR(x, weight, bias)
    if bias is None:
        return lambda x, weight, bias, residual, out: _MULTIPLY(x, weight.t(), out=out)
    return lambda x, weight, bias, residual, out: _ADD(bias, x, weight.t(), out=out)


def _weighted(of: Any, out: Any) -> ByTorch | None:
    added, a, b = of.tensors
    if not _as_they_lie(a, b):
        return None
    if (of.activation, of.alpha, of.beta) == ("", 1, 1) and _is_row(added, a) and a.ndim == 2:
        return _ADD if out is None else lambda added, a, b, out: _ADD(added, a, b, out=out)
    return _composed_of(of, out)


def _composed(op: str, activation: str, alpha: Any, beta: Any, *tensors: Any) -> torch.Tensor:
    """Multiply, and apply the epilogue in launches of its own; torch copies operands if it has to."""
    if op == "matmul":
        return _MULTIPLY(*tensors)
    if op == "linear":
        x, weight, bias, residual = tensors
        return apply_epilogue_in_dtype(_MULTIPLY(x, weight.t()), bias, residual, activation)
    added, a, b = tensors
    return apply_epilogue_in_dtype(_MULTIPLY(a, b), added, None, activation, alpha, beta)


def _composed_of(of: Any, out: Any) -> ByTorch | None:
    if of.first.dtype != torch.float32:  # sums would be rounded to 16 bits in between
        return None
    return _copied_to(out, functools.partial(_composed, of.op, of.activation, of.alpha, of.beta))


def _in_any_layout(of: Any, out: Any) -> ByTorch:
    """Return torch's call for float32 of any shapes and strides, rounded to another dtype last."""
    dtype, how = of.out_dtype or torch.float32, (of.op, of.activation, of.alpha, of.beta)
    return _copied_to(out, lambda *tensors: _composed(*how, *tensors).to(dtype))


# --- Products of complex numbers, which only torch computes ---


def complex_product(of: Any, out: torch.Tensor | None) -> torch.Tensor:
    """Return torch's product of complex operands, in `out` unless that is None.

    Raises UnsupportedError if torch refuses.
    """
    a, b, sides = of.input, of.other, dict(of.sides)
    multiply: Callable[..., Any] = functools.partial(_MULTIPLY, a, b)
    takes_out = a.ndim == b.ndim == 2 and not sides  # for vectors and batches torch.matmul resizes it
    if of.op in ("addmm", "baddbmm"):
        added = sides.pop("bias")
        if of.beta == 0:  # not read: it may overlap out, which torch refuses
            added = a.new_zeros(())
        if of.alpha == 0:  # nor are the factors
            a, b = a[..., :0], b[..., :0, :]
        add = _ADD if of.op == "addmm" else _ADD_BATCHES
        multiply, takes_out = functools.partial(add, added, a, b, alpha=of.alpha, beta=of.beta), True
    elif sides:
        x, weight, bias, _ = of.tensors
        if bias is not None and bias.ndim == 1 and bias.shape == weight.shape[:-1]:
            multiply = functools.partial(_LINEAR, x, weight, sides.pop("bias"))
    try:
        if out is not None and takes_out and out.is_contiguous():
            return multiply(out=out)
        made = sum(sides.values(), multiply())
        # torch conjugates products of vectors lazily, and transposes some of batches
        return made.resolve_conj().contiguous() if out is None else out.copy_(made)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise UnsupportedError(f"{of.op}: only torch computes this, and it fails: {brief(error)}") from error


# --- Products with scales, of groups, and by packed weights ---


def _scaled(of: Any, out: Any) -> ByTorch | None:
    a, _, scale_a, scale_b, bias, _ = of.tensors
    how = _of_fp8(of)
    if of.scales:
        return _by_blocks(of)
    by_row = scale_a.numel() > 1 or scale_b.numel() > 1
    if by_row and not (scale_a.ndim == 2 and scale_a.is_contiguous() and scale_b.is_contiguous()):
        return None
    if bias is not None and (bias.dtype != how["out_dtype"] or bias.ndim != 1 or bias.stride(0) != 1):
        return None
    if a.dtype == torch.int8 or not (out is None or out.is_contiguous()):
        return None
    return lambda a, b, scale_a, scale_b, bias, residual, out=None: scaled_mm(
        a, b, scale_a, scale_b, bias, **how, out=out
    )


def _by_blocks(of: Any) -> ByTorch:
    """Multiply fp8 matrices with scales for each 128 of K; what is fused is applied to float32 afterwards."""
    shared: Any = BLOCK_SCALES[of.block_scales]
    activation = of.activation
    dtype, is_bare = _of_fp8(of)["out_dtype"], not (of.sides or activation)

    def multiply(
        a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, residual: Any, out: Any = None
    ) -> torch.Tensor:
        made = torch_kernels.by_blocks(a, b, scale_a, scale_b, shared, dtype if is_bare else torch.float32)
        if not is_bare:
            made = apply_epilogue(made, (None, None, bias, residual, None), activation)
        return made.to(dtype) if out is None else out.copy_(made)

    return multiply


def _grouped(of: Any, out: Any) -> ByTorch:
    fast = of.precision == "fast"

    def multiply(a: Any, b: Any, offs: Any, scale_a: Any, scale_b: Any, out: Any = None) -> torch.Tensor:
        if a.ndim == 2:
            made = torch_kernels.of_groups(a, b, offs, scale_a, scale_b, fast)
        else:  # columns of b belong to groups
            made = torch_kernels.of_groups(b.t(), a.mT, offs, scale_b, scale_a, fast).t()
        return made.contiguous() if out is None else out.copy_(made)

    return multiply


def may_make_groups() -> bool:
    """True if torch may make products of groups that share K, for which there is no plan."""
    return uses_aten() and not (is_batch_invariant() or is_deterministic())


def sharing_k(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return the products of groups of columns of a and rows of b; None if torch has no call for it.

    Raises UnsupportedError if torch refuses.
    """
    has_kernel = capability(a.device) == (9, 0) and len(offs) <= MOST_GROUPS
    if not (may_make_groups() and has_kernel and a.dtype == dtype == torch.bfloat16):
        return None
    try:
        return torch_kernels.sharing_k(a, b, offs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        why = brief(error)
        raise UnsupportedError(f"grouped_matmul: torch refuses groups that share K: {why}") from error


def _quantized(of: Any, out: Any) -> ByTorch | None:
    """Return what multiplies by a weight once it is unpacked in memory: two launches, the first one ours."""
    x, weight, bias = of.x, of.weight, of.bias
    # The packed words are a matrix that is not copied, as the unpacked weight is.
    if x.ndim < 2 or not _as_they_lie(x, weight.packed):
        return None
    if bias is not None and not (_is_row(bias, x) and (x.ndim == 2 or x.is_contiguous())):
        return None
    n, k = weight.shape
    unpack = Unpack(n, k, weight.bits, weight.group_size)
    return lambda x, packed, scales, zeros, bias: _LINEAR(x, unpack(packed, scales, zeros), bias)


_MAKES: Final[dict[str, Callable[[Any, Any], ByTorch | None]]] = {
    "matmul": _matmul,
    "linear": _linear,
    "addmm": _weighted,
    "baddbmm": _weighted,
    "linear_quantized": _quantized,
    "scaled_matmul": _scaled,
    "grouped_matmul": _grouped,
}


# --- Traced ---


LOWERED: Final = frozenset({"matmul", "linear", "addmm", "baddbmm"})  # not of BYTES


def lowered(op: str, tensors: Tensors, options: Key) -> torch.Tensor:
    """Make a traced call that torch may make by torch's functions, which its compiler fuses."""
    if op == "matmul":
        return _MULTIPLY(*tensors)
    if op != "linear":
        beta, alpha, activation, *_ = options
        return _composed(op, activation or "", alpha, beta, *tensors)
    x, weight, bias, residual = tensors
    if residual is None and not options[0] and (bias is None or _is_row(bias, x)):
        return _LINEAR(x, weight, bias)
    return _composed(op, options[0] or "", 1.0, 1.0, *tensors)
