"""Products by packed weights as a torch user makes them: the baselines of `tritile.linear`."""

from collections.abc import Callable
from typing import Final

import torch

from tritile.core import of_torch
from tritile.core.quantized import by_row, unpacked
from tritile.core.views import QuantizedCall
from tritile.lab.report.once import once
from tritile.tune.subject import operands
from tritile.tune.subject.matrices import weight_rows

WIDE: Final = "matmul by the weight in 16 bits"
PACKED: Final = "_weight_int4pack_mm"
_INNER_K_TILES: Final = 8  # of 16 columns each


def by_wide_weight(call: QuantizedCall) -> None:
    """Multiply by the unpacked weight into the call's output."""
    x, out = operands.matrix(call.x, 1)[0], operands.matrix(call.out, 1)[0]
    weight = once(call.words, WIDE, lambda: weight_rows(call, 0, call.out.shape[1]))
    if call.fused.bias is None:
        torch.matmul(x, weight.t(), out=out)
    else:
        torch.addmm(operands.matrix(call.fused.bias, 1)[0, 0], x, weight.t(), out=out)


def as_torch_packs(call: QuantizedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers (N, K / 2) of dtype uint8, even columns above odd ones, and scales beside offsets.

    Scales and offsets have shape (groups, N, 2). A weight is (number - 8) * scale + offset.
    """
    (_, n), k, problem = call.out.shape, call.x.shape[1], call.problem
    numbers = unpacked(call.words.view(problem.words), n, k, call.bits)
    scales = by_row(call.scales.view(problem.scales), n, k // call.group_size).float()
    offsets = torch.zeros_like(scales)
    if call.zeros is not None:
        zeros = call.zeros.view(problem.scales) & (2**call.bits - 1)
        offsets = (8 - by_row(zeros, n, k // call.group_size)) * scales
    pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]
    return pairs, torch.stack((scales.t(), offsets.t()), -1).to(call.scales.dtype)


def by_packed_weight(call: QuantizedCall) -> torch.Tensor:
    """Multiply by the weight in torch's own packing."""

    def packed() -> tuple[torch.Tensor, torch.Tensor]:
        pairs, scales = as_torch_packs(call)
        return of_torch.int4_packed(pairs.contiguous(), _INNER_K_TILES), scales.contiguous()

    weight, scales = once(call.words, PACKED, packed)
    made = of_torch.int4_mm(operands.matrix(call.x, 1)[0], weight, call.group_size, scales)
    return made if call.fused.bias is None else made.add_(operands.matrix(call.fused.bias, 1)[0, 0])


def ways(call: QuantizedCall) -> dict[str, Callable[[QuantizedCall], torch.Tensor | None]]:
    """Return the ways that take such a weight, by name."""
    (_, n), k = call.out.shape, call.x.shape[1]
    fits = call.bits == 4 and call.dtype == "bfloat16" and n % 8 == 0 and k % (16 * _INNER_K_TILES) == 0
    return {WIDE: by_wide_weight, PACKED: by_packed_weight} if fits else {WIDE: by_wide_weight}
