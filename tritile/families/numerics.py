"""Tell the one way in which batch-invariant products are summed: see `families.common.numerics`."""

from dataclasses import replace
from typing import Final

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, PermuteProblem, Product, Tiled, suits
from tritile.families.common.numerics import AMD_SIDE, Numerics
from tritile.families.registry import FAMILIES

BY_DATA: Final = "fp16x3"  # the precision whose data decide how it is multiplied
_UNNAMED: Final = ("ieee", "fp16x3")  # of which one is chosen for float32 where no precision is named
_ROWS: Final = 64  # rows of a tile from which on warpgroups multiply


def by_data(problem: Tiled) -> bool:
    """Tell whether a product's data decide how it is made, so that rows depend on each other."""
    return isinstance(problem, MatmulProblem) and problem.precision == BY_DATA


def unnamed(problem: Tiled, device: Device) -> Tiled:
    """Return the problem of the same call where neither it nor torch's setting names a precision.

    A product of float32 is then made of parts where that suits its sizes, on Hopper.
    """
    if not isinstance(problem, MatmulProblem) or problem.dtype != "float32" or problem.rights > 1:
        return problem
    if problem.precision not in _UNNAMED or problem.invariant:
        return problem
    suited = device.nvidia == 90 and suits(problem.m, problem.n, problem.k)
    return replace(problem, precision="fp16x3" if suited else "ieee")


def in_one_way(problem: Tiled) -> Tiled:
    found: Tiled = problem if isinstance(problem, PermuteProblem) else replace(problem, invariant=True)
    return found


def numerics(config: Config, problem: Tiled, device: Device) -> Numerics:
    """Return what decides the bits of an element where `config` makes `problem` on `device`.

    The problem is one that kernels make directly: see `MatmulProblem.core`.
    """
    return FAMILIES[problem.op][config.family].numerics(config, problem, device)


def canonical(problem: Tiled, device: Device) -> Numerics:
    return next(iter(FAMILIES[problem.op].values())).canonical(problem, device)


def fault(config: Config, problem: Tiled, device: Device) -> str | None:
    """Say why a config would not sum as all others of the mode do, None where it does."""
    found, wanted = numerics(config, problem, device), canonical(problem, device)
    if found == wanted:
        return None
    pairs = zip(Numerics._fields, found, wanted, strict=True)
    differs = ", ".join(f"{name} {own!r}, not {other!r}" for name, own, other in pairs if own != other)
    return f"batch-invariant products sum in one way: {differs}"


def roomy(problem: Tiled, device: Device) -> Tiled:
    """Return a problem large enough to fill the blocks of the canonical numerics, however small the real one.

    It serves to find configs that are dominated.
    """
    if not isinstance(problem, Product):
        return problem
    wanted = canonical(problem, device)
    if wanted.instruction == "warpgroup":
        problem = replace(problem, m=max(problem.m, _ROWS))
    elif wanted.instruction == "matrix 32":
        problem = replace(problem, m=max(problem.m, AMD_SIDE), n=max(problem.n, AMD_SIDE))
    return replace(problem, k=max(problem.k, wanted.step)) if wanted.step else problem
