"""Read values of dataclasses from JSON; pydantic, of the extra `cli`, checks them."""

import json
from typing import Any, Final, TypeVar

from tritile.errors import InvalidValueError

T = TypeVar("T")
_ADAPTERS: Final[dict[Any, Any]] = {}  # by type


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def parsed(kind: type[T], data: bytes | str, what: str) -> T:
    """Return the value of a type that JSON text holds.

    Raises InvalidValueError, with `what` was read and the field that is wrong, for any other text.
    """
    from pydantic import TypeAdapter, ValidationError

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    try:
        json.loads(data, parse_constant=_refuse)  # JSON has no NaN, but pydantic reads it
        found: T = _ADAPTERS[kind].validate_json(data, strict=True)
    except ValueError as error:
        if not isinstance(error, ValidationError):
            raise InvalidValueError(f"{what}: {error}"[:300]) from error
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidValueError(f"{what}: {place}{': ' * bool(place)}{first['msg']}"[:300]) from error
    return found
