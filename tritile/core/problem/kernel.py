"""Describe calls of kernels that `tritile.autotune` decorates."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from tritile.core.problem.checks import check


def _pairs(value: Any) -> bool:
    whole = isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)
    return whole and all(isinstance(name, str) for name, _ in value)


def _plain(value: Any) -> bool:
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, int | float | bool | str | None) and finite


@dataclass(frozen=True)
class KernelProblem:
    """Describe a call of a kernel that `tritile.autotune` decorates: its name, key values and dtypes."""

    op: ClassVar[str] = "kernel"
    kernel: str
    key: tuple[tuple[str, int | float | bool | str | None], ...]
    dtypes: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        check(isinstance(self.kernel, str), self, "the kernel's name")
        check(_pairs(self.key) and all(_plain(v) for _, v in self.key), self, "plain, finite key values")
        check(_pairs(self.dtypes) and all(isinstance(v, str) for _, v in self.dtypes), self, "dtypes by name")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the integers of the key: by them two problems of one kernel are near or far."""
        return tuple(v for _, v in self.key if isinstance(v, int) and not isinstance(v, bool) and v > 0)

    @property
    def label(self) -> str:
        return f"{self.kernel} " + " ".join(f"{name}={value}" for name, value in self.key)
