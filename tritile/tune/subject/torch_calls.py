"""torch's own calls for what a call of tritile's does, into the same output."""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from tritile.core import of_torch
from tritile.core.call import GroupedCall, MatmulCall, PermuteCall, QuantizedCall
from tritile.core.epilogue import composed
from tritile.core.problem import (
    FP8_DTYPES,
    Epilogue,
    GroupedProblem,
    MatmulProblem,
    PermuteProblem,
    QuantizedProblem,
    Tiled,
)
from tritile.families import by_torch as torchs
from tritile.planning import aten
from tritile.runtime.unpacked import Unpack
from tritile.tune.subject import operands
from tritile.tune.suites import OF_ITEMSIZE


def matrices(call: MatmulCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a, b and out as (batch, rows, columns) tensors."""
    a, b, out = (operands.matrix(view, call.problem.batch) for view in (call.a, call.b, call.out))
    return a, b, out


def in_one_batch(call: MatmulCall) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return a and b, and out: matrices, or batches of them where there are several."""
    *inputs, out = [tensor[0] if call.problem.batch == 1 else tensor for tensor in matrices(call)]
    return inputs, out


def product(call: MatmulCall) -> Callable[..., torch.Tensor]:
    """Return torch's product for the operands' dtype: a function of a, b and optionally `out=`."""
    if call.dtype == "int8":
        return of_torch.int_mm
    if call.dtype in FP8_DTYPES:
        one = torchs.one(call.a.tensor.device)
        return lambda a, b, **out: of_torch.scaled_mm(a, b, one, one, **_how(call), **out)
    return torch.matmul


def _how(call: MatmulCall) -> dict[str, Any]:
    return {"out_dtype": getattr(torch, call.out_dtype), "use_fast_accum": call.precision == "fast"}


def multiply(call: MatmulCall) -> None:
    inputs, out = in_one_batch(call)
    product(call)(*inputs, out=out)


def add(call: MatmulCall) -> None:
    """Make a product with a bias by torch, as its linear layers do."""
    (a, b), out = in_one_batch(call)
    row = operands.matrix(call.sides["bias"], 1)[0, 0]  # of one dimension, for which cuBLAS adds it itself
    torch.addmm(row, a, b, out=out)


def compose(call: MatmulCall) -> None:
    """Make a product with an epilogue by torch, an operation after the other."""
    (a, b), out = in_one_batch(call)
    sides = {name: operands.matrix(view, call.problem.batch) for name, view in call.sides.items()}
    bias, residual = (
        side if side is None or out.ndim == 3 else side[0] for side in map(sides.get, ("bias", "residual"))
    )
    made = composed(torch.matmul(a, b), bias, residual, call.activation, call.alpha, call.beta)
    out.copy_(made)


def unpack_and_multiply(unpack: Unpack, call: QuantizedCall) -> None:
    """Make a product by a quantized weight by torch, after our kernel has unpacked the weight in memory."""
    x, out = (operands.matrix(view, 1)[0] for view in (call.x, call.out))
    zeros = None if call.zeros is None else call.zeros.tensor
    weight = unpack(call.words.tensor, call.scales.tensor, zeros).t()
    if call.bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(operands.matrix(call.bias, 1)[0, 0], x, weight, out=out)


def scale(call: MatmulCall) -> None:
    """Make a product of fp8 matrices with scales, and perhaps a bias, by torch."""
    (inputs, out), sides = in_one_batch(call), call.sides
    scales = operands.matrix(sides["scale_a"], 1)[0, :, :1], operands.matrix(sides["scale_b"], 1)[0, :1]
    if call.epilogue.scale_a == call.epilogue.scale_b == "one":
        scales = scales[0][:1], scales[1][:, :1]
    bias = operands.matrix(sides["bias"], 1)[0, 0] if "bias" in sides else None
    of_torch.scaled_mm(*inputs, *scales, bias, **_how(call), out=out)


def groups(call: GroupedCall) -> None:
    """Make products of groups by torch, into a new matrix."""
    torchs.of_groups(
        operands.matrix(call.a, 1)[0], operands.matrix(call.b, call.groups), call.offs.tensor, None, None
    )


def copy(call: PermuteCall) -> None:
    problem, kind = call.problem, getattr(torch, OF_ITEMSIZE[call.problem.itemsize])
    x = call.x.tensor.view(kind).as_strided(problem.shape, problem.x_strides)
    call.out.tensor.view(kind).as_strided(problem.shape, problem.out_strides).copy_(x)


RUNS: Final[dict[str, Callable[[Any], None]]] = {MatmulProblem.op: multiply, PermuteProblem.op: copy}


def run_of(problem: Tiled) -> Callable[[Any], None] | None:
    """Return a function that runs torch's call for a problem; None where torch has no single call for it."""
    if isinstance(problem, GroupedProblem):
        return None if aten.illegal(problem) or problem.is_torchs else groups
    if isinstance(problem, MatmulProblem) and problem.epilogue.scale_a:
        return None if aten.illegal(problem) or problem.is_torchs else scale
    if isinstance(problem, MatmulProblem) and problem.epilogue:
        if problem.batch == 1 and problem.epilogue == Epilogue(bias="row"):
            return add
        return compose if aten.is_compared(problem) else None
    if isinstance(problem, QuantizedProblem):
        if aten.illegal(problem):
            return None
        unpack = Unpack(problem.n, problem.k, problem.bits, problem.group_size)
        return functools.partial(unpack_and_multiply, unpack)
    return RUNS.get(problem.op)
