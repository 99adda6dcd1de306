"""Search: the configs of a space, and which of them to measure next after what was measured so far.

Both strategies, `screening` and `exhaustive`, are pure functions, so a search can be stopped and resumed.
Tests replay them against recorded times to see how well they search.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from tritile.core.config import Config
from tritile.errors import InvalidValueError, did_you_mean

Tried = Mapping[Config, float]  # microseconds of each config measured so far; infinity if it failed

MAX_COMBINATIONS: Final = 1_000_000
OPENING: Final = 16  # configs tried before any neighbour of a leader
LEADERS: Final = 2  # fastest configs, the neighbours of which are tried
NEIGHBOURS: Final = 8  # tried of a leader, at most
CROSSED: Final = 8  # fastest configs that exchange parameters
ENOUGH: Final = 5e-4  # expected gain below which a search ends
NEAR: Final = 1.3  # slowdown up to which the best of another family is a leader too
_FEW: Final = 4  # fastest configs, the mean gap of which estimates the gain of a new best
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_DRAWS: Final = 50  # Sobol points to try per config of an opening


class SearchSpace(Protocol):
    """The legal configs of a search, the likeliest to be fast first.

    `opening` returns the configs to try first, likely and varied; `neighbours` those one step away.
    """

    def configs(self) -> Iterable[Config]: ...
    def opening(self, count: int) -> list[Config]: ...
    def neighbours(self, config: Config) -> list[Config]: ...
    def __contains__(self, config: object) -> bool: ...


def parameters(config: Config) -> dict[str, Any]:
    """Return all that a config sets by name: kernel parameters, Triton's options, the family."""
    return dict(config.kwargs) | {name: getattr(config, name) for name in (*_OPTIONS, "family")}


def from_parameters(values: Mapping[str, Any]) -> Config:
    """Return the config with these values and otherwise the defaults of `Config`.

    Raises InvalidValueError if a config cannot have a value.
    """
    options = {name: value for name, value in values.items() if name in (*_OPTIONS, "family")}
    return Config(tuple(sorted((n, v) for n, v in values.items() if n not in options)), **options)


