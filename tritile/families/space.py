"""List the configs of a problem, by the one predicate that says whether a config is legal."""

from collections.abc import Callable, Iterable

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, Tiled
from tritile.errors import UnsupportedError
from tritile.families.numerics import Numerics, by_data, pad_to_canonical_tile
from tritile.families.registry import FAMILIES


def contenders(problem: Tiled) -> tuple[str, ...]:
    """Return the families of the problem's operation that can be the fastest, if they are legal."""
    return tuple(name for name, family in FAMILIES[problem.op].items() if family.contends(problem))


def canonical(problem: Tiled, device: Device) -> Numerics:
    return next(iter(FAMILIES[problem.op].values())).canonical(problem, device)


def illegal(config: Config, problem: Tiled, device: Device) -> str | None:
    """Say why `config` may not run `problem` on `device`, None if it may.

    This is decided before compiling. The resources of the compiled kernel are checked after it is compiled.
    """
    if problem.needs_torch:
        return "only torch computes it"
    family = FAMILIES[problem.op].get(config.family)
    if family is None:
        return f"family {config.family!r} is not one of {problem.op}: {', '.join(FAMILIES[problem.op])}"
    if isinstance(problem, MatmulProblem) and problem.in_parts and device.nvidia < 80:
        return f"fp16x3 needs compute capability 8.0, which {device.name} lacks"
    if problem.invariant and by_data(problem):
        return "its data decide how it sums, and batch-invariant products sum in one way"
    core = problem.core
    reason = family.illegal(config, core, device)
    if reason is not None or not problem.invariant:
        return reason
    pairs = zip(Numerics._fields, family.numerics(config, core, device), canonical(core, device), strict=True)
    differs = ", ".join(f"{name} {own!r}, not {other!r}" for name, own, other in pairs if own != other)
    return f"batch-invariant products sum in one way: {differs}" if differs else None


def dominated(problem: Tiled, device: Device) -> Callable[[Config], bool]:
    """Return a predicate of configs: true if another of the same family does the same work or less."""
    families, core = FAMILIES[problem.op], problem.core
    large = pad_to_canonical_tile(core, canonical(core, device)) if problem.invariant else core
    return lambda config: families[config.family].is_dominated(config, large, device)


def worthwhile(configs: Iterable[Config], problem: Tiled, device: Device) -> list[Config]:
    worse = dominated(problem, device)
    return [config for config in configs if illegal(config, problem, device) is None and not worse(config)]


def unbanded(config: Config) -> Config:
    return config.derived((name, 1 if name == "GROUP_M" else value) for name, value in config.kwargs)


def legal_configs(problem: Tiled, device: Device, family: str | None = None) -> list[Config]:
    """Return every legal config, or those of one family, worth running for this problem on this device.

    A family that is named need not be a contender. Raises UnsupportedError, with the reason, if none is
    legal.
    """
    worse, of_op = dominated(problem, device), FAMILIES[problem.op]
    names = contenders(problem) if family is None else (family,)
    families = [of_op[name] for name in names if name in of_op]
    found: list[Config] = []
    for one in families:
        # The faster test first.
        useful = [config for config in one.configs if not worse(config)]
        legal = [config for config in useful if illegal(config, problem, device) is None]
        found += legal or [config for config in one.configs if illegal(config, problem, device) is None]
    if not found:
        reason = illegal(families[0].configs[0], problem, device)
        raise UnsupportedError(f"no config of {problem.label} is legal on {device.name}: {reason}")
    return found
