"""Tell how many times as long torch takes as tritile for problems of a class, by their sizes."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError
from tritile.planning.classes import MEASURED
from tritile.planning.trial import number_from

_LARGEST: Final = 1e30  # of a weight, and of what torch is never predicted to take
_TERMS: Final = {MatmulProblem.op: 28, PermuteProblem.op: 21}


def terms(problem: MatmulProblem | PermuteProblem) -> list[float]:
    """Return what a lead weighs: 1, logarithms of sizes and of alignments, and their products."""
    sizes: tuple[float, ...]
    if isinstance(problem, PermuteProblem):
        sizes = (problem.bytes / 1024, problem.m, problem.n, problem.x_align, problem.out_align)
    else:
        aligns = problem.a_align, problem.b_align, problem.out_align
        sizes = (problem.batch * problem.m, problem.n, problem.k, *aligns)
    logs = [math.log2(max(1, size)) / 8 - 1 for size in sizes]  # of some -1 to 1
    return [1.0, *logs, *(x * y for x, y in itertools.combinations_with_replacement(logs, 2))]


@dataclass(frozen=True)
class Lead:
    """Hold weights of `terms`, whose sum is the logarithm of torch's time by tritile's.

    Of so many `sizes`, left out of the fit, those that torch was predicted to take `least` times as long for
    or more were won but for 5%.
    """

    weights: tuple[float, ...]
    least: float
    sizes: int

    def ratio(self, problem: MatmulProblem | PermuteProblem) -> float:
        """Return how many times as long torch is predicted to take."""
        pairs = zip(self.weights, terms(problem), strict=True)
        return math.exp(max(-50.0, min(50.0, sum(weight * term for weight, term in pairs))))

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary that JSON holds."""
        weights = [float(f"{weight:.4g}") for weight in self.weights]
        return {"weights": weights, "least": float(f"{self.least:.4g}"), "sizes": self.sizes}


def lead_of(name: str, data: Any) -> Lead:
    """Return the lead of a class that `to_dict` gave. Raises InvalidValueError for anything else."""
    count = _TERMS.get(MEASURED[name].op) if name in MEASURED else None
    if count is None:
        raise InvalidValueError(f"lead {name!r}: wanted a class of products or of permutations")
    if not isinstance(data, Mapping) or set(data) != {"weights", "least", "sizes"} or None in data.values():
        raise InvalidValueError(f"lead {name!r}: wanted weights, least and sizes")
    weights = data["weights"]
    if not isinstance(weights, list) or len(weights) != count or None in weights:
        raise InvalidValueError(f"lead {name!r}: wanted {count} weights")
    checked = tuple(float(number_from(each, -_LARGEST, _LARGEST)) for each in weights)
    least = float(number_from(data["least"], 1, _LARGEST))
    return Lead(checked, least, number_from(data["sizes"], 1, 1 << 31, whole=True))
