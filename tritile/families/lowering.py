"""Lower products: make them through another product, whose operands are transformed first.

This is how products of complex numbers, of more digits than tensor cores hold, or of slow layouts are made.
Small kernels lay the operands out, a family of kernels makes the product between, the core, and small kernels
put the result together. `MatmulProblem.core` is the core's problem.
"""

from typing import Final

from tritile.core.views import MatmulCall
from tritile.families.common.lowered import Lowered
from tritile.families.common.work import Work
from tritile.families.complex import lowering as complexes
from tritile.families.fp16x3 import lowering as fp16x3
from tritile.families.ozaki import lowering as ozaki
from tritile.families.rows import lowering as rows

__all__ = ["Lowered", "joined", "lowered"]


# A product takes the first that it wants; the core may want another.
LOWERINGS: Final = (complexes, fp16x3, ozaki, rows)


def lowered(call: MatmulCall, early: bool) -> Lowered | None:
    """Return what a product is lowered to, None where kernels make it directly."""
    for lowering in LOWERINGS:
        if lowering.wanted(call):
            return lowering.lowered(call, early)
    return None


def joined(parts: Lowered, core: Work) -> Work:
    """Return all launches of a call: its core's work between the launches before and after."""
    assert not parts.scratch.keys() & core.scratch.keys()
    scratch, main = {**parts.scratch, **core.scratch}, core.main - len(parts.after)
    return Work((*parts.before, *core.steps, *parts.after), scratch, core.counters, main)
