"""torch's product with scales per 128 of K: `_scaled_mm` where it takes the operands, else in bfloat16."""

from collections.abc import Callable
from typing import Any, Final

import torch

from tritile.core import of_torch
from tritile.core.problem import BLOCK_SCALES
from tritile.core.views import MatmulCall
from tritile.lab.report.once import once
from tritile.tune.subject import operands
from tritile.tune.subject.matrices import applied, as_matrices

OWN: Final = "_scaled_mm, use_fast_accum=False"  # scales are applied to sums that left the tensor cores
WIDE: Final = "matmul of dequantised bfloat16"
_ways: Final[dict[Any, str]] = {}  # by problem


def _laid_out(scales: torch.Tensor, shared: int) -> torch.Tensor:
    """Lay scales of shape (rows, blocks of K) out as torch wants them.

    Scales per row have contiguous columns; scales per 128 rows have rows padded to multiples of 4. See
    `is_blockwise_1x128_scaling` and `is_blockwise_128x128_scaling` in aten/src/ATen/native/cuda.
    """
    if shared == 1:
        return scales.t().contiguous().t()
    rows, blocks = scales.shape
    padded = scales.new_zeros(rows, -(-blocks // 4) * 4)
    padded[:, :blocks] = scales
    return padded[:, :blocks]


def _own(call: MatmulCall) -> list[torch.Tensor]:
    assert call.scales is not None
    shared = BLOCK_SCALES[call.scales.shared]
    assert shared is not None
    of_a, of_b = as_matrices(call)
    a, b = (operands.matrix(view, 1)[0] for view in (call.a, call.b))
    return [a, b, _laid_out(of_a, shared[0]), _laid_out(of_b.t(), shared[1]).t()]


def _wide(call: MatmulCall) -> list[torch.Tensor]:
    """Return both operands times their scales, in bfloat16."""
    return [tensor.bfloat16() for tensor in applied(call, torch.float32)]


def _product(way: str, kind: torch.dtype) -> Callable[..., torch.Tensor]:
    if way == WIDE:
        return torch.matmul

    def scaled(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **out: Any
    ) -> torch.Tensor:
        return of_torch.scaled_mm(a, b, scale_a, scale_b, out_dtype=kind, **out)

    return scaled


def way_of(call: MatmulCall) -> str:
    """Name what a torch user would call, OWN or WIDE; found by trying, once for each problem."""
    problem = call.problem
    if problem not in _ways:
        try:
            _product(OWN, getattr(torch, call.out_dtype))(*_own(call))
            _ways[problem] = OWN
        except (RuntimeError, ValueError, NotImplementedError):  # torch refuses this dtype or size
            _ways[problem] = WIDE
    return _ways[problem]


def inputs(call: MatmulCall) -> list[torch.Tensor]:
    """Return the operands, and any scales, that `product` takes."""
    assert call.scales is not None
    way = way_of(call)
    return once(call.scales.a, way, lambda: (_wide if way == WIDE else _own)(call))


def product(call: MatmulCall) -> Callable[..., torch.Tensor]:
    """Return a function that multiplies what `inputs` returns; `out=` is optional."""
    kind = getattr(torch, call.out_dtype)
    multiply = _product(way_of(call), kind)
    if way_of(call) == OWN or kind == torch.bfloat16:
        return multiply

    def rounded(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        made = multiply(a, b)
        return made.to(kind) if out is None else out.copy_(made)

    return rounded
