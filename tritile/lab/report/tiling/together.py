"""Estimate how many programs an SM holds at once."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.families.registry import FAMILIES


def resident_of(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> int:
    """Estimate how many programs of a legal config an SM holds at once, at least 1.

    A persistent kernel is launched with one program per SM.
    """
    if dict(config.kwargs).get("PERSISTENT"):
        return 1
    resident = FAMILIES[problem.op][config.family].resident
    assert resident is not None  # families of products and permutations tell it
    return resident(config, problem, device)
