"""Correct the time that a formula predicts, by what was measured at other sizes.

The error of a formula changes little from one size to the next. So the logarithm of measured over predicted
time is modelled as a smooth function of a problem's traits: a weighted sum of random cosines (Rahimi and
Recht, "Random Features for Large-Scale Kernel Machines", 2007), the same cosines for all configs.
"""

import functools
import math
import random
from typing import Any, Final

import numpy as np

from tritile.planning.formula import FORMULAS

COSINES: Final = 48
_STEEP: Final = 1.8  # standard deviation of the slopes: a cosine has a period within a trait's range


@functools.cache
def _drawn(traits: int) -> tuple[Any, Any]:
    """Return slopes, of shape (cosines, traits), and phases (cosines,); the same in every process."""
    dice = random.Random(0)
    slopes = [[dice.gauss(0.0, _STEEP) for _ in range(traits)] for _ in range(COSINES)]
    return np.array(slopes), np.array([dice.uniform(0.0, math.tau) for _ in range(COSINES)])


def cosines(problem: Any) -> Any:
    """Return the cosines of a problem: their weighted sum is the logarithm of its correction."""
    traits = FORMULAS[problem.op].traits(problem)
    slopes, phases = _drawn(len(traits))
    return np.cos(slopes @ traits + phases)
