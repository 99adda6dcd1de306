"""Formulas that predict a config's time, for ordering a search and for choosing with no measurement.

Each operation has its own, in microseconds; only the order of the answers matters.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import MatmulProblem, Tiled
from tritile.families.registry import FAMILIES
from tritile.families.space import contenders, illegal, legal_configs

_SHAPES = 4  # of tiles, at the least, among configs to try first


def predict_us(config: Config, problem: Tiled, device: Device) -> float:
    """Return predicted microseconds of a legal config on a problem."""
    made = problem.core if isinstance(problem, MatmulProblem) else problem
    return FAMILIES[problem.op][config.family].predicted_us(config, made, device)


def ranked(problem: Tiled, device: Device, family: str | None = None) -> list[Config]:
    """The legal configs, fastest predicted first; ties broken by the config's text, for repeatability."""
    configs = legal_configs(problem, device, family)
    return sorted(configs, key=lambda config: (predict_us(config, problem, device), config.key))


def likeliest(configs: Iterable[Config], problem: Tiled, device: Device) -> Config:
    """That of these, which are legal, which is predicted to be fastest; of equals the first by its text."""
    return min(configs, key=lambda config: (predict_us(config, problem, device), config.key))


def pick(problem: Tiled, device: Device) -> Config:
    """The config predicted to be fastest: of products' spaces, 0.1 to 0.2 s on one core of a server."""
    return likeliest(legal_configs(problem, device), problem, device)


def _tile(config: Config) -> tuple[int, int]:
    return config["BLOCK_M"], config["BLOCK_N"]


def _varied(configs: list[Config], count: int) -> list[Config]:
    """`count` of these, in their order, yet no tile shape a third time before others had a turn.

    The formula cannot tell stages and warps of one tile apart as well as it can tell tiles, and hardly
    GROUP_M: configs that differ in nothing else have a turn each.
    """
    rounds: dict[int, list[Config]] = {}
    seen: dict[tuple[int, int], int] = {}
    orders: dict[Config, int] = {}
    for config in configs[: 40 * count]:
        rest = tuple(pair for pair in config.kwargs if pair[0] != "GROUP_M")
        alike = replace(config, kwargs=rest)
        orders[alike] = orders.get(alike, -1) + 1
        if not orders[alike]:
            seen[_tile(config)] = seen.get(_tile(config), 0) + 1
        rounds.setdefault((seen[_tile(config)] - 1) // 2 + orders[alike], []).append(config)
    return [config for turn in sorted(rounds) for config in rounds[turn]][:count]


def families(problem: Tiled, device: Device) -> list[str]:
    """Return the contenders that have a legal config for the problem."""
    configs = ((name, FAMILIES[problem.op][name].configs) for name in contenders(problem))
    return [name for name, own in configs if any(illegal(c, problem, device) is None for c in own)]


def screened(problem: Tiled, device: Device, count: int) -> list[Config]:
    """Return the `count` configs to try first: each family's likeliest in turn, over varied tiles.

    Where families agree on fewer than four tile shapes, the last place goes to the next shape.
    """
    lists = [_varied(ranked(problem, device, name), count) for name in families(problem, device)]
    if not lists:
        legal_configs(problem, device)  # raises, with the reason
    lists.sort(key=lambda configs: predict_us(configs[0], problem, device))
    turns = itertools.zip_longest(*lists)
    likely = [config for turn in turns for config in turn if config is not None]
    shapes = {_tile(config) for config in likely[:count]}
    others = [config for config in likely[count:] if _tile(config) not in shapes]
    if count >= 2 * _SHAPES and len(shapes) < _SHAPES and others:
        return [*likely[: count - 1], others[0]]
    return likely[:count]
