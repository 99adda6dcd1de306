"""Running a compiled-mode kernel in Triton's interpreter, on tensors in host memory.

`triton.jit` decides once, when it decorates, whether a function will be compiled or interpreted. A
library cannot leave it at that: the same process multiplies host tensors and compiles for a GPU. So
this makes an interpreted twin of a jitted function, with the jitted functions it calls replaced by
twins too, and swaps Triton's own library (`tl.cdiv`, `tl.sum` ...) for its twins while one runs.
"""

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_twins: dict[JITFunction, InterpretedFunction] = {}
_lock = threading.RLock()  # the interpreter patches triton.language in place while it runs


def interpreted(kernel: Any) -> InterpretedFunction:
    """The twin of `kernel` that runs in the interpreter; `kernel` itself if it is one already."""
    if not isinstance(kernel, JITFunction):
        return kernel
    if kernel not in _twins:
        namespace = dict(kernel.fn.__globals__)
        function = types.FunctionType(
            kernel.fn.__code__,
            namespace,
            kernel.fn.__name__,
            kernel.fn.__defaults__,
            kernel.fn.__closure__,
        )
        function.__annotations__ = kernel.fn.__annotations__
        function.__module__ = kernel.fn.__module__
        function.__qualname__ = kernel.fn.__qualname__
        _twins[kernel] = InterpretedFunction(function)
        for name, value in kernel.fn.__globals__.items():
            if isinstance(value, JITFunction):
                namespace[name] = interpreted(value)
    return _twins[kernel]


_PATCHED = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.core.tensor_descriptor_base)


@contextlib.contextmanager
def _interpreted_library() -> Iterator[None]:
    """`triton.language` with its jitted functions replaced by their twins.

    Afterwards everything stands as before. The interpreter itself puts back what it patches for a
    kernel, but not what it patches for a function that the kernel calls.
    """
    before = [(owner, dict(vars(owner))) for owner in _PATCHED]
    for name, function in before[0][1].items():
        if isinstance(function, JITFunction):
            setattr(tl, name, interpreted(function))
    try:
        yield
    finally:
        for owner, attributes in before:
            for name, value in attributes.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def interpret(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run `kernel[grid](*args, **kwargs)` in the interpreter, one call at a time in a process."""
    with _lock, _interpreted_library():
        interpreted(kernel)[grid](*args, **kwargs)
