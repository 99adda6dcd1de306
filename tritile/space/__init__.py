"""Which configs exist for a problem, and the one predicate that says whether a config is legal.

Each family of kernels has a module of its own here: its configs, what makes one illegal, and what makes
one pointless.
"""

from typing import Final

from tritile.config import Config
from tritile.device import Device
from tritile.errors import UnsupportedError
from tritile.problem import MatmulProblem, PermuteProblem
from tritile.space import descriptor, packed, tile, warpgroups

FAMILIES: Final = {
    "matmul": (tile.NAME, descriptor.NAME, warpgroups.NAME),
    "permute": (tile.NAME, packed.NAME),
}
ALL_CONFIGS: Final[dict[str, dict[str, tuple[Config, ...]]]] = {
    "matmul": {module.NAME: module.CONFIGS["matmul"] for module in (tile, descriptor, warpgroups)},
    "permute": {module.NAME: module.CONFIGS["permute"] for module in (tile, packed)},
}


def illegal(config: Config, problem: MatmulProblem | PermuteProblem, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may.

    This is a statement about values before compiling. What the compiled kernel really takes is
    checked where it is compiled.
    """
    if config.family not in FAMILIES[problem.op]:
        return f"family {config.family!r} is not one of {problem.op}: {', '.join(FAMILIES[problem.op])}"
    if isinstance(problem, MatmulProblem):
        problem = problem.core
        if config.family == descriptor.NAME:
            return descriptor.illegal(config, problem, device)
        if config.family == warpgroups.NAME:
            return warpgroups.illegal(config, problem, device)
    elif config.family == packed.NAME:
        return packed.illegal(config, problem, device)
    return tile.illegal(config, problem, device)


def _pointless(config: Config, problem: MatmulProblem | PermuteProblem, device: Device) -> bool:
    if isinstance(problem, MatmulProblem):
        problem = problem.core
        if config.family == descriptor.NAME:
            return descriptor.pointless(config, problem, device)
        if config.family == warpgroups.NAME:
            return warpgroups.pointless(config, problem, device)
    return tile.pointless(config, problem)


def legal_configs(
    problem: MatmulProblem | PermuteProblem, device: Device, family: str | None = None
) -> list[Config]:
    """Every config of the space, or of one family, worth running for this problem on this device.

    Raises UnsupportedError, with the reason, where none is legal.
    """
    families = [own for name, own in ALL_CONFIGS[problem.op].items() if family in (None, name)]
    found: list[Config] = []
    for own in families:
        useful = [config for config in own if not _pointless(config, problem, device)]  # told faster
        for configs in (useful, own):
            legal = [config for config in configs if illegal(config, problem, device) is None]
            if legal:
                break
        found += legal
    if not found:
        reason = illegal(families[0][0], problem, device)
        raise UnsupportedError(f"no config of {problem.label} is legal on {device.name}: {reason}")
    return found
