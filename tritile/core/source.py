"""Digest source, so that what was measured of one version does not count for another."""

import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import triton.language as tl

from tritile.core.of_triton import Heuristics, JITCallable

_PLAIN = (bool, int, float, str, tl.constexpr, tl.dtype)


def _layers(kernel: Any) -> list[Any]:
    """Return a kernel and what each of its decorators wraps, the outermost first."""
    layers = []
    while kernel is not None:
        layers.append(kernel)
        kernel = None if inspect.isfunction(kernel) else getattr(kernel, "fn", None)
    return layers


def _body(layers: list[Any]) -> str:
    """Return the source from `def` on, without decorators and without its position in the file.

    A jitted function's source is what Triton read as it was jitted: by now its file may hold another.
    """
    function = layers[-1]
    for jitted in layers[:-1]:
        if isinstance(jitted, JITCallable):
            return "\n".join(jitted.src.splitlines())
    try:
        lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    except OSError:
        return function.__code__.co_code.hex()
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    return "\n".join(lines[start:])


def named_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values that a kernel's function may use: globals, closure, module attributes.

    Triton's own library is left out.
    """
    outside = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for name in (*function.__code__.co_names, *function.__code__.co_freevars):
        value = outside.get(name)
        if not isinstance(value, ModuleType):
            yield name, value
        elif value.__name__.partition(".")[0] != "triton":
            for attribute in function.__code__.co_names:
                yield f"{name}.{attribute}", getattr(value, attribute, None)


def _is_tritons(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "triton"


def source_hash(*kernels: Any) -> str:
    """Return 16 hexadecimal digits that change with the source of these kernels or of what they call.

    Heuristics, jitted functions and `tl.constexpr` values are followed: those named as globals, in the
    closure or as attributes of a module. A function counts by its qualified name, whichever module it is in:
    a move changes nothing. Triton's own library is not followed: the version of Triton stands beside this
    digest wherever it is used.
    """
    parts: set[tuple[str, str]] = set()
    done: set[int] = set()
    pending = [*kernels]
    while pending:
        layers = _layers(pending.pop())
        function = layers[-1] if layers else None
        if not inspect.isfunction(function) or id(function) in done or _is_tritons(function):
            continue
        done.add(id(function))
        parts.add((function.__qualname__, _body(layers)))
        pending += [
            value for layer in layers if isinstance(layer, Heuristics) for value in layer.values.values()
        ]
        defaults = [v for v in (function.__defaults__ or ()) if isinstance(v, _PLAIN)]
        if defaults:  # the source may name them without their values
            parts.add((f"{function.__qualname__}:defaults", repr(defaults)))
        for name, value in named_values(function):
            if isinstance(value, tl.constexpr):
                parts.add((f"{function.__qualname__}:{name}", repr(value.value)))
            elif hasattr(value, "arg_names") or hasattr(value, "cache_key"):
                pending.append(value)
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:16]


@functools.cache
def package_hash() -> str:
    """Return 16 hexadecimal digits that change with any module of tritile."""
    root = Path(__file__).parents[1]
    files = [(path.relative_to(root).as_posix(), path.read_bytes()) for path in root.rglob("*.py")]
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()[:16]
