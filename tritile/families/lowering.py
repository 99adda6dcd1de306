"""Lowering: products made through another product, whose operands are made over for it first.

A product of complex numbers, of more digits than tensor cores hold, or of a layout that is slow to read, is
one of simpler operands between small kernels: they lay the operands out, and put the result together. The
families of kernels make the product in the midst, the core, as they make any other; `MatmulProblem.core`
tells it to those who choose.
"""

from typing import Final

from tritile.core.views import MatmulCall
from tritile.families.common.lowered import Lowered
from tritile.families.common.work import Work
from tritile.families.complex import lowering as complexes
from tritile.families.fp16x3 import lowering as fp16x3
from tritile.families.ozaki import lowering as ozaki
from tritile.families.rows import lowering as rows
from tritile.families.zeros import lowering as zeros

__all__ = ["Lowered", "joined", "lowered"]


# The first that a product wants makes it; what that makes may want another.
LOWERINGS: Final = (complexes, zeros, fp16x3, ozaki, rows)


def lowered(call: MatmulCall, early: bool) -> Lowered | None:
    """Tell what a product becomes, None where kernels make it as it is.

    `early`: kernels may start before the one ahead of them is done, and wait in themselves.
    """
    for lowering in LOWERINGS:
        if lowering.wanted(call):
            return lowering.lowered(call, early)
    return None


def joined(parts: Lowered, core: Work) -> Work:
    """All launches of a call: the work of its core between those before and after it."""
    assert not parts.scratch.keys() & core.scratch.keys()
    scratch, main = {**parts.scratch, **core.scratch}, core.main - len(parts.after)
    return Work((*parts.before, *core.steps, *parts.after), scratch, core.counters, main)
