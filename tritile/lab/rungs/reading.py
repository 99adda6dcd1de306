"""What was read off each rung of a climb, as a frozen value that JSON holds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from tritile.errors import InvalidValueError


@dataclass(frozen=True)
class Reading:
    """What is known of a rung on n x n matrices; None is what was not measured, or could not be.

    `config` is what it ran with, `asked` the bytes that its kernel asks of global memory by reckoning.
    `read` and `written` are the same, counted in the interpreter, `touched` the bytes of the sectors of 32
    bytes that they lie in. `us` is the median time of a launch in microseconds, `spread` that of its
    samples, `error` the relative error of its answer. `registers` and `spills` (bytes) are of a thread,
    `shared` (bytes of shared memory) of a program. `note` says why there is not more; `failed`: it should
    have run, and did not, or answered wrongly.
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
        """Bytes read and written, as counted."""
        return None if self.read is None or self.written is None else self.read + self.written

    def to_dict(self) -> dict[str, Any]:
        """A dictionary that JSON holds and `from_dict` reads back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Reading":
        """The reading that `to_dict` wrote. Raises InvalidValueError for anything else."""
        wanted = ", ".join(_KINDS)
        if not isinstance(data, Mapping) or data.keys() != _KINDS.keys():
            raise InvalidValueError(f"{str(data)[:200]!r} is not of a rung: wanted {wanted}")
        for name, kind in _KINDS.items():
            if not _good(data[name], kind):
                raise InvalidValueError(f"a rung's {name} is {_shown(data[name])}: wanted {kind}")
            low, high = _BOUNDS.get(name, _ANY)
            if type(data[name]) in (int, float) and not low <= data[name] <= high:
                raise InvalidValueError(
                    f"a rung's {name} is {_shown(data[name])}: wanted {low:g} to {high:g}"
                )
        return cls(**data)


_KINDS: Final = {field.name: str(getattr(field.type, "__name__", field.type)) for field in fields(Reading)}


_ANY: Final = (0, 1e17)
_BOUNDS: Final = {"us": (1e-3, 1e13)}  # a nanosecond, four months


def _shown(value: Any) -> str:
    return repr(str(value)[:80])


def _good(value: Any, kind: str) -> bool:
    """Whether a value is of a kind as the fields above name them."""
    if value is None:
        return kind.endswith("None")
    kind = kind.partition(" ")[0]
    if kind in ("str", "bool"):
        return type(value).__name__ == kind
    return type(value) is int or (kind == "float" and type(value) is float)
