"""Define `tritile::matmul`."""

from typing import Any

import torch

from tritile.ops.matmul import eager
from tritile.ops.operators.batches import batched_matmul
from tritile.ops.operators.gradients import Matmul
from tritile.ops.operators.library import autocast, batch, define, differentiate, refuse
from tritile.ops.products import matmul_of


def _record(input: torch.Tensor, other: torch.Tensor, *options: Any) -> torch.Tensor:
    refuse_fp8("matmul", input=input, other=other)
    return Matmul.of(MATMUL, input, other, *options)


def refuse_fp8(op: str, **operands: torch.Tensor) -> None:
    """Raise GradientError where a gradient of an fp8 operand is wanted: rounding to fp8 has none."""
    refuse(op, *((name, tensor) for name, tensor in operands.items() if tensor.dtype.itemsize == 1))


MATMUL = define("matmul", eager, matmul_of)
differentiate(MATMUL, _record)
batch(MATMUL, batched_matmul)
autocast(MATMUL, "input", "other")
