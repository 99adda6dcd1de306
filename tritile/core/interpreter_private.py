"""Show what a kernel in Triton's interpreter loads and stores, before it does.

An adapter like `triton_private`: it names what Triton does not document. No kernel imports this one.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tritile.core.bound import bound, lacking

# Called with addresses, which of them are used (None for all), the bytes of an element, and if it is written.
See = Callable[[np.ndarray, np.ndarray | None, int, bool], None]
_interpreter: Any = bound("triton.runtime.interpreter")


class _Watched:
    """The memory of the interpreter, `triton._C.libtriton.interpreter`, with each access seen first."""

    def __init__(self, memory: Any, see: See) -> None:
        self._memory, self._see = memory, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, at: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._see(at, mask, np.dtype(dtype).itemsize, False)
        return self._memory.load(at, mask, other, dtype)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        self._see(at, mask, value.itemsize, True)
        return self._memory.store(at, value, mask)

    def atomic_cas(self, at: Any, expected: Any, value: Any, order: Any) -> Any:
        self._see(at, None, value.itemsize, True)
        return self._memory.atomic_cas(at, expected, value, order)

    def atomic_rmw(self, how: Any, at: Any, value: Any, mask: Any, order: Any) -> Any:
        self._see(at, mask, value.itemsize, True)
        return self._memory.atomic_rmw(how, at, value, mask, order)


@contextlib.contextmanager
def watched(see: See) -> Iterator[None]:
    """Call `see` ahead of each access of kernels that are interpreted inside the `with`: it may raise.

    The interpreter has one memory for all threads: to be called under `core.threads.interpreter_lock`.
    """
    if not hasattr(_interpreter, "_interpreter"):
        raise lacking("triton.runtime.interpreter._interpreter")
    memory = _interpreter._interpreter
    _interpreter._interpreter = _Watched(memory, see)
    try:
        yield
    finally:
        _interpreter._interpreter = memory
