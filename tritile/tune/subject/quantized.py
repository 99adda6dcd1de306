"""Check products with packed weights."""

import math
from typing import Final

import torch

from tritile.core.quantized import meaning
from tritile.core.views import QuantizedCall
from tritile.tune.subject import elements
from tritile.tune.subject.elements import ROUNDING
from tritile.tune.subject.operands import matrix, sampled

_SLAB: Final = 8192  # rows of a weight that are unpacked at once


def weight_rows(call: QuantizedCall, start: int, stop: int) -> torch.Tensor:
    """Return unpacked rows of a weight in the dtype of its scales; `start` is a multiple of 16."""
    problem, end = call.problem, -(-stop // 16) * 16
    words = call.words.view(problem.words)[start // 8 : end // 8]
    scales = call.scales.view(problem.scales)[:, start:end]
    zeros = None if call.zeros is None else call.zeros.view(problem.scales)[:, start:end]
    shape = (stop - start, problem.k)
    return meaning(words, scales, zeros, shape, call.bits, call.group_size).to(scales.dtype)


def error(call: QuantizedCall) -> float:
    """Return |out - x w^T| / |x w^T| over up to 256 rows, with the weight unpacked in the dtype of x."""
    m, n = call.out.shape
    x, out = matrix(call.x, 1)[0], matrix(call.out, 1)[0]
    if not bool(torch.isfinite(out.sum(dtype=torch.float32))):
        return math.inf
    rows, worst, norm = sampled(m, out.device), 0.0, 0.0
    for start in range(0, n, _SLAB):
        stop = min(n, start + _SLAB)
        wanted = x[rows].double() @ weight_rows(call, start, stop).double().mT
        if call.fused.bias is not None:
            wanted += matrix(call.fused.bias, 1)[0, 0, start:stop].double()
        worst += float((out[rows, start:stop].double() - wanted).square().sum())
        norm += float(wanted.square().sum())
    return math.sqrt(worst / norm) if norm else float(worst > 0)


def allowed(call: QuantizedCall) -> float:
    """Return the largest `error` that a right answer may have, as for any product."""
    return ROUNDING[call.dtype] + 4e-7 * math.sqrt(call.x.shape[1])


def check(call: QuantizedCall) -> None:
    """Raise TuningError where any element is off by more than rounding explains."""
    (m, n), k = call.out.shape, call.x.shape[1]
    x, out = matrix(call.x, 1)[0], matrix(call.out, 1)[0]
    bias = None if call.fused.bias is None else matrix(call.fused.bias, 1)[0]
    grown, step = elements.growth(call.dtype, "ieee", k), elements.step_of(call.dtype)
    for start in range(0, n, _SLAB):
        columns = slice(start, min(n, start + _SLAB))
        weight = weight_rows(call, start, columns.stop).float().mT
        for rows in elements.in_pieces(m, columns.stop - start + k):
            part = elements.summed(x[rows].float(), weight, grown)
            if bias is not None:
                part = elements.with_epilogue([part], [None, None, bias[rows, columns], None, None], step)
            elements.compare(out[rows, columns], *part, (rows.start, start))
