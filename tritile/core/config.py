"""Describe one way to run a kernel as a frozen value: `Config`."""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import triton

from tritile.errors import InvalidValueError

ATEN: Final = "aten"  # the family of torch's own kernels, which have no parameters of ours
_FORM: Final = (
    "a config is {kwargs: {NAME: int, bool, float or str}, num_warps, num_stages, num_ctas, maxnreg}"
)
_MAX_TEXT: Final = 64
_MAX_INT: Final = 2**31
_MAX_KWARGS: Final = 64


def _check_kwarg(name: Any, value: Any) -> None:
    if not (isinstance(name, str) and name.isidentifier() and len(name) <= _MAX_TEXT):
        raise InvalidValueError(f"config parameter {name!r} is not a name; {_FORM}")
    if isinstance(value, str):
        good = len(value) <= _MAX_TEXT and value.isprintable()
    elif isinstance(value, int):
        good = abs(value) < _MAX_INT
    else:
        good = isinstance(value, float) and math.isfinite(value)
    if not good:
        raise InvalidValueError(f"config parameter {name} = {value!r} is out of range; {_FORM}")


def _check_count(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidValueError(f"{name} = {value!r}: expected a whole number from {low} to {high}")


@dataclass(frozen=True)
class Config:
    """Values for a kernel's tunable parameters, and how Triton compiles it.

    Configs that launch the same kernel compare equal. Values read from a store or a table are checked here
    like any other input.

    Attributes:
        kwargs: (name, value) pairs sorted by name.
        num_warps: warps per program, as in `triton.Config`.
        num_stages: stages of Triton's software pipeline.
        num_ctas: blocks per cluster.
        maxnreg: most registers per thread; None leaves that to the compiler.
        family: which kernel, if there are several for one kind of problem, such as "tile"; "" if there is
            only one, as for a kernel of your own.

    Raises:
        InvalidValueError: a field is out of its range.

    Examples:
        >>> config = tritile.Config.of(BLOCK_M=64, BLOCK_N=128, num_warps=8, family="tile")
        >>> config["BLOCK_M"]
        64
        >>> print(config)
        tile BLOCK_M=64 BLOCK_N=128 num_warps=8 num_stages=3
    """

    kwargs: tuple[tuple[str, int | bool | float | str], ...] = field(default=())
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    family: str = ""
    _values: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.kwargs, tuple) or len(self.kwargs) > _MAX_KWARGS:
            raise InvalidValueError(f"config parameters {self.kwargs!r}; {_FORM}")
        for name, value in self.kwargs:
            _check_kwarg(name, value)
        if [name for name, _ in self.kwargs] != sorted({name for name, _ in self.kwargs}):
            raise InvalidValueError("config parameters must be sorted by name, each once")
        _check_count("num_warps", self.num_warps, 1, 64)
        if self.num_warps & (self.num_warps - 1):
            raise InvalidValueError(f"num_warps = {self.num_warps}: expected a power of two")
        _check_count("num_stages", self.num_stages, 0, 64)
        _check_count("num_ctas", self.num_ctas, 1, 16)
        if self.maxnreg is not None:
            _check_count("maxnreg", self.maxnreg, 8, 512)
        if not isinstance(self.family, str) or not (self.family == "" or self.family.isidentifier()):
            raise InvalidValueError(f"family = {self.family!r}: expected a kernel family's name")
        object.__setattr__(self, "_values", dict(self.kwargs))

    @classmethod
    def of(
        cls, num_warps: int = 4, num_stages: int = 3, family: str = "", **kwargs: int | bool | float | str
    ) -> "Config":
        """Return a config with these parameters: `Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4)`."""
        return cls(tuple(sorted(kwargs.items())), num_warps, num_stages, family=family)

    def derived(self, kwargs: Iterable[tuple[str, Any]] | None = None, **changes: Any) -> "Config":
        """Return this config with other kwargs, sorted by name, and other fields. Nothing is checked.

        It is for values that follow from those of this config, which were checked.
        """
        values = self.kwargs if kwargs is None else tuple(kwargs)
        own = {name: getattr(self, name) for name in _FIELDS}
        made = object.__new__(Config)
        vars(made).update(own | changes, kwargs=values, _values=dict(values))
        return made

    def __eq__(self, other: object) -> bool:
        """True for a config that launches the same kernel: A=1, A=True and A=1.0 are three configs."""
        if not isinstance(other, Config):
            return NotImplemented
        return self is other or self._launched == other._launched

    @property
    def _launched(self) -> tuple[Any, ...]:
        types = tuple(type(value) for _, value in self.kwargs)
        return types, *(getattr(self, name) for name in _FIELDS)

    def __getitem__(self, name: str) -> Any:
        """Return the value of a parameter. Raises KeyError if there is none of that name."""
        return self._values[name]

    def __repr__(self) -> str:
        words = [f"family={self.family!r}"] if self.family else []
        words += [f"{name}={value!r}" for name, value in self.kwargs]
        words += [f"num_warps={self.num_warps}", f"num_stages={self.num_stages}"]
        derived = f".derived({', '.join(self._uncommon)})" if self._uncommon else ""
        return f"Config.of({', '.join(words)}){derived}"

    def __str__(self) -> str:
        words = [self.family] if self.family else []
        words += [f"{name}={value}" for name, value in self.kwargs]
        words += [f"num_warps={self.num_warps}", f"num_stages={self.num_stages}", *self._uncommon]
        return " ".join(words)

    @property
    def _uncommon(self) -> list[str]:
        words = [f"num_ctas={self.num_ctas}"] if self.num_ctas != 1 else []
        return words if self.maxnreg is None else [*words, f"maxnreg={self.maxnreg}"]

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, which `from_dict` reads back."""
        return {name: getattr(self, name) for name in _FIELDS} | {"kwargs": dict(self.kwargs)}

    @classmethod
    def from_dict(cls, data: Any) -> "Config":
        """Return the config that `to_dict` wrote. Raises InvalidValueError for anything else."""
        kwargs = data.get("kwargs") if isinstance(data, Mapping) and set(data) <= set(_FIELDS) else None
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise InvalidValueError(f"{str(data)[:200]!r} is no config: {_FORM}")
        return cls(**{**data, "kwargs": tuple(sorted(kwargs.items()))})

    @functools.cached_property
    def key(self) -> str:
        """Return the config as one line of JSON, the same for equal configs."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    def to_triton(self) -> triton.Config:
        """Return this config as a `triton.Config`."""
        return triton.Config(
            dict(self.kwargs), self.num_warps, self.num_stages, self.num_ctas, maxnreg=self.maxnreg
        )

    @classmethod
    def from_triton(cls, config: triton.Config) -> "Config":
        """Return a `triton.Config` as a `Config`. Raises InvalidValueError if a value is not plain data."""
        kwargs = tuple(sorted(config.kwargs.items()))
        return cls(kwargs, config.num_warps, config.num_stages, config.num_ctas, config.maxnreg)


_FIELDS: Final = tuple(each.name for each in fields(Config) if each.init)
