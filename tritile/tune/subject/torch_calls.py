"""torch's own call for a call of tritile's, with the same output."""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from tritile.choose import aten
from tritile.core import torch_private
from tritile.core.call import GroupedCall, MatmulCall, PermuteCall, QuantizedCall
from tritile.core.epilogue import Epilogue, apply_epilogue_in_dtype
from tritile.core.problem import FP8_DTYPES, MatmulProblem, QuantizedProblem, Tiled
from tritile.families import torch_kernels
from tritile.families.quantized.unpacked import Unpack
from tritile.tune.subject.operands import matrix
from tritile.tune.suites import OF_ITEMSIZE


def in_one_batch(call: MatmulCall) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return a and b, and out: matrices, or batches of them if there are several."""
    batch = call.problem.batch
    whole = (matrix(view, batch) for view in (call.a, call.b, call.out))
    *inputs, out = [tensor[0] if batch == 1 else tensor for tensor in whole]
    return inputs, out


def tensors_of(call: MatmulCall) -> dict[str, torch.Tensor]:
    """Return a, b, the epilogue's operands and `up` by name; dimensions to broadcast have size 1.

    A row has one dimension, so that cuBLAS adds it in its epilogue. Scales have two, as in torch.
    """
    found = dict(zip("ab", in_one_batch(call)[0], strict=True))
    for name, view in call.sides.items():
        whole = matrix(view, call.problem.batch)
        if not (view.batch_strides and view.batch_strides[0]):
            whole = whole[0]
        rows, columns = (slice(None) if step else slice(1) for step in view.strides)
        whole = whole[..., rows, columns]
        found[name] = whole if view.strides[0] or name.startswith("scale") else whole[0]
    if call.up is not None:
        up = matrix(call.up, call.problem.batch)
        found["up"] = up[0] if call.problem.batch == 1 else up
    return found


def product(call: MatmulCall) -> Callable[..., torch.Tensor]:
    """Return torch's product for the operands' dtype: a function of a, b and optionally `out=`.

    For fp8 it also takes two scales and a bias.
    """
    if call.dtype == "int8":
        return torch_private.int_mm
    if call.dtype not in FP8_DTYPES:
        return torch.matmul
    one = torch_kernels.one(call.a.tensor.device)
    how = {"out_dtype": getattr(torch, call.out_dtype), "use_fast_accum": call.precision == "fast"}
    return lambda a, b, scale_a=one, scale_b=one, *bias, **out: torch_private.scaled_mm(
        a, b, scale_a, scale_b, *bias, **how, **out
    )


def multiply(call: MatmulCall) -> None:
    inputs, out = in_one_batch(call)
    product(call)(*inputs, out=out)


def add(call: MatmulCall) -> None:
    """Compute a product with a bias, as torch's linear layers do."""
    found = tensors_of(call)
    torch.addmm(found["bias"], found["a"], found["b"], out=in_one_batch(call)[1])


def compose(call: MatmulCall) -> None:
    """Compute a product, then its epilogue, one operation at a time."""
    found, how = tensors_of(call), (call.activation, call.alpha, call.beta)
    sums = torch.matmul(found["a"], found["b"])
    made = apply_epilogue_in_dtype(sums, found.get("bias"), found.get("residual"), *how)
    in_one_batch(call)[1].copy_(made)


def unpack_and_multiply(unpack: Unpack, call: QuantizedCall) -> None:
    """Unpack a quantized weight to memory by tritile's kernel, then compute the product."""
    x, out = (matrix(view, 1)[0] for view in (call.x, call.out))
    zeros = None if call.zeros is None else call.zeros.tensor
    weight = unpack(call.words.tensor, call.scales.tensor, zeros).t()
    if call.bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(matrix(call.bias, 1)[0, 0], x, weight, out=out)


def scale(call: MatmulCall) -> None:
    """Compute a product of fp8 matrices with scales and an optional bias."""
    found, out = tensors_of(call), in_one_batch(call)[1]
    product(call)(*(found.get(name) for name in ("a", "b", "scale_a", "scale_b", "bias")), out=out)


def groups(call: GroupedCall) -> None:
    torch_kernels.of_groups(matrix(call.a, 1)[0], matrix(call.b, call.groups), call.offs.tensor, None, None)


def copy(call: PermuteCall) -> None:
    problem, kind = call.problem, getattr(torch, OF_ITEMSIZE[call.problem.itemsize])
    x = call.x.tensor.view(kind).as_strided(problem.shape, problem.x_strides)
    call.out.tensor.view(kind).as_strided(problem.shape, problem.out_strides).copy_(x)


RUNS: Final[dict[str, Callable[[Any], None]]] = {"matmul": multiply, "permute": copy}  # without an epilogue


def run_of(problem: Tiled) -> Callable[[Any], None] | None:
    """Return a function that runs torch's call for a problem; None if torch has no single call for it."""
    if isinstance(problem, MatmulProblem) and problem.epilogue and not problem.epilogue.scale_a:
        if problem.batch == 1 and problem.epilogue == Epilogue(bias="row"):
            return add
        return compose if aten.is_compared(problem) else None
    if problem.op in RUNS and not getattr(problem, "epilogue", None):
        return RUNS[problem.op]
    if aten.illegal(problem) or problem.needs_torch:
        return None
    if isinstance(problem, QuantizedProblem):
        unpack = Unpack(problem.n, problem.k, problem.bits, problem.group_size)
        return functools.partial(unpack_and_multiply, unpack)
    return groups if problem.op == "grouped" else scale
