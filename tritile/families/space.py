"""Which configs exist for a problem, and the one predicate that says whether a config is legal.

Each family of kernels has a module of its own here: its configs, what makes one illegal, and what makes
one pointless.
"""

from collections.abc import Iterable
from typing import Any, Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem, Tiled
from tritile.errors import UnsupportedError
from tritile.families import numerics
from tritile.families.grouped import family as grouped
from tritile.families.matmul_tile import family as tile
from tritile.families.matmul_tma import family as descriptor
from tritile.families.matmul_wgmma import family as warpgroups
from tritile.families.permute import family as packed
from tritile.families.quantized import family as quantized
from tritile.families.quantized import tma as quantized_tma
from tritile.families.quantized import unpacked as quantized_unpacked

# Families of each operation. A module has CONFIGS, `illegal` and `pointless`, and `contends` where there are
# problems for which all its configs are pointless.
_MODULES: Final[dict[str, tuple[Any, ...]]] = {
    "matmul": (tile, descriptor, warpgroups),
    "grouped": (tile, grouped),
    "permute": (tile, packed),
    "linear_quantized": (quantized, quantized_tma, quantized_unpacked),
}
FAMILIES: Final = {op: tuple(module.NAME for module in own) for op, own in _MODULES.items()}
ALL_CONFIGS: Final[dict[str, dict[str, tuple[Config, ...]]]] = {
    op: {module.NAME: module.CONFIGS[op] for module in own} for op, own in _MODULES.items()
}


def _module(op: str, family: str) -> Any:
    """The module of a family of an operation, or None where there is no such."""
    return next((module for module in _MODULES[op] if family == module.NAME), None)


def contenders(problem: Tiled) -> tuple[str, ...]:
    """The families of its operation that can be the fastest for a problem, where they may run it."""
    modules = _MODULES[problem.op]
    return tuple(own.NAME for own in modules if not hasattr(own, "contends") or own.contends(problem))


def _core(problem: Tiled) -> Tiled:
    """What kernels make for a problem: another product, where they make it through that."""
    return problem.core if isinstance(problem, MatmulProblem) else problem


def illegal(config: Config, problem: Tiled, device: Device) -> str | None:
    """Why `config` may not run `problem` on `device`, or None where it may.

    This is a statement about values before compiling. What the compiled kernel really takes is
    checked where it is compiled.
    """
    module = _module(problem.op, config.family)
    if module is None:
        return f"family {config.family!r} is not one of {problem.op}: {', '.join(FAMILIES[problem.op])}"
    if isinstance(problem, MatmulProblem) and problem.in_parts and device.nvidia < 80:
        return f"fp16x3 needs compute capability 8.0, and {device.name} has not"
    if invariant(problem) and numerics.by_data(problem):
        return "its data decide how it sums, and batch-invariant products sum in one way"
    core = _core(problem)
    reason: str | None = module.illegal(config, core, device)
    return numerics.fault(config, core, device) if reason is None and invariant(problem) else reason


def invariant(problem: Tiled) -> bool:
    """Whether all configs of a problem must sum in one way: see `tritile.families.numerics`."""
    return not isinstance(problem, PermuteProblem) and problem.invariant


def worthwhile(configs: Iterable[Config], problem: Tiled, device: Device) -> list[Config]:
    """Those of some configs that are legal, and of which no other does the same or strictly less work."""
    modules, roomy = {module.NAME: module for module in _MODULES[problem.op]}, _roomy(problem, device)
    legal = (config for config in configs if illegal(config, problem, device) is None)
    return [config for config in legal if not modules[config.family].pointless(config, roomy, device)]


def _roomy(problem: Tiled, device: Device) -> Tiled:
    """What tells which configs are pointless for a problem."""
    core = _core(problem)
    return numerics.roomy(core, device) if invariant(problem) else core


def legal_configs(problem: Tiled, device: Device, family: str | None = None) -> list[Config]:
    """Every config of the space, or of one family, worth running for this problem on this device.

    A family that is named need be no contender.
    Raises UnsupportedError, with the reason, where none is legal.
    """
    roomy = _roomy(problem, device)
    names = contenders(problem) if family is None else (family,)
    families = [module for module in _MODULES[problem.op] if module.NAME in names]
    found: list[Config] = []
    for module in families:
        own = module.CONFIGS[problem.op]
        useful = [config for config in own if not module.pointless(config, roomy, device)]  # told faster
        for configs in (useful, own):
            legal = [config for config in configs if illegal(config, problem, device) is None]
            if legal:
                break
        found += legal
    if not found:
        reason = illegal(families[0].CONFIGS[problem.op][0], problem, device)
        raise UnsupportedError(f"no config of {problem.label} is legal on {device.name}: {reason}")
    return found
