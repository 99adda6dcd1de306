"""Digest source, so that what was measured of one version does not count for another."""

import dis
import enum
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, EllipsisType, MethodType, ModuleType
from typing import Any, Final

import torch
import triton.language as tl

from tritile.core.triton_private import (
    Heuristics,
    InterpretedFunction,
    JITCallable,
    KernelInterface,
    changed_settings,
    functions_of,
    options_of,
)

_PLAIN = (bool, int, float, complex, str, bytes, EllipsisType, tl.dtype, torch.dtype)
# Libraries that are not followed: their versions are stored with a digest, or change no kernel.
_LIBRARIES: Final = {"triton", "torch", "numpy", *sys.stdlib_module_names}
_DECORATED: Final = (JITCallable, KernelInterface, MethodType, type(functools.cache(len)))
_WRAPPED: Final = ("__func__", "fn", "__wrapped__")  # attributes that hold what a decorator wraps
_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD")
_NAMES: Final = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")


def _layers(value: Any) -> list[Any]:
    """Return a function and what each of its decorators wraps, the outermost first; [] for other values."""
    layers = []
    while isinstance(value, _DECORATED):
        layers.append(value)
        value = next((getattr(value, name) for name in _WRAPPED if hasattr(value, name)), None)
    return [*layers, value] if inspect.isfunction(value) else []


def _root(value: Any) -> str:
    """Return the name of the top-level module that a value is, or is defined in."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(module).partition(".")[0]


def is_of_library(value: Any) -> bool:
    """True for a module, or what one defines, of Triton, torch, NumPy or Python itself."""
    return _root(value) in _LIBRARIES


@functools.cache
def _paths(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return each name that code reads from outside, followed by the attributes read of it: a, a.b, a.b.c."""
    paths: dict[tuple[str, ...], None] = {}
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _NAMES:
            path = (instruction.argval,)
        elif instruction.opname in _ATTRIBUTES:
            path = path and (*path, instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            path = ()
        if path:
            paths[path] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            paths |= dict.fromkeys(_paths(constant))
    return tuple(paths)


def named_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values that a function reads: globals, its closure, and attributes of either.

    Modules themselves and attributes of what libraries define are left out.
    """
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: cell.cell_contents for name, cell in cells}
    for first, *attributes in _paths(function.__code__):
        value = closure[first] if first in closure else function.__globals__.get(first)
        for attribute in attributes:
            try:
                value = None if is_of_library(value) else getattr(value, attribute, None)
            except Exception:  # a property may raise anything: the function itself meets it as it runs
                value = None
        if value is not None and not isinstance(value, ModuleType):
            yield ".".join((first, *attributes)), value


def _jitted_source(layers: list[Any]) -> str:
    """Return the source from `def` on, without decorators and without its position in the file.

    A jitted function's source is what Triton read as it was jitted: by now its file may hold another.
    """
    if isinstance(layers[-2], JITCallable):
        source = layers[-2].src
    else:
        source = ("\n" + textwrap.dedent(inspect.getsource(layers[-1]))).partition("\ndef ")[2]
        source = f"def {source}"
    return "\n".join(source.splitlines())


class _Texts:
    """Values as text that says what they are and not where they are defined."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Any, str | None]] = {}  # the value is kept so that its id stays its own

    def of(self, value: Any) -> str | None:
        """Return the text of a value, the same for equal values; None if its kind does not count."""
        if id(value) not in self._texts:
            self._texts[id(value)] = value, "itself"  # where a function calls itself, or a list holds itself
            self._texts[id(value)] = value, self._written(value)
        return self._texts[id(value)][1]

    def _written(self, value: Any) -> str | None:
        if isinstance(value, enum.Enum):
            return f"{value.name}={self.of(value.value)}"
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, tl.constexpr):
            return f"constexpr[{self.of(value.value)}]"
        if isinstance(value, tuple | list):
            return repr([self.of(each) for each in value])
        if isinstance(value, set | frozenset):
            return repr(sorted(str(self.of(each)) for each in value))
        if isinstance(value, dict):
            return repr(sorted((str(self.of(key)), str(self.of(each))) for key, each in value.items()))
        if isinstance(value, functools.partial):
            return self.of([value.func, value.args, value.keywords])
        if isinstance(value, CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_exceptiontable)
            return repr((value.co_code, names, self.of(value.co_consts)))
        if isinstance(value, type):
            return self.of([*functions_of(value)]) if functions_of(value) else None
        layers = _layers(value)
        return self._of_function(layers) if layers else None

    def _of_function(self, layers: list[Any]) -> str | None:
        function = layers[-1]
        jitted = isinstance(layers[-2:][0], JITCallable | InterpretedFunction)
        # A module of kernels may have the name of one of the standard library.
        if _root(function) in ({"triton"} if jitted else _LIBRARIES):
            return None
        parts = {name: self.of(value) for name, value in named_values(function)}
        parts[":defaults"] = self.of([function.__defaults__, function.__kwdefaults__])
        if jitted:
            parts[":source"] = _jitted_source(layers)
            parts[":options"] = self.of(options_of(layers[-2]))
            parts[":annotations"] = self.of(function.__annotations__)
        else:  # which may have no source of its own, as one of two lambdas in a line
            parts[":code"] = self.of(function.__code__)
        for layer in layers:
            if isinstance(layer, Heuristics) and layer.values:
                parts[":heuristics"] = self.of([parts.get(":heuristics"), layer.values])
        counted = sorted((name, text) for name, text in parts.items() if text is not None)
        return hashlib.sha256(repr(counted).encode()).hexdigest()


def source_hash(*kernels: Any) -> str:
    """Return 16 hexadecimal digits that change with the source of these kernels or of what they use.

    Globals, closures, defaults and heuristics are followed, through any number of dots. Jitted functions
    count by source and options, plain ones by their bytecode, which may differ between versions of Python.
    Values count that are numbers, text, dtypes, `tl.constexpr`, and collections of these. Settings of Triton
    that change what is compiled count if they differ from their defaults, as they are at this call.
    Files, lines and names of modules do not count: a move changes nothing. Libraries are not followed: the
    version of Triton is stored with this digest wherever it is used.
    """
    texts = _Texts()
    parts = sorted({str(texts.of(kernel)) for kernel in kernels})
    settings = texts.of(changed_settings())
    return hashlib.sha256(repr((parts, settings)).encode()).hexdigest()[:16]
