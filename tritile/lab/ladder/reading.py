"""A reading of one step of a ladder, as a frozen value that JSON holds."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from tritile.errors import InvalidValueError


@dataclass(frozen=True)
class Reading:
    """Hold what is known of a step on n x n matrices; a field is None where it was not measured.

    `config` is what the step ran with. `asked` is how many bytes its kernel asks of global memory, by a
    formula. `read` and `written` are bytes counted in the interpreter, `touched` the bytes of the 32-byte
    sectors they lie in. `us` is the median time of a launch in microseconds, `spread` that of its samples,
    `error` the relative error of its answer. `registers` and `spills` (bytes) are per thread, `shared`
    (bytes) per program. `note` gives the reason for missing fields. `failed` marks a step that should have
    run and did not, or that answered wrongly.
    """

    op: str
    name: str
    new: str
    dtype: str
    yardstick: bool
    config: str | None = None
    asked: int | None = None
    read: int | None = None
    written: int | None = None
    touched: int | None = None
    us: float | None = None
    spread: float | None = None
    error: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    note: str | None = None
    failed: bool = False

    @property
    def bytes_counted(self) -> int | None:
        """Return the bytes read and written, as counted."""
        return None if self.read is None or self.written is None else self.read + self.written

    @classmethod
    def from_dict(cls, data: Any) -> "Reading":
        """Return the reading whose `asdict` this is. Raises InvalidValueError for anything else."""
        wanted = ", ".join(_KINDS)
        if not isinstance(data, Mapping) or data.keys() != _KINDS.keys():
            raise InvalidValueError(f"{str(data)[:200]!r} is no step of a ladder: wanted {wanted}")
        for name, kind in _KINDS.items():
            if not _good(data[name], kind):
                raise InvalidValueError(f"a step's {name} is {_shown(data[name])}: wanted {kind}")
            low, high = _BOUNDS.get(name, _ANY)
            if type(data[name]) in (int, float) and not low <= data[name] <= high:
                raise InvalidValueError(
                    f"a step's {name} is {_shown(data[name])}: wanted {low:g} to {high:g}"
                )
        return cls(**data)


_KINDS: Final = {field.name: str(getattr(field.type, "__name__", field.type)) for field in fields(Reading)}
_ANY: Final = (0, 1e17)
_BOUNDS: Final = {"us": (1e-3, 1e13)}  # a nanosecond, four months


def _shown(value: Any) -> str:
    return repr(str(value)[:80])


def _good(value: Any, kind: str) -> bool:
    """Tell whether a value is of a kind, named as the fields above annotate it."""
    if value is None:
        return kind.endswith("None")
    kind = kind.partition(" ")[0]
    if kind in ("str", "bool"):
        return type(value).__name__ == kind
    return type(value) is int or (kind == "float" and type(value) is float)
