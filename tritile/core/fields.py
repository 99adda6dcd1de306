"""What problems of all kinds have in common, and checks of their fields."""

import math
from typing import Any, Final

from tritile.errors import InvalidValueError

ALIGNMENTS: Final = (1, 2, 4, 8, 16)
_MAX_EXTENT: Final = 2**48


def alignment(*places: int) -> int:
    """Return the largest power of two, up to 16, that divides all of these bytes."""
    return math.gcd(16, *places)


def check(condition: bool, problem: Any, expected: str) -> None:
    if not condition:
        raise InvalidValueError(f"{problem!r}: expected {expected}")


def is_extent(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_EXTENT


def check_sizes(problem: Any, *sizes: Any) -> None:
    check(all(map(is_extent, sizes)), problem, "sizes of 1 and more")


def check_fields(problem: Any, **allowed: tuple[object, ...]) -> None:
    """Raise InvalidValueError unless each field named is one of those allowed.

    It has to be of the same type too: 16.0 and True are not alignments.
    """
    for name, values in allowed.items():
        value = getattr(problem, name)
        if not any(value == each and type(value) is type(each) for each in values):
            article = "an" if name[0] in "aeiou" else "a"
            check(False, problem, f"{article} {name} of {', '.join(map(str, values))}")


class Base:
    """What holds of a problem unless its class says otherwise."""

    @property
    def needs_torch(self) -> bool:
        """True if no kernel of tritile's computes it: torch's does, or none."""
        return False

    @property
    def core(self) -> Any:
        """The problem that kernels make: another one if operands are transformed first."""
        return self
