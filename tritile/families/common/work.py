"""What products are lowered to, and arguments that kernels of several families take."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import triton.language as tl

from tritile.core.call import MatmulCall, View
from tritile.core.epilogue import SIDES
from tritile.runtime.work import Buffer, Step, Work, Workspace


class Lowered(NamedTuple):
    """Describe what a product is lowered to: launches before the core, the core, launches after it.

    Steps, and views of the core, name the buffers of the call and of `scratch`.
    """

    before: tuple[Step, ...]
    core: MatmulCall
    after: tuple[Step, ...] = ()
    scratch: Mapping[str, Workspace] = MappingProxyType({})

    def around(self, core: Work) -> Work:
        """Return all launches of a call: its core's work between the launches before and after."""
        assert not self.scratch.keys() & core.scratch.keys()
        scratch, main = {**self.scratch, **core.scratch}, core.main - len(self.after)
        return Work((*self.before, *core.steps, *self.after), scratch, core.counters, main)


def copied_batch(
    view: View, batch_shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how the matrices of an operand are copied side by side, those of a stretched dimension once.

    That is their number, their batch's sizes and strides, and the strides of the whole batch over the copies,
    in copies.
    """
    dims = [(n, step) for n, step in zip(batch_shape, view.batch_strides, strict=True) if n > 1 and step]
    count = before = prod(n for n, _ in dims)
    steps = []
    for n, step in zip(batch_shape, view.batch_strides, strict=True):
        own = n > 1 and step != 0
        before //= n if own else 1
        steps.append(before if own else 0)
    shape, strides = zip(*dims, strict=True) if dims else ((1,), (0,))
    return count, tuple(shape), tuple(strides), tuple(steps)


# --- Arguments that kernels of several families take ---


def extra(sides: Mapping[str, View], rank: int, weights: tuple[Any, Any] = (None, None)) -> tuple[Any, ...]:
    """Return an epilogue's operands, then alpha and beta, as `common.epilogue.finished` takes them.

    `rank`: the number of batch dimensions that kernels see.
    """
    found: list[Any] = []
    for name in SIDES:
        if (view := sides.get(name)) is None:
            found += [None] * (3 + rank)
        else:
            missing = (0,) * (rank - len(view.batch_strides))
            found += [Buffer(view.buffer), *view.strides, *missing, *view.batch_strides]
    return (*found, *weights)


def epilogue_arguments(call: MatmulCall, rank: int) -> dict[str, Any]:
    """Return what kernels take of an epilogue; None if nothing is fused.

    Of float64, alpha and beta are compiled in, to keep all their digits: Triton passes a float as fp32.
    """
    weights: tuple[Any, Any] = (call.alpha, call.beta) if call.epilogue.weighted else (None, None)
    if call.dtype == "float64" and call.epilogue.weighted:
        weights = tl.constexpr(call.alpha), tl.constexpr(call.beta)
    found = extra(call.sides, rank, weights) if call.epilogue else None
    return {"extra": found, "EPILOGUE": call.epilogue.constants}


def fallback_arguments(call: MatmulCall) -> dict[str, Any]:
    if call.fallback is None:
        return {"flag_ptr": None, "FLAGS": None}
    flag, least, end = call.fallback
    return {"flag_ptr": Buffer(flag.buffer), "FLAGS": (least, end)}
