"""Set how Triton compiles tritile's kernels, and listen to compiles."""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from triton import knobs

from tritile.core.log import is_logged, log
from tritile.core.of_triton import FileCacheManager
from tritile.core.settings import current_mode
from tritile.core.threads import library_lock
from tritile.errors import NotCompiledError

# Options of each of tritile's kernels. Triton's default for fusing multiplications with additions changes in
# 3.10, and with it the bits of results.
OPTIONS: Final = {"enable_fp_fusion": True}

_asking: ContextVar[tuple[str, str]] = ContextVar("tritile_asking", default=("", ""))
_decorated: Final["weakref.WeakSet[Callable[..., Any]]"] = weakref.WeakSet()
_listening = False
_others: Callable[..., Any] | None = None  # what listened to Triton before


@contextlib.contextmanager
def asking(problem: str, config: str) -> Iterator[None]:
    """Have compiles inside the `with` be logged as asked for by a problem with a config."""
    listen()
    token = _asking.set((problem, config))
    try:
        yield
    finally:
        _asking.reset(token)


def count_as_ours(function: Callable[..., Any]) -> None:
    """Have compiles of a user's own kernel be logged, too. `function` is what was jitted."""
    _decorated.add(function)
    listen()


def listen() -> None:
    """Set Triton's listener, for as long as the process lives, once somebody wants compiles logged."""
    global _listening, _others
    if _listening or not is_logged("compile", logging.INFO):
        return
    with library_lock:
        if not _listening:
            _listening, _others = True, knobs.compilation.listener
            knobs.compilation.listener = _heard


def _heard(**compiled: Any) -> None:
    if _others is not None:
        _others(**compiled)
    function = getattr(compiled["src"], "fn", None)  # a source in another language than Python has none
    if function is None or not (function.__module__.startswith("tritile.") or function.fn in _decorated):
        return
    problem, config = _asking.get()
    log(
        "compile",
        logging.INFO,
        kernel=function.__name__,
        problem=problem or None,
        config=config or _config_text(compiled["src"], compiled["metadata"]),
        source="cache" if compiled["cache_hit"] else "compiled",
        seconds=compiled["times"].total / 1e6,
    )


def _config_text(source: Any, metadata: dict[str, Any]) -> str:
    """Return the constants and options of a compiled kernel, as a config's text has them."""
    params = source.fn.params
    constants = {params[at[0]].name: value for at, value in source.constants.items() if len(at) == 1}
    constexprs = sorted((p.name, constants[p.name]) for p in params if p.is_constexpr and p.name in constants)
    options = ((name, metadata[name]) for name in ("num_warps", "num_stages") if name in metadata)
    return " ".join(f"{name}={value}" for name, value in (*constexprs, *options))


@contextlib.contextmanager
def compiles_heard() -> Iterator[list[float]]:
    """Yield a list that grows by the seconds of each compile that this thread asks for inside the `with`.

    A kernel found in Triton's cache, in memory or on disk, is not a compile. A listener that is already set
    still hears everything, and is restored afterwards. Other threads of tritile compile and prepare before or
    after.
    """
    seconds: list[float] = []
    thread = threading.get_ident()

    def listener(*args: Any, **compiled: Any) -> None:
        if not compiled["cache_hit"] and threading.get_ident() == thread:
            seconds.append(compiled["times"].total / 1e6)
        if before is not None:
            before(*args, **compiled)

    with library_lock:
        before = knobs.compilation.listener
        knobs.compilation.listener = listener
        try:
            yield seconds
        finally:
            if knobs.compilation.listener is listener:  # else another was set meanwhile, and stays
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
    return compiles_refused(what, advice) if current_mode() == "strict" else contextlib.nullcontext()