def _ordered(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _next_to(values: Sequence[Any], value: Any) -> list[Any]:
    """Return the next smaller and larger number; all other values if they have no order."""
    if not _ordered((*values, value)):
        return [other for other in values if other != value]
    return sorted(v for v in values if v < value)[-1:] + sorted(v for v in values if v > value)[:1]


class Listed:
    """A list of configs, every one of which a search tries, in this order. Equal configs count once.

    Raises InvalidValueError for an empty list.
    """

    def __init__(self, configs: Iterable[Config]) -> None:
        self._configs = dict.fromkeys(configs)
        if not self._configs:
            raise InvalidValueError("no configs are listed: expected one or more")

    def configs(self) -> list[Config]:
        return list(self._configs)

    def __contains__(self, config: object) -> bool:
        return config in self._configs


class Space:
    """Every combination of the values of a kernel's parameters, to be searched.

        Space({"BLOCK_M": (32, 64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8)},
              where=lambda c: c["BLOCK_M"] * c["BLOCK_N"] <= 8192)

    Args:
        parameters: the values of each parameter by name: constexprs of the kernel, and num_warps, num_stages,
            num_ctas and maxnreg. Parameters left out have the defaults of `Config`.
        where: a function of a combination, a dictionary of values by name, that returns True if it is legal.
            Default: all are.

    Raises InvalidValueError if a parameter has no values, a value twice, or one that no config can have, if
    there are more than a million combinations, if none meets the condition, or if the condition looks up a
    name that is not a parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, Iterable[Any]],
        where: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        if not isinstance(parameters, Mapping) or not parameters:
            raise InvalidValueError(f"a space of {parameters!r}: expected values of parameters by name")
        self.parameters = {name: _checked(name, values) for name, values in parameters.items()}
        self.where = where
        count = math.prod(map(len, self.parameters.values()))
        if count > MAX_COMBINATIONS:
            expected = f"expected {MAX_COMBINATIONS:,} at most"
            raise InvalidValueError(f"a space of {count:,} combinations: {expected}")
        if not any(map(self._meets, self._combinations())):
            raise InvalidValueError(f"none of {count:,} combinations meets the condition `where`")

    def __repr__(self) -> str:
        return f"Space({self.parameters!r}, where={self.where!r})"

    def configs(self) -> Iterator[Config]:
        """Yield every config in the order of the values; the last parameter varies fastest."""
        return map(from_parameters, filter(self._meets, self._combinations()))

    def opening(self, count: int) -> list[Config]:
        """Return the middle of the space, then points of a Sobol sequence, which are spread over it."""
        configs: dict[Config, None] = {}
        points = torch.quasirandom.SobolEngine(len(self.parameters)).draw(_DRAWS * count + 1)[1:].tolist()
        for point in points:
            shares = zip(self.parameters.items(), point, strict=True)
            values = {name: choices[int(share * len(choices))] for (name, choices), share in shares}
            if self._meets(values):
                configs[from_parameters(values)] = None
            if len(configs) == count:
                return list(configs)
        # Few combinations meet the condition.
        return list(configs | dict.fromkeys(itertools.islice(self.configs(), count)))[:count]

    def neighbours(self, config: Config) -> list[Config]:
        """Return the configs with one parameter changed: to a next number, or to any other string or flag."""
        values = parameters(config)
        steps = [
            values | {name: value}
            for name, choices in self.parameters.items()
            if name in values
            for value in _next_to(choices, values[name])
        ]
        return [from_parameters(step) for step in steps if self._meets(step)]

    def __contains__(self, config: object) -> bool:
        if not isinstance(config, Config):
            return False
        values = {name: value for name, value in parameters(config).items() if name in self.parameters}
        is_whole = len(values) == len(self.parameters) and from_parameters(values) == config
        choices = {n: [(type(v), v) for v in self.parameters[n]] for n in values}
        return is_whole and all((type(v), v) in choices[n] for n, v in values.items()) and self._meets(values)

    def _combinations(self) -> Iterator[dict[str, Any]]:
        for combination in itertools.product(*self.parameters.values()):
            yield dict(zip(self.parameters, combination, strict=True))

    def _meets(self, values: Mapping[str, Any]) -> bool:
        if self.where is None:
            return True
        try:
            return bool(self.where({name: values[name] for name in self.parameters}))
        except KeyError as error:
            name = error.args[0] if error.args else None
            if not isinstance(name, str) or name in self.parameters:
                raise  # from some other dictionary
            hint = did_you_mean(name, self.parameters)
            expected = f"expected parameters of the space, which are {', '.join(self.parameters)}"
            raise InvalidValueError(f"where names {name!r}{hint}: {expected}") from error


def _checked(name: Any, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidValueError(f"values of {name!r}: {values!r} is not a list of values")
    checked = tuple(values)
    if not checked:
        raise InvalidValueError(f"parameter {name!r} has no values: expected one or more")
    for value in checked:
        if name == "family":
            raise InvalidValueError("parameter 'family' is a name of tritile's own: expected another")
        from_parameters({name: value})  # raises for a name or a value that no config takes
    if len(set(checked)) < len(checked):
        raise InvalidValueError(f"parameter {name!r} has a value twice: {checked!r}")
    return checked


def fastest_first(tried: Tried) -> list[Config]:
    """Return the configs that worked, fastest first; ties are broken by `Config.key`."""
    working = [(us, config.key, config) for config, us in tried.items() if us < math.inf]
    return [config for _, _, config in sorted(working, key=lambda item: item[:2])]


def _untried(configs: Iterable[Config], tried: Tried, count: int) -> list[Config]:
    fresh: dict[Config, None] = {}
    for config in configs:
        if len(fresh) == count:
            break
        if config not in tried:
            fresh[config] = None
    return list(fresh)


def exhaustive(space: SearchSpace | Listed, tried: Tried, count: int) -> list[Config]:
    """Propose every config, the likeliest first."""
    return _untried(space.configs(), tried, count)


def leaders(tried: Tried) -> list[Config]:
    """Return the fastest few, and the fastest of each other family that is not far behind."""
    ranked = fastest_first(tried)
    leading = ranked[:LEADERS]
    for config in ranked[LEADERS:]:
        near = tried[config] < NEAR * tried[ranked[0]]
        if near and all(config.family != leader.family for leader in leading):
            leading.append(config)
    return leading


def crosses(ranked: Sequence[Config]) -> Iterator[Config]:
    """Yield configs with one parameter replaced by another config's, for the first configs first."""
    for one, other in itertools.permutations(ranked, 2):
        mine, theirs = parameters(one), parameters(other)
        if mine.keys() == theirs.keys():
            for name in (name for name in mine if mine[name] != theirs[name]):
                yield from_parameters(mine | {name: theirs[name]})


def screening(space: SearchSpace, tried: Tried, count: int) -> list[Config]:
    """Propose the space's opening, then the likeliest neighbours of the leaders: the default strategy.

    Leaders have a limited number of neighbours, so the search ends once the leaders stay the same. If a round
    has room, crosses of the fastest configs fill it: the round waits for compiles anyway, and a parameter
    that is good in one config is often good in another. If the whole opening fails, the rest of the space is
    tried.
    """
    fresh, heads = _untried(space.opening(OPENING), tried, count), leaders(tried)
    if fresh or not heads:
        return fresh or exhaustive(space, tried, count)
    near = [space.neighbours(config)[:NEIGHBOURS] for config in heads]
    steps = [config for turn in itertools.zip_longest(*near) for config in turn if config is not None]
    if not _untried(steps, tried, 1):
        return []
    mixed = (config for config in crosses(fastest_first(tried)[:CROSSED]) if config in space)
    return _untried(itertools.chain(steps, mixed), tried, count)


def expected_gain(tried: Tried, more: int) -> float:
    """Return the relative gain to expect from `more` further configs; infinite if fewer than two worked.

    Of n + more times in random order, the least is among the last `more` with probability more / (n + more),
    because every position is equally likely (records of independent draws; Renyi, 1962). The gain of such a
    record is estimated by the mean relative gap between the fastest few. The order of a search is not random,
    so `ENOUGH`, the gain too small to continue for, was found by replaying recorded searches.
    """
    times = sorted(us for us in tried.values() if us < math.inf)
    if len(times) < 2:
        return math.inf
    few = times[:_FEW]
    gap = (few[-1] - few[0]) / (len(few) - 1) / few[0]
    return more / (len(times) + more) * gap
