"""Read, check and write files of stores and tables, which may be damaged, forged or of another version."""

import contextlib
import functools
import json
import os
import platform
import warnings
from collections.abc import Callable, Hashable, Iterable
from importlib.resources.abc import Traversable
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from tritile.core.config import Config
from tritile.core.problem import Problem, problem_from_dict, problem_key
from tritile.errors import FileError, InvalidValueError, StoreWarning, callers_level

MAX_TEXT: Final = 1 << 16
MAX_US: Final = 1e12
_MAX_CACHED: Final = 4096  # characters of a key
T = TypeVar("T")


def state_of(file: Path | Traversable) -> tuple[int, ...]:
    """Return values that change when the file is edited or replaced; () without a file."""
    try:
        facts = (file if isinstance(file, Path) else Path(str(file))).stat()
    except (OSError, ValueError):
        return ()
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def opened(read: Callable[[Any], T], file: Path | Traversable, unusable: str | None = None) -> T | None:
    """Return `read(file)`, which is called once for each state of the file.

    If it raises InvalidValueError and `unusable` is not None, issue one StoreWarning that begins with
    `unusable`, and return None.
    """
    found: T | None = _opened(read, cast(Hashable, file), unusable, state_of(file))
    return found


@functools.lru_cache(32)
def _opened(read: Callable[[Any], Any], file: Any, unusable: str | None, state: tuple[int, ...]) -> Any:
    try:
        return read(file)
    except InvalidValueError as error:
        if unusable is None:
            raise
        warnings.warn(f"{unusable}{error}", StoreWarning, stacklevel=callers_level())
        return None


def read_json(file: Path | Traversable, most: int) -> Any:
    """Return the contents of a JSON file of at most `most` bytes. Raises FileError for any other file."""
    try:
        if not file.is_file():  # a pipe or a device may have no end
            raise FileError(f"{file} does not exist, or is not a regular file")
        with file.open("rb") as opened:
            raw = opened.read(most + 1)
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error}") from error
    if len(raw) > most:
        raise FileError(f"{file} holds more than {most >> 20} MiB")
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file} is not JSON: {error}") from error


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file atomically: readers see the old content or the new. Raises OSError."""
    partial = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _read(kind: str, source: Any, from_dict: Callable[[Any], T], key_of: Callable[[T], str]) -> T:
    try:
        if not isinstance(source, str):
            return from_dict(source)
        if len(source) > MAX_TEXT:
            raise InvalidValueError(f"text of more than {MAX_TEXT} characters")
        made = from_dict(json.loads(source))
        if key_of(made) != source:
            raise InvalidValueError("it is not in the canonical spelling of a key")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError(f"{str(source)[:80]!r} is not a {kind}: {str(error)[:200]}") from error
    return made


def problem_from(source: Any) -> Problem:
    """Return the problem of a dictionary or of a canonical key. Raises InvalidValueError otherwise."""
    if isinstance(source, str) and len(source) <= _MAX_CACHED:
        return _problem_of(source)
    return _read("problem", source, problem_from_dict, problem_key)


def config_from(source: Any) -> Config:
    """Return the config of a dictionary or of a canonical key. Raises InvalidValueError otherwise."""
    if isinstance(source, str) and len(source) <= _MAX_CACHED:
        return _config_of(source)
    return _read("config", source, Config.from_dict, attrgetter("key"))


@functools.lru_cache(1024)  # many trials are of few problems and configs
def _problem_of(text: str) -> Problem:
    return _read("problem", text, problem_from_dict, problem_key)


@functools.lru_cache(1024)
def _config_of(text: str) -> Config:
    return _read("config", text, Config.from_dict, attrgetter("key"))


def number_from(value: Any, low: float, high: float, whole: bool = False) -> Any:
    """Return the value if it is a number from low to high, or None. Raises InvalidValueError otherwise."""
    kind = int if whole else (int, float)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high
    ):
        raise InvalidValueError(f"{str(value)[:80]!r}: expected a number from {low} to {high}")
    return value


def numbers_from(what: str, values: Any, count: int, low: float, high: float) -> tuple[float, ...]:
    """Return a list of `count` numbers from low to high. Raises InvalidValueError otherwise."""
    if not isinstance(values, list) or len(values) != count or None in values:
        raise InvalidValueError(f"{str(values)[:80]!r}: expected {count} {what}")
    return tuple(float(number_from(value, low, high)) for value in values)


def rows_from(what: str, rows: Any, count: int, length: int, most: float) -> tuple[tuple[float, ...], ...]:
    """Return `count` lists of `length` numbers. Raises InvalidValueError otherwise."""
    if not isinstance(rows, list) or len(rows) != count:
        raise InvalidValueError(f"{what}: expected {count} rows of numbers")
    return tuple(numbers_from(f"numbers of {what}", row, length, -most, most) for row in rows)


def sifted(items: Iterable[Any], make: Callable[[Any], T]) -> tuple[list[T], list[str]]:
    """Return `make(item)` of each item, and the reasons for which it refused the others."""
    good, reasons = list[T](), list[str]()
    for item in items:
        try:
            good.append(make(item))
        except (InvalidValueError, RecursionError) as error:  # deep nesting may be too deep to print
            reasons.append(str(error)[:200])
    return good, reasons
