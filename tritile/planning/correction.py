"""Tell by how much configs take longer than their formula says, by what was measured at other sizes.

What a formula does not know of changes little from one size to the next. So the logarithm of a measured time
by a predicted one is taken for a smooth function of a problem's traits: a weighted sum of random cosines
(Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", 2007), the same ones for all configs.
"""

import functools
import math
import random
from typing import Any, Final

import numpy as np

from tritile.planning.formula import FORMULAS

COSINES: Final = 48
_STEEP: Final = 1.8  # standard deviation of their slopes: they turn over within a trait's range


@functools.cache
def _drawn(traits: int) -> tuple[Any, Any]:
    """Return slopes (cosines, traits) and phases, the same in every process."""
    dice = random.Random(0)
    slopes = [[dice.gauss(0.0, _STEEP) for _ in range(traits)] for _ in range(COSINES)]
    return np.array(slopes), np.array([dice.uniform(0.0, math.tau) for _ in range(COSINES)])


def cosines(problem: Any) -> Any:
    """Return the terms of a problem's corrections: a weighted sum of them is a logarithm."""
    traits = FORMULAS[problem.op].traits(problem)
    slopes, phases = _drawn(len(traits))
    return np.cos(slopes @ traits + phases)
