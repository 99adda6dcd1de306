"""Lowering: products made through another product, whose operands are made over for it first.

A product of complex numbers, of more digits than tensor cores hold, or of a layout that is slow to read, is
one of simpler operands between small kernels: they lay the operands out, and put the result together. The
families of kernels make the product in the midst, the core, as they make any other; `MatmulProblem.core`
tells it to those who choose.
"""

from collections.abc import Callable
from typing import Any

from tritile.core.problem import REAL_DTYPE
from tritile.core.views import MatmulCall, QuantizedCall
from tritile.families.common.lowered import Lowered
from tritile.families.common.work import Buffer, Descriptor, Work
from tritile.families.complex import lowering as complexes
from tritile.families.fp16x3 import lowering as fp16x3
from tritile.families.ozaki import lowering as ozaki
from tritile.families.rows import lowering as rows
from tritile.families.zeros import lowering as zeros

__all__ = ["Lowered", "joined", "lowered"]


def lowered(call: MatmulCall, early: bool) -> Lowered | None:
    """What a product becomes, None where kernels make it as it is.

    `early`: kernels may start before the one ahead of them is done, and wait in themselves.
    """
    if call.dtype in REAL_DTYPE:
        return complexes.lowered(call, early)
    if zeros.wanted(call):
        return zeros.lowered(call, early)
    if call.problem.in_parts:
        return Lowered(*fp16x3.steps_of(call, early))
    if call.precision == "ozaki":
        return ozaki.lowered(call)
    if call.problem.by_rows:
        return rows.lowered(call, early)
    return None


def _renumbered(value: Any, numbers: Callable[[int], int]) -> Any:
    if isinstance(value, Buffer | Descriptor):
        return value._replace(buffer=numbers(value.buffer))
    if type(value) is tuple:
        return tuple(_renumbered(item, numbers) for item in value)
    return value


def joined(call: MatmulCall | QuantizedCall, parts: Lowered, core: Work) -> Work:
    """All launches of a call: the work of its core between those before and after it."""
    tensors = call.tensors
    # The call may itself be the core of another: what its tensors name are buffers of that one.
    given = {id(tensor): index for index, tensor in enumerate(tensors)}
    places = [
        # One tensor may be two operands, and another time not: each stays in its place.
        i
        if tensor is next(iter(tensors[i : i + 1]), None)
        else given.get(id(tensor), getattr(tensor, "buffer", -1))
        for i, tensor in enumerate(parts.core.tensors)
    ]
    beyond = len(tensors) + len(parts.scratch) - len(places)

    def number(buffer: int) -> int:
        return places[buffer] if buffer < len(places) else buffer + beyond

    steps = [step._replace(args=_renumbered(step.args, number)) for step in core.steps]
    scratch, main = (*parts.scratch, *core.scratch), core.main - len(parts.after)
    return Work((*parts.before, *steps, *parts.after), scratch, core.counters, main)
