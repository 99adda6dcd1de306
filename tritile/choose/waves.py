"""Rank configs by predicted time: to order a search, and to choose without measurements.

One formula predicts products by tiles (`families/common/cost.py`), from what their families say that a
program does. Families of skinny products, odd rows and permutations have formulas of their own.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from tritile.choose.inputs import facts_at
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import GroupedProblem, Tiled
from tritile.families.common.cost import Program, product_us
from tritile.families.registry import FAMILIES
from tritile.families.space import contenders, illegal, legal_configs, worthwhile

_SHAPES = 4  # the least number of tile shapes among configs to try first


def predict_us(config: Config, problem: Tiled, device: Device) -> float:
    family = FAMILIES[problem.op][config.family]
    cost = family.cost(config, problem.core, device)
    if not isinstance(cost, Program):
        return cost
    seen = problem.even if isinstance(problem, GroupedProblem) else problem
    return product_us(config, _facts(seen, device, family.copies), device, cost)


_facts = functools.lru_cache(256)(facts_at)


def _order(problem: Tiled, device: Device) -> Callable[[Config], tuple[float, str]]:
    return lambda config: (predict_us(config, problem, device), config.key)


def ranked(problem: Tiled, device: Device, family: str | None = None) -> list[Config]:
    """Return the legal configs, the fastest predicted first; ties break by key."""
    return sorted(legal_configs(problem, device, family), key=_order(problem, device))


def likeliest(configs: Iterable[Config], problem: Tiled, device: Device) -> Config:
    """Return the fastest predicted of legal configs; ties break by key."""
    return min(configs, key=_order(problem, device))


def pick(problem: Tiled, device: Device) -> Config:
    """Return the fastest predicted of all legal configs. A product's space takes 0.1 to 0.2 s of one core."""
    return likeliest(legal_configs(problem, device), problem, device)


def with_margins(problem: Tiled, device: Device, except_of: Collection[str] = ()) -> list[Config]:
    """Return the configs worth running of families with margins, in the order in which they are taken.

    Their formulas were fitted to measurements, so that they give microseconds. `except_of`: families whose
    configs are in the problem's class after all, as boxes may be.
    """
    found: dict[Config, float] = {}
    for name in contenders(problem):
        family = FAMILIES[problem.op][name]
        if (margin := family.margin) is not None and name not in except_of:
            own = worthwhile(family.configs, problem, device)
            found |= {config: margin * predict_us(config, problem, device) for config in own}
    return sorted(found, key=lambda config: (found[config], config.key))


def shape_of(config: Config) -> tuple[int, ...]:
    """Sides of a config's tiles; of boxes, elements and those of a run."""
    first, second = ("BLOCK", "RUN") if "RUN" in dict(config.kwargs) else ("BLOCK_M", "BLOCK_N")
    return config[first], config[second]


def _varied(configs: list[Config], count: int) -> list[Config]:
    """Return `count` of the configs in rounds: at most two of a tile shape a round, in their order.

    Estimates rank tile shapes better than warps and stages, and can hardly rank GROUP_M. So configs that
    differ only in GROUP_M come in different rounds.
    """
    rounds: dict[int, list[Config]] = {}
    seen: dict[tuple[int, ...], int] = {}
    orders: dict[Config, int] = {}
    for config in configs[: 40 * count]:
        rest = tuple(pair for pair in config.kwargs if pair[0] != "GROUP_M")
        ungrouped = replace(config, kwargs=rest)
        orders[ungrouped] = orders.get(ungrouped, -1) + 1
        if not orders[ungrouped]:
            seen[shape_of(config)] = seen.get(shape_of(config), 0) + 1
        rounds.setdefault((seen[shape_of(config)] - 1) // 2 + orders[ungrouped], []).append(config)
    return [config for number in sorted(rounds) for config in rounds[number]][:count]


def families(problem: Tiled, device: Device) -> list[str]:
    configs = ((name, FAMILIES[problem.op][name].configs) for name in contenders(problem))
    return [name for name, own in configs if any(illegal(c, problem, device) is None for c in own)]


def screened(problem: Tiled, device: Device, count: int) -> list[Config]:
    """Return the `count` configs to try first: the likeliest of each family by turns, over varied tiles.

    If these have fewer than four tile shapes, the last one makes room for the next shape.
    """
    lists = [_varied(ranked(problem, device, name), count) for name in families(problem, device)]
    if not lists:
        legal_configs(problem, device)  # raises, with the reason
    lists.sort(key=lambda configs: predict_us(configs[0], problem, device))
    rounds = itertools.zip_longest(*lists)
    likely = [config for one in rounds for config in one if config is not None]
    shapes = {shape_of(config) for config in likely[:count]}
    others = [config for config in likely[count:] if shape_of(config) not in shapes]
    if count >= 2 * _SHAPES and len(shapes) < _SHAPES and others:
        return [*likely[: count - 1], others[0]]
    return likely[:count]
