"""A digest of a kernel's source, so that what was measured of one version is not believed of another."""

import hashlib
import inspect
import textwrap
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


def source_hash(kernel: Any) -> str:
    """Sixteen hexadecimal digits that change with the source of `kernel` or of what it calls.

    Followed are jitted functions and `tl.constexpr` values that it names as globals. Triton's own
    library is not: the version of Triton stands beside this digest wherever it is used.
    """
    seen: dict[str, str] = {}
    pending = [_function(kernel)]
    while pending:
        function = pending.pop()
        if function is None or f"{function.__module__}.{function.__qualname__}" in seen:
            continue
        seen[f"{function.__module__}.{function.__qualname__}"] = _body(function)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, tl.constexpr):
                seen[f"{function.__module__}:{name}"] = repr(value.value)
            elif hasattr(value, "arg_names") or hasattr(value, "cache_key"):
                pending.append(_function(value))
    return hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest()[:16]
