"""The configs of one problem on one device, as the space of a search."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.families.registry import FAMILIES
from tritile.families.space import illegal
from tritile.planning import model

_SIDES = ("BLOCK_M", "BLOCK_N", "CONSUMERS")  # in warp-specialised kernels these are no powers of two


def _with(config: Config, **values: Any) -> Config:
    """Return the config with other values of some parameters."""
    options = {name: value for name, value in values.items() if name in ("num_warps", "num_stages")}
    return replace(config, kwargs=tuple((n, values.get(n, v)) for n, v in config.kwargs), **options)


@functools.cache
def _grid(op: str, family: str) -> dict[str, list[Any]]:
    """Return the values of each parameter among a family's own configs, smallest first."""
    values: dict[str, set[Any]] = {}
    for config in FAMILIES[op][family].configs:
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        for name, value in (dict(config.kwargs) | options).items():
            values.setdefault(name, set()).add(value)
    return {name: sorted(own) for name, own in values.items() if len(own) > 1}


def steps(config: Config, op: str) -> list[Config]:
    """Return every config one step away.

    A step sets one parameter to its next value among the family's own configs, halves or doubles it, or adds
    or removes a stage. Tiles of warp-specialised kernels grow and shrink by the rows of a warpgroup, together
    with the number of warpgroups.
    """
    found, specialised = [], "CONSUMERS" in dict(config.kwargs)
    for name, own in _grid(op, config.family).items():
        value = getattr(config, name) if name in ("num_warps", "num_stages") else config[name]
        side = specialised and name in _SIDES
        reach = 2 if side else 1
        near = [v for v in own if v < value][-reach:] + [v for v in own if v > value][:reach]
        if name == "num_stages":
            near += [value - 1, value + 1]
        elif not side and not isinstance(value, bool):
            near += [value // 2, value * 2]
        found += [_with(config, **{name: v}) for v in near if isinstance(v, bool) or v >= 1]
    if specialised:
        rows = config["BLOCK_M"] // config["CONSUMERS"]
        found += [_with(config, CONSUMERS=count, BLOCK_M=rows * count) for count in (1, 2, 3)]
    return [step for step in dict.fromkeys(found) if step != config]


class ProblemSpace:
    """Search the legal configs of a problem on a device, in the order of the model's predictions.

    `known` are configs that may be good, as from the table. An opening begins with the legal ones of them.
    `configs` and `opening` raise UnsupportedError, with the reason, where no config is legal.
    """

    def __init__(self, problem: Tiled, device: Device, known: Iterable[Config] = ()) -> None:
        self.problem, self.device = problem, device
        self._likely: dict[int, list[Config]] = {}
        self.known = [config for config in dict.fromkeys(known) if config in self]

    def configs(self) -> Sequence[Config]:
        """Return every config worth running, the fastest predicted first."""
        return self._ranked

    @functools.cached_property
    def _ranked(self) -> list[Config]:
        return model.ranked(self.problem, self.device)

    def opening(self, count: int) -> list[Config]:
        """Return the known configs, then each family's likeliest in turn, over varied tiles."""
        if count not in self._likely:  # asked for before each round of a search
            self._likely[count] = model.screened(self.problem, self.device, count)
        return list(dict.fromkeys([*self.known, *self._likely[count]]))[:count]

    def neighbours(self, config: Config) -> list[Config]:
        """Return every legal config one step away, the fastest predicted first."""
        legal = [step for step in steps(config, self.problem.op) if step in self]
        return sorted(legal, key=lambda c: (model.predict_us(c, self.problem, self.device), c.key))

    def __contains__(self, config: object) -> bool:
        return isinstance(config, Config) and illegal(config, self.problem, self.device) is None
