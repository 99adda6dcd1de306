"""How many programs a processor holds at once, by what a config takes of memory, registers and threads."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.families.registry import FAMILIES


def resident_of(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> int:
    """Programs of a legal config that a processor is estimated to hold at once, at least 1.

    A persistent kernel is launched with one program a processor.
    """
    if dict(config.kwargs).get("PERSISTENT"):
        return 1
    resident = FAMILIES[problem.op][config.family].resident
    assert resident is not None  # families of products and permutations tell it
    return resident(config, problem, device)
