"""Predict times by what was fitted to a class's measurements at other sizes.

A `Portfolio` holds the few dozen configs that problems of a class may run by, with the constants of their
formula. A `Correction`, a small neural network, predicts the logarithm of measured time over that of the
formula. Its inputs are the parts of the formula's prediction, such as the share of each bound and how full
waves are, a problem's sizes and alignments, and a few numbers of each config's own. All configs of a class
share its two layers, and each config has its own weights of what the second gives.
"""

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Final

import numpy as np

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.forgetting import Memo
from tritile.errors import InvalidValueError
from tritile.families.registry import FAMILIES
from tritile.families.space import dominated, illegal, unbanded
from tritile.planning.classes import MEASURED
from tritile.planning.formula import FORMULAS
from tritile.tuner.store.files import number_from, numbers_from, rows_from

MOST: Final = 96  # configs of a portfolio
RACED: Final = 8  # configs, the likeliest at a size, that mode "tune" times
_BLEND: Final = 32.0  # the largest exponent: more overflows
_SMALLEST: Final = 1e-12  # the smallest constant
_LARGEST: Final = 1e12  # the largest
OWN: Final = 8  # inputs of a correction that are a config's own
LAYERS: Final = 64, 32  # units of its two layers
_LEAST: Final = 2.0**-30  # parts below it count as it
_LARGEST_NUMBER: Final = 1e6  # of a correction

Rows = tuple[tuple[float, ...], ...]


def inputs_of(parts: Any, traits: Any) -> Any:
    """Return inputs (..., inputs) of parts (..., parts) and of traits (..., traits)."""
    return np.concatenate([np.log2(np.maximum(parts, _LEAST)), traits], -1)


def factors(inputs: Any, ranges: Any, first: Any, starts: Any, second: Any, weights: Any) -> Any:
    """Return the factors (..., configs) by which measured times exceed predicted ones.

    `inputs` is (..., configs, inputs), the others are what `Correction.arrays` returns.
    """
    units = np.maximum(np.minimum(np.maximum(inputs, ranges[0]), ranges[1]) @ first + starts, 0.0)
    units = np.maximum(units @ second[1:] + second[0], 0.0)
    return np.exp((units * weights[:, 1:]).sum(-1) + weights[:, 0])


@dataclass(frozen=True)
class Correction:
    """Hold a network of rectified linear units. What is added to a sum stands before its weights.

    - `ranges`: the least and the largest of each input; what is beyond counts as these.
    - `own`: the further inputs of each config.
    - `first`: for each unit of the first layer, a slope by each input, those of configs last.
    - `second`: for each unit of the second layer, a slope by each unit of the first.
    - `weights`: for each config, a weight of each unit of the second layer.
    """

    ranges: Rows
    own: Rows
    first: Rows
    second: Rows
    weights: Rows

    def arrays(self) -> tuple[Any, ...]:
        """Return what `factors` takes, with the part of configs' own inputs in the first layer's sums."""
        ranges, own, first, second, weights = map(np.array, vars(self).values())
        inputs = ranges.shape[1] + 1
        return ranges, first[:, 1:inputs].T, own @ first[:, inputs:].T + first[:, 0], second.T, weights

    def to_dict(self) -> dict[str, Any]:
        return {name: [[float(f"{x:.3g}") for x in row] for row in rows] for name, rows in vars(self).items()}


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
    _prepared: Memo[Any, Any] = field(default_factory=Memo, init=False, repr=False, compare=False)

    @functools.cached_property
    def families(self) -> frozenset[str]:
        return frozenset(config.family for config in self.configs)

    @functools.cached_property
    def _fitted(self) -> tuple[Any, Any]:
        """The constants, an array over configs each, and the arrays of the correction."""
        constants = type(self.constants[0])(*_columns(map(astuple, self.constants)))
        return constants, self.correction.arrays() if self.correction else None

    def times(self, problem: Any, device: Device, among: Collection[int] | None = None) -> list[float]:
        """Return predicted microseconds of each config, legal or not. About 0.15 ms on one core.

        `among`: places of the configs that matter, at least one; the times of others then mean nothing.
        """
        formula, kind, (constants, network) = FORMULAS[problem.op], (problem.kind, device), self._fitted
        prepared = self._prepared.get(kind)
        if prepared is None:
            shapes = [formula.shape(config, problem, device) for config in self.configs]
            keys = [formula.key(config) for config in self.configs]
            numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
            different, places = [*numbers], np.array([numbers[key] for key in keys])
            prepared = self._prepared[kind] = type(shapes[0])(*_columns(shapes)), different, places
        shape, different, places = prepared
        needed = range(len(different)) if among is None else {*places[[*among]].tolist()}
        known = {number: formula.facts(problem, device, different[number]) for number in needed}
        other = next(iter(known.values()))  # in place of what is not needed: arrays keep their shape
        rows = [known.get(number, other) for number in range(len(different))]
        facts = type(other)(*_columns(rows).take(places, 1))
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
        worse, last = dominated(problem, device), list[tuple[float, int]]()
        found: list[tuple[float, Config]] = []
        for us, place in itertools.chain(self._in_order(problem, device), last):
            config = self.configs[place]
            if (us, place) not in last and worse(config) and worse(unbanded(config)):
                last.append((us, place))
            elif illegal(config, problem, device) is None:
                found.append((us, config))
                if len(found) == count:
                    break
        return found

    def _in_order(self, problem: Any, device: Device) -> Iterator[tuple[float, int]]:
        """Yield microseconds and places, by time; those beyond what was fitted last, and only then timed."""
        beyond, places = FORMULAS[problem.op].beyond, range(len(self.configs))
        late = {place for place in places if beyond is not None and beyond(self.configs[place], problem)}
        for among in ([place for place in places if place not in late], late):
            if among:
                times = self.times(problem, device, among)
                yield from sorted((times[place], place) for place in among)

    def to_dict(self) -> dict[str, Any]:
        members = [
            {"config": config.to_dict(), "constants": [float(f"{value:.3g}") for value in astuple(constants)]}
            for config, constants in zip(self.configs, self.constants, strict=True)
        ]
        correction = {"correction": self.correction.to_dict()} if self.correction else {}
        return {"members": members, "loss": dict(vars(self.loss))} | correction


