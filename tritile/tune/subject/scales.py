"""Scales within a sum, as tensors to check with: see `tritile.core.problem.BLOCK_SCALES`."""

import torch

from tritile.core.problem import BLOCK_SCALES, SCALE_K
from tritile.core.views import MatmulCall
from tritile.tune.subject.operands import matrix


def as_matrices(call: MatmulCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of a by blocks of rows and of K, and of b by blocks of K and of columns."""
    assert call.scales is not None
    shared = BLOCK_SCALES[call.scales.shared]
    assert shared is not None
    (m, k), n = call.a.shape, call.b.shape[1]
    blocks = -(-k // SCALE_K)
    a, b = call.scales.a, call.scales.b
    of_a = a.as_strided((-(-m // shared[0]), blocks), call.scales.a_strides)
    of_b = b.as_strided((blocks, -(-n // shared[1])), call.scales.b_strides)
    return of_a, of_b


def applied(call: MatmulCall, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a and b in this dtype, each element times its scale, of a call with scales for each 128 of K."""
    assert call.scales is not None
    shared = BLOCK_SCALES[call.scales.shared]
    assert shared is not None
    (m, k), n = call.a.shape, call.b.shape[1]
    of_a, of_b = (scales.to(kind) for scales in as_matrices(call))
    of_a = of_a.repeat_interleave(shared[0], 0)[:m].repeat_interleave(SCALE_K, 1)[:, :k]
    of_b = of_b.repeat_interleave(SCALE_K, 0)[:k].repeat_interleave(shared[1], 1)[:, :n]
    return matrix(call.a, 1)[0].to(kind) * of_a, matrix(call.b, 1)[0].to(kind) * of_b
