"""A digest of a kernel's source, so that what was measured of one version is not believed of another."""

import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import triton.language as tl


def _function(kernel: Any) -> Any:
    """The Python function inside decorators such as triton.jit, heuristics and autotune."""
    while kernel is not None and not inspect.isfunction(kernel):
        kernel = getattr(kernel, "fn", None)
    return kernel


def _body(function: Any) -> str:
    """The source from `def` on: decorators, and where in its file it stands, do not count."""
    try:
        lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    except OSError:
        return function.__code__.co_code.hex()
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)
    return "\n".join(lines[start:])


def named_values(function: Any) -> Iterator[tuple[str, Any]]:
    """What a kernel's function may name outside itself: globals, closure, attributes of modules.

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


def source_hash(*kernels: Any) -> str:
    """Sixteen hexadecimal digits that change with the source of these kernels or of what they call.

    Followed are jitted functions and `tl.constexpr` values that it names, as globals, in its closure
    or as attributes of a module. Triton's own library is not: the version of Triton stands beside this
    digest wherever it is used.
    """
    parts: list[tuple[str, str]] = []
    done: set[int] = set()
    pending = [_function(kernel) for kernel in kernels]
    while pending:
        function = pending.pop()
        if function is None or id(function) in done:
            continue
        done.add(id(function))
        parts.append((f"{function.__module__}.{function.__qualname__}", _body(function)))
        for name, value in named_values(function):
            if isinstance(value, tl.constexpr):
                parts.append((f"{function.__module__}:{name}", repr(value.value)))
            elif hasattr(value, "arg_names") or hasattr(value, "cache_key"):
                pending.append(_function(value))
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:16]
