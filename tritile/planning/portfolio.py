"""Predict times of a class's portfolio: the few dozen configs that its problems may run by."""

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Final

import numpy as np

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.errors import InvalidValueError
from tritile.families.registry import FAMILIES
from tritile.families.space import dominated, illegal, unbanded
from tritile.planning.classes import MEASURED
from tritile.planning.correction import Correction, correction_of, factors, inputs_of
from tritile.planning.formula import FORMULAS
from tritile.planning.trial import number_from, numbers_from

MOST: Final = 96  # configs of a portfolio
RACED: Final = 8  # configs, the likeliest at a size, that mode "tune" times
_BLEND: Final = 32.0  # the largest exponent: more overflows
_SMALLEST: Final = 1e-12  # the smallest constant
_LARGEST: Final = 1e12  # the largest


@dataclass(frozen=True)
class Loss:
    """Hold what picks lose to the fastest of all timed configs, as shares: 0.01 is 1%.

    Measured at `sizes` sizes that were left out of choosing and fitting.
    """

    sizes: int
    median: float
    p95: float
    worst: float


def _columns(rows: Iterable[Iterable[float]]) -> Any:
    return np.array(list(zip(*rows, strict=True)), dtype=np.float64)


@dataclass(frozen=True)
class Portfolio:
    """Hold the configs of a class with the constants of their formula. Ties break by their order."""

    name: str
    configs: tuple[Config, ...]
    constants: tuple[Any, ...]
    loss: Loss
    correction: Correction | None = None
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def times(self, problem: Any, device: Device) -> list[float]:
        """Return predicted microseconds of each config, legal or not. About 0.15 ms on one core."""
        formula, kind = FORMULAS[problem.op], (problem.kind, device)
        if kind not in self._known:
            shapes = [formula.shape(config, problem, device) for config in self.configs]
            constants = formula.constants(*_columns(map(astuple, self.constants)))
            keys = [formula.key(config) for config in self.configs]
            different = list(dict.fromkeys(keys))
            places = np.array([different.index(key) for key in keys])
            shape = type(shapes[0])(*_columns(shapes))
            network = self.correction.arrays() if self.correction else None
            self._known[kind] = shape, constants, network, different, places
        shape, constants, network, different, places = self._known[kind]
        rows = [formula.facts(problem, device, key) for key in different]
        facts = type(rows[0])(*_columns(rows).take(places, 1))
        us, *parts = formula.parts(shape, facts, constants)
        if network is not None:
            traits = np.tile(formula.traits(problem), (len(us), 1))
            us = us * factors(inputs_of(np.array([us, *parts]).T, traits), *network)
        times: list[float] = us.tolist()
        return times

    def ranked(self, problem: Any, device: Device, count: int) -> list[tuple[float, Config]]:
        """Return microseconds and config of the `count` fastest predicted legal configs, in order.

        Those beyond what the formula was fitted to come last, and so do those that another dominates, in
        bands or not.
        """
        times, beyond = self.times(problem, device), FORMULAS[problem.op].beyond
        after = [beyond(config, problem) for config in self.configs]
        order = sorted(range(len(times)), key=list(zip(after, times, strict=True)).__getitem__)
        worse, last = dominated(problem, device), list[int]()
        found: list[tuple[float, Config]] = []
        for place in itertools.chain(order, last):
            config = self.configs[place]
            if len(found) == count:
                break
            if place not in last and worse(config) and worse(unbanded(config)):
                last.append(place)
            elif illegal(config, problem, device) is None:
                found.append((times[place], config))
        return found

    def to_dict(self) -> dict[str, Any]:
        members = [
            {"config": config.to_dict(), "constants": [float(f"{value:.3g}") for value in astuple(constants)]}
            for config, constants in zip(self.configs, self.constants, strict=True)
        ]
        correction = {"correction": self.correction.to_dict()} if self.correction else {}
        return {"members": members, "loss": dict(vars(self.loss))} | correction


def portfolio_of(name: str, data: Any) -> Portfolio:
    """Return the portfolio that `to_dict` gave. Raises InvalidValueError for anything else."""
    _check(name in MEASURED, f"portfolio {name!r}: wanted one of {', '.join(MEASURED)}")
    known = isinstance(data, Mapping) and {*data} - {"correction"} == {"members", "loss"}
    _check(known, f"{name}: wanted members, loss and, if it has one, a correction")
    members, loss = data["members"], data["loss"]
    kind = FORMULAS[MEASURED[name].op].constants
    count = len(fields(kind))
    _check(isinstance(members, list) and 1 <= len(members) <= MOST, f"{name}: wanted 1 to {MOST} members")
    configs: list[Config] = []
    constants: list[Any] = []
    for member in members:
        known = isinstance(member, Mapping) and set(member) == {"config", "constants"}
        _check(known, f"{name}: a member is a config and its constants")
        constants.append(kind(*numbers_from("constants", member["constants"], count, _SMALLEST, _LARGEST)))
        configs.append(_offered(Config.from_dict(member["config"]), MEASURED[name].op, name))
        _check(constants[-1].blend <= _BLEND, f"{name}: a blend of {constants[-1].blend}, above {_BLEND}")
    _check(len(set(configs)) == len(configs), f"{name}: a config is there twice")
    names = [f.name for f in fields(Loss)]
    _check(isinstance(loss, Mapping) and set(loss) == set(names), f"{name}: loss is {', '.join(names)}")
    sizes = number_from(loss["sizes"], 1, _LARGEST, whole=True)
    shares = numbers_from("shares", [loss[each] for each in names[1:]], len(names) - 1, 0, 1e3)
    found = Loss(int(sizes or 1), *shares)
    inputs, correction = FORMULAS[MEASURED[name].op].inputs, None
    if "correction" in data:
        correction = correction_of(data["correction"], inputs, len(configs))
    return Portfolio(name, tuple(configs), tuple(constants), found, correction)


@functools.cache
def _parameters(op: str, name: str) -> frozenset[str]:
    """Return the names of a family's parameters. Cached, as the first config of a space may take long."""
    return frozenset(each for each, _ in next(iter(FAMILIES[op][name].space())).kwargs)


def _offered(config: Config, op: str, name: str) -> Config:
    family = FAMILIES[op].get(config.family)
    _check(family is not None, f"{name}: {config.family!r} is not a family of {op}")
    assert family is not None
    names = _parameters(op, config.family)
    _check({each for each, _ in config.kwargs} == names, f"{name}: {config} is not of {sorted(names)}")
    blocks = [value for each, value in config.kwargs if not isinstance(value, bool)]
    _check(all(isinstance(value, int) and value >= 1 for value in blocks), f"{name}: {config}: wanted blocks")
    return config


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise InvalidValueError(text)
