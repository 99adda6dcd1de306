"""Bind what torch and Triton do not document, by name: a missing one fails only when it is needed.

What is there is returned as it is, and costs its callers nothing.
"""

import importlib
import sys
from typing import Any, Final

from tritile.core.versions import tested
from tritile.errors import UnsupportedError

_NOTHING: Final = object()


def found(path: str) -> Any:
    """Return what a dotted path names. Raises AttributeError if nothing has that name."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            value: Any = sys.modules.get(name) or importlib.import_module(name)
        except ImportError:  # a class, or a module of an extension, which its parent holds
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AttributeError(path)


def lacking(path: str) -> UnsupportedError:
    """Return the error for what needs a name that this version of a library does not have."""
    library = path.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", "")
    return UnsupportedError(
        f"this needs {path}, which {library} {version} does not have: "
        f"tritile is tested with {library} up to {tested(library)}"
    )


class _Missing(type):
    """Stand for a function, a class or a base class that is not there: no value is an instance of it."""

    path: str

    def __call__(cls, *args: Any, **named: Any) -> Any:
        raise lacking(cls.path)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise lacking(cls.path)

    def __rand__(cls, other: Any) -> Any:
        raise lacking(cls.path)


def bound(path: str, otherwise: Any = _NOTHING) -> Any:
    """Return what a dotted path names; if nothing does, `otherwise`, another way to do the same.

    Without another way, return what raises UnsupportedError once it is called, or an attribute of it is read.
    """
    try:
        return found(path)
    except AttributeError:
        return _Missing(path.rpartition(".")[2], (), {"path": path}) if otherwise is _NOTHING else otherwise
