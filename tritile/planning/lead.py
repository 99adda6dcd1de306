"""Predict how many times as long torch takes as tritile, for problems of a class by their sizes."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.errors import InvalidValueError
from tritile.planning.classes import MEASURED
from tritile.planning.formula import FORMULAS
from tritile.planning.trial import number_from, numbers_from

_LARGEST: Final = 1e30  # of a weight; as `least` it is never reached
_TERMS: Final = {MatmulProblem.op: 36, PermuteProblem.op: 21}


def terms(problem: MatmulProblem | PermuteProblem) -> list[float]:
    """Return the terms that a lead weighs: 1, the traits of a problem, and products of two traits."""
    traits = FORMULAS[problem.op].traits(problem)
    return [1.0, *traits, *(x * y for x, y in itertools.combinations_with_replacement(traits, 2))]


@dataclass(frozen=True)
class Lead:
    """Hold the weights of `terms`, whose sum is the logarithm of torch's time over tritile's.

    Of the `sizes` sizes left out of the fit, tritile won 95% of those with a predicted ratio of `least` or
    more.
    """

    weights: tuple[float, ...]
    least: float
    sizes: int

    def ratio(self, problem: MatmulProblem | PermuteProblem) -> float:
        pairs = zip(self.weights, terms(problem), strict=True)
        return math.exp(max(-50.0, min(50.0, sum(weight * term for weight, term in pairs))))

    def to_dict(self) -> dict[str, Any]:
        weights = [float(f"{weight:.4g}") for weight in self.weights]
        return {"weights": weights, "least": float(f"{self.least:.4g}"), "sizes": self.sizes}


def lead_of(name: str, data: Any) -> Lead:
    """Return the lead of a class that `to_dict` gave. Raises InvalidValueError for anything else."""
    count = _TERMS.get(MEASURED[name].op) if name in MEASURED else None
    if count is None:
        raise InvalidValueError(f"lead {name!r}: wanted a class of products or of permutations")
    if not isinstance(data, Mapping) or set(data) != {"weights", "least", "sizes"} or None in data.values():
        raise InvalidValueError(f"lead {name!r}: wanted weights, least and sizes")
    weights = numbers_from("weights", data["weights"], count, -_LARGEST, _LARGEST)
    least = float(number_from(data["least"], 1, _LARGEST))
    return Lead(weights, least, number_from(data["sizes"], 1, 1 << 31, whole=True))
