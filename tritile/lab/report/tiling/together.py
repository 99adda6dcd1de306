"""How many programs a processor holds at once, by what a config takes of memory, registers and threads."""

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.families.common import prediction as matmul
from tritile.families.matmul_tile import family as tile
from tritile.families.permute import prediction as permute


def resident_of(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> int:
    """Programs of a legal config that a processor is estimated to hold at once, at least 1.

    A persistent kernel is launched with one program a processor.
    """
    if dict(config.kwargs).get("PERSISTENT"):
        return 1
    if isinstance(problem, PermuteProblem):
        return permute.resident(config, problem, device)
    of_family = matmul.resident if config.family == tile.NAME else matmul.tma_resident
    return of_family(config, problem, device)
