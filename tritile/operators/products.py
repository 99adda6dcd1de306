"""`tritile::matmul`."""

from typing import Any

import torch

from tritile.operators.batches import batched_matmul
from tritile.operators.gradients import Matmul
from tritile.operators.library import autocast, batch, define, differentiate, refuse
from tritile.operators.planning import foresee
from tritile.ops import matmul as ops
from tritile.ops.described import described


def _kernel(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, precision: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return ops.eager(a, b, out, out_dtype, precision)


def _fake(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, precision: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    shape, dtype, how = ops.result_of(a, b, out, out_dtype, precision)
    result = a.new_empty(shape, dtype=dtype) if out is None else out
    foresee(
        a.device,
        lambda like: described(like(a).resolve_neg(), like(b).resolve_neg(), like(result), how).problem,
    )
    return result


def _record(a: torch.Tensor, b: torch.Tensor, *words: Any) -> torch.Tensor:
    refuse_fp8("matmul", a=a, b=b)
    return Matmul.of(MATMUL, a, b, *words)


def refuse_fp8(op: str, **operands: torch.Tensor) -> None:
    """Raises GradientError where a gradient of fp8 is wanted, whose steps no gradient follows."""
    refuse(op, *((name, tensor) for name, tensor in operands.items() if tensor.dtype.itemsize == 1))


MATMUL, _ = define(
    "matmul",
    "Tensor a, Tensor b, *, ScalarType? out_dtype=None, str? precision=None",
    _kernel,
    _fake,
    into=True,
)
differentiate(MATMUL, _record)
batch(MATMUL, batched_matmul)
autocast(MATMUL, "a", "b")
