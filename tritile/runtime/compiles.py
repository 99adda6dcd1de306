"""Set how Triton compiles tritile's kernels, and listen to compiles while a block of code runs."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

from triton import knobs

from tritile.core.of_triton import FileCacheManager
from tritile.core.settings import current_mode
from tritile.core.threads import library_lock
from tritile.errors import NotCompiledError

# Options of each of tritile's kernels. Triton's default for fusing multiplications with additions changes in
# 3.10, and with it the bits of results.
OPTIONS: Final = {"enable_fp_fusion": True}


@contextlib.contextmanager
def compiles_heard() -> Iterator[list[float]]:
    """Yield a list that grows by the seconds of each compile that this thread asks for inside the `with`.

    A kernel found in Triton's cache, in memory or on disk, is not a compile. A listener that is already set
    still hears everything, and is restored afterwards. Other threads of tritile compile and prepare before or
    after.
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
            if knobs.compilation.listener is hear:  # else another listener was set meanwhile, and stays
                knobs.compilation.listener = before


@contextlib.contextmanager
def compiles_refused(what: str, advice: str) -> Iterator[None]:
    """Raise NotCompiledError where this thread asks Triton for a kernel that its cache does not hold.

    Triton looks into its cache before it compiles anything. A kernel found there, or in memory, is not a
    compile. `what` names the kernel and `advice` says what to run. Other threads of tritile compile and
    prepare before or after.
    """
    thread = threading.get_ident()
    error = NotCompiledError(f"mode is strict, and {what} is not compiled: {advice}")
    keeper: Any = knobs.cache.manager_class or FileCacheManager

    class Looking(keeper):  # type: ignore[misc]
        def __init__(self, *args: Any, **words: Any) -> None:
            try:
                super().__init__(*args, **words)
            except OSError as reason:  # the key is not there, and Triton may not make its folder
                raise (error if threading.get_ident() == thread else reason) from reason

        def get_group(self, filename: str) -> dict[str, str] | None:
            found: dict[str, str] | None = super().get_group(filename)
            compiles = filename not in (found or {}) or knobs.compilation.always_compile
            if compiles and threading.get_ident() == thread:
                raise error
            return found

    with library_lock, knobs.cache.scope():
        knobs.cache.manager_class = Looking
        yield


def as_mode_asks(what: str, advice: str) -> contextlib.AbstractContextManager[None]:
    """Refuse compiles in mode "strict", and change nothing in any other."""
    return compiles_refused(what, advice) if current_mode() == "strict" else contextlib.nullcontext()
