"""How many programs a processor holds at once, by what a config takes of memory, registers and threads."""

from typing import Final

from tritile.config import Config
from tritile.device import Device
from tritile.model import matmul
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.space import descriptor, packed, tile, warpgroups

_REGISTERS: Final = 65536  # of a processor
_THREADS: Final = 2048


def _of_permute(config: Config, problem: PermuteProblem, device: Device) -> int:
    family = packed if config.family == packed.NAME else tile
    threads = config.num_warps * device.warp_size
    registers = 16 + 2 * family.held_words(config, problem, device)
    taken = config["BLOCK_M"] * config["BLOCK_N"] * problem.itemsize if problem.turns else 0
    return min(
        int(_REGISTERS / (threads * registers)),
        _THREADS // threads,
        device.shared_memory // (taken + 1024),
        32,
    )


def resident_of(problem: MatmulProblem | PermuteProblem, config: Config, device: Device) -> int:
    """Programs of a legal config that a processor is estimated to hold at once, at least 1.

    A persistent kernel is launched with one program a processor.
    """
    if dict(config.kwargs).get("PERSISTENT"):
        return 1
    if isinstance(problem, PermuteProblem):
        return max(1, _of_permute(config, problem, device))
    if config.family == warpgroups.NAME:
        taken, threads = warpgroups.shared_bytes(config, problem), 128 * (config["CONSUMERS"] + 1)
    elif config.family == descriptor.NAME:
        taken, threads = descriptor.shared_bytes(config, problem), config.num_warps * device.warp_size
    else:
        return matmul.resident(config, problem, device)
    return max(1, min(device.shared_memory // (taken + 1024), 512 // threads, 4))
