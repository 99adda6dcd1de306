"""How tritile has Triton compile, and what Triton compiles while a block of code runs."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

from triton import knobs

from tritile.runtime.interpreter import library_lock

# Of every kernel of tritile's own. Triton's default of fusing multiplications with additions changes in 3.10,
# and with it the bits of results.
OPTIONS: Final = {"enable_fp_fusion": True}


@contextlib.contextmanager
def compiles_heard() -> Iterator[list[float]]:
    """The seconds that each compile took which this thread asked for inside the `with`, in a list that grows.

    A kernel found in Triton's cache, in memory or on disk, is no compile. A listener that is set already
    goes on hearing everything, and is alone again afterwards. Other threads of tritile compile and prepare
    before or after.
    """
    seconds: list[float] = []
    thread = threading.get_ident()

    def hear(*args: Any, **told: Any) -> None:
        if not told["cache_hit"] and threading.get_ident() == thread:
            seconds.append(told["times"].total / 1e6)
        if before is not None:
            before(*args, **told)

    with library_lock:
        before = knobs.compilation.listener
        knobs.compilation.listener = hear
        try:
            yield seconds
        finally:
            if knobs.compilation.listener is hear:  # else another was set meanwhile, and stays
                knobs.compilation.listener = before
