"""Check answers against float64 products and exact copies."""

import math
from typing import Any

import torch

from tritile.core.problem import REAL_DTYPE
from tritile.core.problem.checks import THREE
from tritile.core.views import UNFUSED, Call, GroupedCall, MatmulCall, PermuteCall
from tritile.errors import TuningError
from tritile.tune.measure.timing import Run
from tritile.tune.subject.elements import ROUNDING, check_elements, parts_of
from tritile.tune.subject.matrices import of_no_group
from tritile.tune.subject.operands import matrix, poison


def allowed_error(call: Any) -> float:
    """Return the largest relative error that a right product may have.

    Rounding to the output type errs by half its epsilon at the most. A running sum of K fp32 products errs by
    about sqrt(K) epsilons of fp32, and by twice that in the truncating adders of tensor cores. TF32 keeps 11
    bits of each input, rounded. An activation may shrink its input to less than half, and grow the error up
    to 1.13 times. A gated product has the errors of both factors. A part of a complex number is a sum of 2 K
    products; by three real products it is made of sums that together are up to four times as large. An
    epilogue rounds three times more, in the type of sums.
    """
    if isinstance(call, PermuteCall):
        return 0.0
    if call.op == "linear_quantized":
        return ROUNDING[call.dtype] + 4e-7 * math.sqrt(call.x.shape[1])
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


def _all_finite(call: Call) -> bool:
    """Tell whether a product has neither infinities nor NaNs, and zeros in rows of no group."""
    batch = getattr(call.problem, "batch", 1)
    if isinstance(call, GroupedCall):
        batch, rest = call.groups if call.out.batch_strides else 1, of_no_group(call)
        if rest is not None and bool(rest.any()):
            return False
    out = matrix(call.out, batch)
    summing = torch.complex64 if out.is_complex() else torch.float32
    return out.dtype == torch.int32 or bool(torch.isfinite(out.sum(dtype=summing)))


def error_of(call: Call) -> float:
    """Return |out - wanted| / |wanted|, however large. Raises TuningError for an inexact copy.

    A product is compared over up to 256 rows, with one made in float64.
    """
    if isinstance(call, PermuteCall):
        check_permuted(call)
        return 0.0
    if not _all_finite(call):
        return math.inf
    worst = norm = 0.0
    for out, wanted, *_ in parts_of(call, sample=True):
        worst += float((out.to(wanted.dtype) - wanted).abs().square().sum())
        norm += float(wanted.abs().square().sum())
    return math.sqrt(worst / norm) if norm else float(worst > 0)


def answer_error(call: Call, every: bool = True) -> float:
    """Return the relative error of a call's answer. Raises TuningError for a wrong one.

    `every` checks each element, too, which takes as long as a product by torch in a wider type.
    """
    error, allowed = error_of(call), allowed_error(call)
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
