"""List the configs of a problem, by the one predicate that says whether a config is legal."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem, Product, Tiled
from tritile.errors import UnsupportedError
from tritile.families import numerics
from tritile.families.registry import FAMILIES


def contenders(problem: Tiled) -> tuple[str, ...]:
    """Return the families of the problem's operation that can be the fastest, where they may run it."""
    return tuple(name for name, family in FAMILIES[problem.op].items() if family.contends(problem))


def _core(problem: Tiled) -> Tiled:
    return problem.core if isinstance(problem, MatmulProblem) else problem


def illegal(config: Config, problem: Tiled, device: Device) -> str | None:
    """Say why `config` may not run `problem` on `device`, None where it may.

    This is decided before compiling. The resources of the compiled kernel are checked after it is compiled.
    """
    if isinstance(problem, Product) and problem.is_torchs:
        return "only torch computes it"
    family = FAMILIES[problem.op].get(config.family)
    if family is None:
        return f"family {config.family!r} is not one of {problem.op}: {', '.join(FAMILIES[problem.op])}"
    if isinstance(problem, MatmulProblem) and problem.in_parts and device.nvidia < 80:
        return f"fp16x3 needs compute capability 8.0, which {device.name} lacks"
    if invariant(problem) and numerics.by_data(problem):
        return "its data decide how it sums, and batch-invariant products sum in one way"
    core = _core(problem)
    reason = family.illegal(config, core, device)
    return numerics.fault(config, core, device) if reason is None and invariant(problem) else reason


def invariant(problem: Tiled) -> bool:
    """True if all configs of a problem must sum in one way: see `tritile.families.numerics`."""
    return not isinstance(problem, PermuteProblem) and problem.invariant


def worthwhile(configs: Iterable[Config], problem: Tiled, device: Device) -> list[Config]:
    worse = dominated(problem, device)
    return [config for config in configs if illegal(config, problem, device) is None and not worse(config)]


def dominated(problem: Tiled, device: Device) -> Callable[[Config], bool]:
    """Return a test for configs beside which another of the same family does the same work or less."""
    families, roomy = FAMILIES[problem.op], _roomy(problem, device)
    return lambda config: families[config.family].pointless(config, roomy, device)


def unbanded(config: Config) -> Config:
    return replace(config, kwargs=tuple((name, 1 if name == "GROUP_M" else v) for name, v in config.kwargs))


def _roomy(problem: Tiled, device: Device) -> Tiled:
    """Return the problem by which configs are found to be dominated."""
    core = _core(problem)
    return numerics.roomy(core, device) if invariant(problem) else core


def legal_configs(problem: Tiled, device: Device, family: str | None = None) -> list[Config]:
    """Return every legal config, or those of one family, worth running for this problem on this device.

    A family that is named need not be a contender. Raises UnsupportedError, with the reason, where none is
    legal.
    """
    worse = dominated(problem, device)
    names = contenders(problem) if family is None else (family,)
    families = [own for name, own in FAMILIES[problem.op].items() if name in names]
    found: list[Config] = []
    for one in families:
        # The faster test first.
        useful = [config for config in one.configs if not worse(config)]
        for configs in (useful, one.configs):
            legal = [config for config in configs if illegal(config, problem, device) is None]
            if legal:
                break
        found += legal
    if not found:
        reason = illegal(families[0].configs[0], problem, device)
        raise UnsupportedError(f"no config of {problem.label} is legal on {device.name}: {reason}")
    return found
