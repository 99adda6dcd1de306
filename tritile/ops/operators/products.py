"""Define `tritile::matmul`."""

from typing import Any

import torch

from tritile.core.problem import Tiled
from tritile.ops import matmul as ops
from tritile.ops.described import described
from tritile.ops.operators.batches import batched_matmul
from tritile.ops.operators.gradients import Matmul
from tritile.ops.operators.library import autocast, batch, define, differentiate, refuse
from tritile.ops.operators.planning import StandIn, foresee


def _kernel(
    input: torch.Tensor, other: torch.Tensor, *, out_dtype: torch.dtype | None = None,
    precision: str | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return ops.eager(input, other, out, out_dtype, precision)


def _fake(
    input: torch.Tensor, other: torch.Tensor, *, out_dtype: torch.dtype | None = None,
    precision: str | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    shape, dtype, how = ops.result_of(input, other, out, out_dtype, precision)
    result = input.new_empty(shape, dtype=dtype) if out is None else out

    def problem(like: StandIn) -> Tiled:
        return described(like(input).resolve_neg(), like(other).resolve_neg(), like(result), how).problem

    foresee(input.device, problem)
    return result


def _record(input: torch.Tensor, other: torch.Tensor, *words: Any) -> torch.Tensor:
    refuse_fp8("matmul", input=input, other=other)
    return Matmul.of(MATMUL, input, other, *words)


def refuse_fp8(op: str, **operands: torch.Tensor) -> None:
    """Raise GradientError where a gradient of an fp8 operand is wanted: rounding to fp8 has none."""
    refuse(op, *((name, tensor) for name, tensor in operands.items() if tensor.dtype.itemsize == 1))


MATMUL, _ = define(
    "matmul",
    "Tensor input, Tensor other, *, ScalarType? out_dtype=None, str? precision=None",
    _kernel,
    _fake,
    into=True,
)
differentiate(MATMUL, _record)
batch(MATMUL, batched_matmul)
autocast(MATMUL, "input", "other")
