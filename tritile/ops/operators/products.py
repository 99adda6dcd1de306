"""Define `tritile::matmul`."""

from typing import Any

import torch

from tritile.core.problem import Tiled
from tritile.ops.described import NOTHING, described
from tritile.ops.matmul import eager
from tritile.ops.operators.batches import batched_matmul
from tritile.ops.operators.gradients import Matmul
from tritile.ops.operators.library import autocast, batch, define, differentiate, refuse
from tritile.ops.operators.planning import StandIn, plan_ahead
from tritile.ops.products import Product, checked


def fake_of(of: Product, out: Any, out_dtype: torch.dtype | None, precision: str | None) -> torch.Tensor:
    """Return the result of a product of fake tensors, and plan the product."""
    shape, dtype, how = checked(of, out, out_dtype, precision)
    result = of.a.new_empty(shape, dtype=dtype) if out is None else out

    def problem(like: StandIn) -> Tiled:
        def plain(tensor: torch.Tensor) -> torch.Tensor:
            return like(tensor).resolve_neg()

        if of.a.is_complex() and of.extras is not NOTHING:  # a plain product; torch applies the epilogue
            sums = torch.empty(shape, dtype=dtype, device="meta")
            return described(plain(of.a), plain(of.b), sums, how).problem
        return described(plain(of.a), plain(of.b), like(result), how, of.extras.mapped(plain)).problem

    plan_ahead(of.a.device, problem)
    return result


def _fake(
    input: torch.Tensor, other: torch.Tensor, *, out_dtype: torch.dtype | None = None,
    precision: str | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return fake_of(Product.plain(input, other), out, out_dtype, precision)


def _record(input: torch.Tensor, other: torch.Tensor, *options: Any) -> torch.Tensor:
    refuse_fp8("matmul", input=input, other=other)
    return Matmul.of(MATMUL, input, other, *options)


def refuse_fp8(op: str, **operands: torch.Tensor) -> None:
    """Raise GradientError where a gradient of an fp8 operand is wanted: rounding to fp8 has none."""
    refuse(op, *((name, tensor) for name, tensor in operands.items() if tensor.dtype.itemsize == 1))


MATMUL = define(
    "matmul",
    "Tensor input, Tensor other, *, ScalarType? out_dtype=None, str? precision=None",
    eager,
    _fake,
    into=True,
)
differentiate(MATMUL, _record)
batch(MATMUL, batched_matmul)
autocast(MATMUL, "input", "other")
