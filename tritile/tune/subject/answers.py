"""Check answers against float64 products and exact copies."""

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from tritile.core.epilogue import finished
from tritile.core.problem import REAL_DTYPE
from tritile.core.problem.checks import THREE
from tritile.core.views import UNFUSED, Call, GroupedCall, MatmulCall, PermuteCall
from tritile.errors import TuningError
from tritile.tune.measure.timing import Run
from tritile.tune.subject import quantized
from tritile.tune.subject.elements import ROUNDING, check_grouped, check_matmul, torch_fp32
from tritile.tune.subject.groups import grouped_error
from tritile.tune.subject.operands import matrix, poison, sampled
from tritile.tune.subject.scales import applied


def _wider(out: torch.Tensor, real: torch.dtype) -> torch.dtype:
    """Return a dtype that holds a sum of elements: `real`, or its complex twin for complex elements."""
    return real.to_complex() if out.is_complex() else real


def matmul_error(call: MatmulCall) -> float:
    """Return |out - a b| / |a b| over up to 256 rows, by a float64 product; infinite where out has a NaN.

    The epilogue is applied to a b in float64, and scales within the sum to a and b.
    """
    batch, fused = call.problem.batch, call.fused
    sides = [None if view is None else matrix(view, batch) for view in fused.views]
    a, b, out = (matrix(view, batch) for view in (call.a, call.b, call.out))
    if call.scales is not None:
        a, b = (tensor.unsqueeze(0) for tensor in applied(call, torch.float64))
    up = None if call.up is None else matrix(call.up, batch)
    if out.dtype != torch.int32 and not bool(torch.isfinite(out.sum(dtype=_wider(out, torch.float32)))):
        return math.inf
    wide = _wider(out, torch.float64)
    rows, worst, norm = sampled(call.a.shape[0], out.device), 0.0, 0.0
    for i in range(0, batch, max(1, batch // 8)):
        left, right = a[i][rows].to(wide), b[i].to(wide)
        if fused.zero_a is not None:
            left = left - matrix(fused.zero_a, 1)[0][rows, :1].to(wide)
        if fused.zero_b is not None:
            right = right - matrix(fused.zero_b, 1)[0][:1].to(wide)
        sums, second = left @ right, None if up is None else left @ up[i].to(wide)
        with_rows = [None if side is None else side[i][rows] for side in sides]
        wanted = finished(sums, with_rows, fused.activation, fused.alpha, fused.beta, second)
        worst += float((out[i][rows].to(wide) - wanted).abs().square().sum())
        norm += float(wanted.abs().square().sum())
    return math.sqrt(worst / norm) if norm else float(worst > 0)


def allowed_error(call: MatmulCall | GroupedCall) -> float:
    """Return the largest relative error that a right product may have.

    Rounding to the output type errs by half its epsilon at the most. A running sum of K fp32 products errs by
    about sqrt(K) epsilons of fp32, and by twice that in the truncating adders of tensor cores. TF32 keeps 11
    bits of each input, rounded. An activation may shrink its input to less than half, and grow the error up
    to 1.13 times. A gated product has the errors of both factors. A part of a complex number is a sum of 2 K
    products; by three real products it is made of sums that together are up to four times as large. An
    epilogue rounds three times more, in the type of sums.
    """
    real, k = REAL_DTYPE.get(call.dtype), call.a.shape[1]
    dtype, out_dtype = real or call.dtype, real or call.out_dtype
    k, larger = 2 * k if real else k, 4 if call.precision.endswith(THREE) else 1
    summing = {"float64": 1e-16, "int8": 0.0}.get(dtype, 1e-7) * math.sqrt(k) * 4
    inputs = 1e-3 if call.precision.removesuffix(THREE) == "tf32" and dtype == "float32" else 0.0
    what = call.fused if isinstance(call, MatmulCall) else UNFUSED
    spared = 0.4 if what.activation else 1.0
    gate = summing + inputs if what.gated else 0.0
    fused = (4e-16 if dtype == "float64" else 2e-7) if what != UNFUSED else 0.0
    return ROUNDING[out_dtype] + larger * (summing + inputs) / spared + gate + fused


def start() -> None:
    """Have torch load the kernels that checks call, ahead of the first check."""
    one = torch.ones(16, 16, dtype=torch.float64, device="cuda")
    (one @ one).sum().item()


def _copy_error(call: PermuteCall) -> float:
    check_permuted(call)
    return 0.0


def _nothing(call: Call) -> float:
    return 0.0


_ERRORS: Final[dict[str, Callable[[Any], float]]] = {
    "matmul": matmul_error,
    "grouped": grouped_error,
    "permute": _copy_error,
    "linear_quantized": quantized.error,
}
_ALLOWED: Final[dict[str, Callable[[Any], float]]] = {
    "matmul": allowed_error,
    "grouped": allowed_error,
    "permute": _nothing,
    "linear_quantized": quantized.allowed,
}


_CHECKS: Final[dict[str, Callable[[Any], None]]] = {
    "matmul": check_matmul,
    "grouped": check_grouped,
    "linear_quantized": quantized.check,
}


def error_of(call: Call) -> float:
    """Return the relative error of an answer, however large. Raises TuningError for an inexact copy."""
    return _ERRORS[call.op](call)


def check_elements(call: Call) -> None:
    """Raise TuningError where any element of a product is off by more than rounding explains.

    This makes the product by torch, block by block of rows: in float32 for 16-bit operands, else in float64.
    """
    check = _CHECKS.get(call.op)
    if check is not None:
        with torch_fp32():
            check(call)


def answer_error(call: Call, every: bool = True) -> float:
    """Return the relative error of a call's answer. Raises TuningError for a wrong one.

    `every` checks each element, too, which takes as long as a product by torch in a wider type.
    """
    error, allowed = error_of(call), _ALLOWED[call.op](call)
    if not error <= allowed:
        raise TuningError(f"wrong answer: relative error {error:.3g}, above {allowed:.3g}")
    if every:
        check_elements(call)
    return error


def check(run: Run, call: Call, every: bool = True) -> float:
    """Run on a poisoned output and return the relative error. Raises TuningError for a wrong answer.

    `every` is as in `answer_error`. Leave it off for a baseline of several steps, which rounds between them.
    """
    poison(call)
    run(call)
    torch.cuda.synchronize()
    return answer_error(call, every)


def check_permuted(call: PermuteCall) -> None:
    """Raise TuningError where out is not x, bit for bit."""
    x, out = permuted(call)
    if not torch.equal(x, out):
        raise TuningError("wrong answer: elements differ")


def permuted(call: PermuteCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and out over the same index space, in words; the last dimension is the words of an element."""
    problem = call.problem
    lanes = 2 if problem.itemsize == 16 else 1
    x, out = (
        tensor.as_strided((*problem.shape, lanes), (*(lanes * step for step in strides), 1))
        for tensor, strides in ((call.x, problem.x_strides), (call.out, problem.out_strides))
    )
    return x, out
