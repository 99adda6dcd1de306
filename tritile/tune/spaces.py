"""Spaces: the configs of a search, which of them to try first, and which are next to each other."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from tritile.core.config import Config
from tritile.errors import InvalidValueError

Tried = Mapping[Config, float]  # microseconds of each config measured so far; infinity if it failed

MAX_COMBINATIONS: Final = 1_000_000
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_DRAWS: Final = 50  # points of a space that an opening looks at for each config it wants


class SearchSpace(Protocol):
    """The legal configs that a search chooses among; the likeliest to be fast come first.

    `opening` returns the configs to try first, likely and varied, `neighbours` those one step away.
    """

    def configs(self) -> Iterable[Config]: ...
    def opening(self, count: int) -> list[Config]: ...
    def neighbours(self, config: Config) -> list[Config]: ...
    def __contains__(self, config: object) -> bool: ...


def parameters(config: Config) -> dict[str, Any]:
    """Return all that a config sets, by name: its kernel's parameters, Triton's options, its family."""
    return dict(config.kwargs) | {name: getattr(config, name) for name in (*_OPTIONS, "family")}


def from_parameters(values: Mapping[str, Any]) -> Config:
    """Return the config that sets these values; others have the defaults of `Config`.

    Raises InvalidValueError where a config does not take a value.
    """
    options = {name: value for name, value in values.items() if name in (*_OPTIONS, "family")}
    return Config(tuple(sorted((n, v) for n, v in values.items() if n not in options)), **options)


def _ordered(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _next_to(values: Sequence[Any], value: Any) -> list[Any]:
    """Return the next smaller and larger number; all other values where they have no order."""
    if not _ordered((*values, value)):
        return [other for other in values if other != value]
    return sorted(v for v in values if v < value)[-1:] + sorted(v for v in values if v > value)[:1]


class Listed:
    """Hold a list of configs, of which a search tries every one, in this order. Equal configs count once.

    Raises InvalidValueError for an empty list.
    """

    def __init__(self, configs: Iterable[Config]) -> None:
        self._configs = dict.fromkeys(configs)
        if not self._configs:
            raise InvalidValueError("no configs are listed: wanted one or more")

    def configs(self) -> list[Config]:
        return list(self._configs)

    def __contains__(self, config: object) -> bool:
        return config in self._configs


class Space:
    """Search every combination of the values of a kernel's parameters.

        Space({"BLOCK_M": (32, 64, 128), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8)},
              where=lambda c: c["BLOCK_M"] * c["BLOCK_N"] <= 8192)

    Args:
        parameters: the values of each parameter by name: constexprs of the kernel, and num_warps, num_stages,
            num_ctas and maxnreg. Parameters left out have the defaults of `Config`.
        where: tells whether a combination, a dictionary of values by name, is legal. Default: all are.

    Raises InvalidValueError where a parameter has no values, has a value twice or one that no config takes,
    where there are more than a million combinations, or where none meets the condition.
    """

    def __init__(
        self,
        parameters: Mapping[str, Iterable[Any]],
        where: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        if not isinstance(parameters, Mapping) or not parameters:
            raise InvalidValueError(f"a space of {parameters!r}: wanted values of parameters by name")
        self.parameters = {name: _checked(name, values) for name, values in parameters.items()}
        self.where = where
        count = math.prod(map(len, self.parameters.values()))
        if count > MAX_COMBINATIONS:
            raise InvalidValueError(f"a space of {count:,} combinations: wanted {MAX_COMBINATIONS:,} at most")
        if not any(map(self._meets, self._combinations())):
            raise InvalidValueError(f"none of {count:,} combinations meets the condition `where`")

    def __repr__(self) -> str:
        return f"Space({self.parameters!r}, where={self.where!r})"

    def configs(self) -> Iterator[Config]:
        return map(from_parameters, filter(self._meets, self._combinations()))

    def opening(self, count: int) -> list[Config]:
        """Return the middle of the space, then points of a Sobol sequence, which spread over all of it."""
        found: dict[Config, None] = {}
        points = torch.quasirandom.SobolEngine(len(self.parameters)).draw(_DRAWS * count + 1)[1:].tolist()
        for point in points:
            shares = zip(self.parameters.items(), point, strict=True)
            values = {name: own[int(share * len(own))] for (name, own), share in shares}
            if self._meets(values):
                found[from_parameters(values)] = None
            if len(found) == count:
                return list(found)
        found |= dict.fromkeys(itertools.islice(self.configs(), count))  # few combinations meet the condition
        return list(found)[:count]

    def neighbours(self, config: Config) -> list[Config]:
        """Return the configs with one parameter at another value: a next number, any other word or flag."""
        values = parameters(config)
        steps = [
            values | {name: value}
            for name, own in self.parameters.items()
            if name in values
            for value in _next_to(own, values[name])
        ]
        return [from_parameters(step) for step in steps if self._meets(step)]

    def __contains__(self, config: object) -> bool:
        if not isinstance(config, Config):
            return False
        values = {name: value for name, value in parameters(config).items() if name in self.parameters}
        whole = len(values) == len(self.parameters) and from_parameters(values) == config
        known = {n: [(type(own), own) for own in self.parameters[n]] for n in values}
        return whole and all((type(v), v) in known[n] for n, v in values.items()) and self._meets(values)

    def _combinations(self) -> Iterator[dict[str, Any]]:
        for combination in itertools.product(*self.parameters.values()):
            yield dict(zip(self.parameters, combination, strict=True))

    def _meets(self, values: Mapping[str, Any]) -> bool:
        return self.where is None or bool(self.where({name: values[name] for name in self.parameters}))


def _checked(name: Any, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidValueError(f"values of {name!r}: {values!r} is not a list of values")
    own = tuple(values)
    if not own:
        raise InvalidValueError(f"parameter {name!r} has no values: wanted one or more")
    for value in own:
        if name == "family":
            raise InvalidValueError("parameter 'family' is a name of tritile's own: wanted another")
        from_parameters({name: value})  # raises for a name or a value that no config takes
    if len(set(own)) < len(own):
        raise InvalidValueError(f"parameter {name!r} has a value twice: {own!r}")
    return own
