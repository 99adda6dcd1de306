"""Set how Triton compiles tritile's kernels, log compiles, and refuse them in mode "strict"."""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from triton import knobs

from tritile.core.log import is_logged, log
from tritile.core.settings import current_mode
from tritile.core.threads import at_fork
from tritile.core.triton_private import FileCacheManager
from tritile.errors import NotCompiledError

# Options of each of tritile's kernels. Triton's default for fusing multiplications with additions changes in
# 3.10, and with it the bits of results.
OPTIONS: Final = {"enable_fp_fusion": True}

_MISSING: Final = object()
_knobs_lock: Final = threading.RLock()  # taken to replace a knob of Triton, and not while anything compiles
at_fork(_knobs_lock)

_problem_and_config: ContextVar[tuple[str, str]] = ContextVar("tritile_compiling", default=("", ""))
_decorated: Final["weakref.WeakSet[Callable[..., Any]]"] = weakref.WeakSet()
_listening = False
_previous: Callable[..., Any] | None = None  # the listener that was set before


@contextlib.contextmanager
def log_compiles_as(problem: str, config: str) -> Iterator[None]:
    """Log compiles inside the `with` under this problem and config."""
    listen()
    token = _problem_and_config.set((problem, config))
    try:
        yield
    finally:
        _problem_and_config.reset(token)


def count_as_ours(function: Callable[..., Any]) -> None:
    """Log compiles of a user's own kernel, too. `function` is the jitted function."""
    _decorated.add(function)
    listen()


def listen() -> None:
    """Set Triton's listener, for good, once compiles are to be logged."""
    global _listening, _previous
    if _listening or not is_logged("compile", logging.INFO):
        return
    with _knobs_lock:
        if not _listening:
            _listening, _previous = True, knobs.compilation.listener
            knobs.compilation.listener = _heard


def _heard(**compiled: Any) -> None:
    if _previous is not None:
        _previous(**compiled)
    function = getattr(compiled["src"], "fn", None)  # None for a source in another language than Python
    if function is None or not (function.__module__.startswith("tritile.") or function.fn in _decorated):
        return
    problem, config = _problem_and_config.get()
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
    """Return the constants and options of a compiled kernel, written like a config."""
    params = source.fn.params
    constants = {params[at[0]].name: value for at, value in source.constants.items() if len(at) == 1}
    constexprs = sorted((p.name, constants[p.name]) for p in params if p.is_constexpr and p.name in constants)
    options = ((name, metadata[name]) for name in ("num_warps", "num_stages") if name in metadata)
    return " ".join(f"{name}={value}" for name, value in (*constexprs, *options))


class _ThreadState(threading.local):
    """The error that a thread's compiles raise, if they are refused."""

    refusal: NotCompiledError | None = None


_thread = _ThreadState()


def _refusing(manager: Any) -> type:
    class Refusing(manager):  # type: ignore[misc]
        """Raises the thread's refusal for a kernel that the cache does not have."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().__init__(*args, **kwargs)
            except OSError as reason:  # the key is missing, and its folder cannot be made
                raise (_thread.refusal or reason) from reason

        def get_group(self, filename: str) -> dict[str, str] | None:
            group: dict[str, str] | None = super().get_group(filename)
            compiles = filename not in (group or {}) or knobs.compilation.always_compile
            if compiles and _thread.refusal is not None:
                raise _thread.refusal
            return group

    return Refusing


class _RefusingCache:
    """Replace Triton's cache manager, for all threads, while any of them refuses to compile."""

    def __init__(self) -> None:
        self._users = 0
        self._before: Any = _MISSING  # the knob, unless it was at its default
        self._manager: Any = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        with _knobs_lock:
            current = vars(knobs.cache).get("manager_class", _MISSING)
            if self._manager is None or current is not self._manager:  # or a user has set another since
                self._before = current
                self._manager = knobs.cache.manager_class = _refusing(
                    knobs.cache.manager_class or FileCacheManager
                )
            self._users += 1
        try:
            yield
        finally:
            with _knobs_lock:
                self._users -= 1
                if not self._users:  # a user may have set another manager since
                    if vars(knobs.cache).get("manager_class") is self._manager:
                        if self._before is _MISSING:
                            del knobs.cache.manager_class
                        else:
                            knobs.cache.manager_class = self._before
                    self._before, self._manager = _MISSING, None


_cache: Final = _RefusingCache()


@contextlib.contextmanager
def compiles_refused(what: str, advice: str) -> Iterator[None]:
    """Raise NotCompiledError if this thread asks Triton for a kernel that its cache does not have.

    A kernel found there, or in memory, is not a compile. `what` names the kernel and `advice` says what to
    run.
    """
    before = _thread.refusal
    with _cache.in_place():
        _thread.refusal = NotCompiledError(f"mode is strict, and {what} is not compiled: {advice}")
        try:
            yield
        finally:
            _thread.refusal = before


def refuse_if_strict(what: str, advice: str) -> contextlib.AbstractContextManager[None]:
    return compiles_refused(what, advice) if current_mode() == "strict" else contextlib.nullcontext()
