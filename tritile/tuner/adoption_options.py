"""Read the options of `tritile.adopt`: its arguments, environment variables, and a TOML file."""

import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tritile.core.settings import EFFORTS, MODES
from tritile.errors import InvalidValueError, brief, did_you_mean
from tritile.tuner.adoption import Adoption

_NAMES: Final = ("kernels", "exclude", "mode", "effort", "table", "bucket", "reference")
_ALL: Final = ("1", "true", "on", "yes")  # values of TRITILE_ADOPT that name every kernel


def adoption_of(
    kernels: Any = "*", mode: Any = None, effort: Any = None, bucket: Any = None, table: Any = None,
    reference: Any = None, exclude: Any = (), is_default: bool = False,
) -> Adoption:  # fmt: skip
    """Return the adoption for arguments of `adopt`. Raises InvalidValueError like `adopt`."""
    for name, value, words in (("mode", mode, MODES), ("effort", effort, EFFORTS)):
        if value is not None and value not in words:
            hint = did_you_mean(value, words)
            raise InvalidValueError(f"{name} is {value!r}{hint}: expected one of {', '.join(words)}, or None")
    bucket, reference = bucket or {}, reference or {}
    is_bucket = isinstance(bucket, Mapping) and all(
        isinstance(own, Mapping) and all(map(callable, own.values())) for own in bucket.values()
    )
    if not is_bucket:
        example = "functions by pattern and argument, as {'*conv*': {'n': triton.next_power_of_2}}"
        raise InvalidValueError(f"bucket is {bucket!r}: expected {example}")
    if not isinstance(reference, Mapping) or not all(map(callable, reference.values())):
        example = "functions by pattern, as {'*softmax*': function}"
        raise InvalidValueError(f"reference is {reference!r}: expected {example}")
    if table is not None and not isinstance(table, str | Path):
        raise InvalidValueError(f"table is {table!r}: expected the path of a file")
    for name, patterns in (("bucket", bucket), ("reference", reference)):
        _patterns(name, [*patterns])
    named = _patterns("kernels", kernels)
    return Adoption(named, _patterns("exclude", exclude), bucket, reference, mode, effort, table, is_default)


def _patterns(name: str, patterns: Any) -> tuple[str, ...]:
    listed = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(listed, list | tuple) or not all(isinstance(each, str) and each for each in listed):
        raise InvalidValueError(f"{name} is {patterns!r}: expected names of kernels, or patterns of names")
    return tuple(listed)


def of_environment(environ: Mapping[str, str]) -> Adoption:
    """Return the adoption that `TRITILE_ADOPT` and the variables that begin with it request.

    `TRITILE_ADOPT` is "1" for every kernel, or a comma-separated list of patterns. `TRITILE_ADOPT_BUCKETS` is
    a semicolon-separated list of PATTERN:ARGUMENT=FUNCTION, where a function is module:name or a name in
    Triton. `TRITILE_ADOPT_FILE` is a TOML file with the arguments of `adopt`; the variables override it.

    Raises InvalidValueError for anything else; what is wrong in a file with the file's path.
    """
    named: dict[str, Any] = {}
    if path := environ.get("TRITILE_ADOPT_FILE"):
        try:
            named = _of_file(Path(path))
            adoption_of(**named)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InvalidValueError(f"cannot take options from {path}: {why}") from error
    kernels = environ.get("TRITILE_ADOPT") or "1"
    if kernels.lower() not in _ALL:
        named["kernels"] = [each.strip() for each in kernels.split(",") if each.strip()]
    for name, variable, words in (
        ("mode", "TRITILE_ADOPT_MODE", MODES), ("effort", "TRITILE_ADOPT_EFFORT", EFFORTS),
        ("table", "TRITILE_ADOPT_TABLE", ()),
    ):  # fmt: skip
        if value := environ.get(variable):
            if words and value not in words:
                hint = did_you_mean(value, words)
                raise InvalidValueError(f"{variable} is {value!r}{hint}: expected one of {', '.join(words)}")
            named[name] = value
    if buckets := environ.get("TRITILE_ADOPT_BUCKETS"):
        named["bucket"] = named.get("bucket", {}) | _buckets(buckets)
    return adoption_of(**named, is_default=True)


def _of_file(path: Path) -> dict[str, Any]:
    """Return the arguments of `adopt` in a TOML file, which names functions.

    The path of a table is relative to the file's folder. Raises OSError and ValueError.
    """
    named = tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := [name for name in named if name not in _NAMES]:
        what = f"unknown {', '.join(map(repr, unknown))}{did_you_mean(unknown[0], _NAMES)}"
        raise InvalidValueError(f"{what}: expected {', '.join(_NAMES)}")
    for name, own in (("bucket", named.get("bucket", {})), ("reference", named.get("reference", {}))):
        if not isinstance(own, dict) or (
            name == "bucket" and not all(isinstance(each, dict) for each in own.values())
        ):
            form = '[bucket."PATTERN"]' if name == "bucket" else "[reference]"
            raise InvalidValueError(f"{name} is {own!r}: expected a table, {form}")
    for pattern, functions in named.get("bucket", {}).items():
        named["bucket"][pattern] = {argument: function_named(name) for argument, name in functions.items()}
    for pattern, name in named.get("reference", {}).items():
        named["reference"][pattern] = function_named(name)
    if isinstance(table := named.get("table"), str):
        named["table"] = str(path.absolute().parent / table)
    return named


def _buckets(text: str) -> dict[str, dict[str, Callable[[Any], Any]]]:
    """Return the buckets in "PATTERN:ARGUMENT=FUNCTION;...". Raises InvalidValueError for other text."""
    buckets: dict[str, dict[str, Callable[[Any], Any]]] = {}
    for each in filter(None, (part.strip() for part in text.split(";"))):
        where, equals, function = each.partition("=")
        pattern, _, argument = where.rpartition(":")
        if not (pattern and argument and equals and function):
            raise InvalidValueError(f"bucket {each!r}: expected PATTERN:ARGUMENT=FUNCTION")
        buckets.setdefault(pattern, {})[argument] = function_named(function)
    return buckets


def function_named(text: Any) -> Callable[[Any], Any]:
    """Return the function module:name, or the one of this name in Triton. Raises InvalidValueError."""
    if not isinstance(text, str):
        raise InvalidValueError(f"function {text!r}: expected module:name, or a name of Triton's, as text")
    module, _, name = text.rpartition(":")
    try:
        function = getattr(import_module(module or "triton"), name)
    except Exception as error:  # a module may raise anything as it is imported
        why = f"{brief(error)}: expected module:name, or a name of Triton's"
        raise InvalidValueError(f"function {text!r}: {why}") from error
    if not callable(function):
        raise InvalidValueError(f"function {text!r} is {function!r}: expected a function")
    return function