# --- Reading ---


def portfolio_of(name: str, data: Any) -> Portfolio:
    """Return the portfolio that `to_dict` gave. Raises InvalidValueError for anything else."""
    try:
        op, members, loss = MEASURED[name].op, data["members"], data["loss"]
        formula = FORMULAS[op]
        count = len(fields(formula.constants))
        configs = tuple(_offered(Config.from_dict(each["config"]), op) for each in members)
        constants = tuple(
            formula.constants(*numbers_from("constants", each["constants"], count, _SMALLEST, _LARGEST))
            for each in members
        )
        sizes = number_from(loss["sizes"], 1, _LARGEST, whole=True)
        shares = numbers_from("shares", [loss["median"], loss["p95"], loss["worst"]], 3, 0, 1e3)
        correction = None
        if "correction" in data:
            correction = correction_of(data["correction"], formula.inputs, len(configs))
    except (LookupError, TypeError) as error:
        raise InvalidValueError(f"{name!r} is not a portfolio: {error!r}") from error
    _check(1 <= len(set(configs)) == len(configs) <= MOST, f"{name}: expected 1 to {MOST} configs, each once")
    _check(all(each.blend <= _BLEND for each in constants), f"{name}: a blend is above {_BLEND}")
    return Portfolio(name, configs, constants, Loss(int(sizes or 1), *shares), correction)


@functools.cache
def _parameters(op: str, name: str) -> frozenset[str]:
    """Return the names of a family's parameters. Cached, as the first config of a space may take long."""
    return frozenset(each for each, _ in next(iter(FAMILIES[op][name].space())).kwargs)


def _offered(config: Config, op: str) -> Config:
    names, own = _parameters(op, config.family), {each for each, _ in config.kwargs}
    _check(
        own.difference(FAMILIES[op][config.family].options) == names, f"{config} is not of {sorted(names)}"
    )
    blocks = [value for _, value in config.kwargs if not isinstance(value, bool)]
    _check(all(isinstance(value, int) and value >= 1 for value in blocks), f"{config}: expected blocks")
    return config


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise InvalidValueError(text)


def correction_of(data: Any, inputs: int, configs: int) -> Correction:
    one, two = LAYERS
    shapes = {
        "ranges": (2, inputs),
        "own": (configs, OWN),
        "first": (one, 1 + inputs + OWN),
        "second": (two, 1 + one),
        "weights": (configs, 1 + two),
    }
    _check(isinstance(data, Mapping) and set(data) == set(shapes), f"a correction is {', '.join(shapes)}")
    rows = {name: rows_from(name, data[name], *shape, _LARGEST_NUMBER) for name, shape in shapes.items()}
    return Correction(**rows)
