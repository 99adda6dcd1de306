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
from tritile.core.settings import current_mode
from tritile.core.threads import at_fork
from tritile.core.triton_private import FileCacheManager
from tritile.errors import NotCompiledError

# Options of each of tritile's kernels. Triton's default for fusing multiplications with additions changes in
# 3.10, and with it the bits of results.
OPTIONS: Final = {"enable_fp_fusion": True}

_MISSING: Final = object()
_knobs_lock: Final = threading.RLock()  # held to replace a knob of Triton, and not while anything compiles
at_fork(_knobs_lock)

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
    with _knobs_lock:
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


class _OfThread(threading.local):
    """What the compiles of a thread are subject to."""

    heard: tuple[list[float], ...] = ()  # lists that grow by the seconds of each
    refusal: NotCompiledError | None = None


_thread = _OfThread()


class _Replaced:
    """Replace a knob of Triton, one for all threads, while any of them is inside `in_place`.

    `make` returns the replacement. It is given what the knob was, and a test of whether a replacement is
    still in use: a user's own listener may go on calling an old one.
    """

    def __init__(self, knobs: Any, name: str, make: Callable[[Any, Callable[[Any], bool]], Any]) -> None:
        self._knobs, self._name, self._make = knobs, name, make
        self._users = 0
        self._before: Any = _MISSING
        self._own: Any = None

    def _counts(self, own: Any) -> bool:
        return own is self._own

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        with _knobs_lock:
            set_to = vars(self._knobs).get(self._name, _MISSING)
            if self._own is None or set_to is not self._own:  # or a user has set another meanwhile
                self._before = set_to
                self._own = self._make(getattr(self._knobs, self._name), self._counts)
                setattr(self._knobs, self._name, self._own)
            self._users += 1
        try:
            yield
        finally:
            with _knobs_lock:
                self._users -= 1
                if not self._users:
                    if vars(self._knobs).get(self._name) is self._own:  # else what a user has set stays
                        if self._before is _MISSING:
                            delattr(self._knobs, self._name)
                        else:
                            setattr(self._knobs, self._name, self._before)
                    self._before, self._own = _MISSING, None


def _hearing(before: Any, counts: Callable[[Any], bool]) -> Callable[..., None]:
    def listener(*args: Any, **compiled: Any) -> None:
        if not compiled["cache_hit"] and counts(listener):
            for seconds in _thread.heard:
                seconds.append(compiled["times"].total / 1e6)
        if before is not None:
            before(*args, **compiled)

    return listener


def _looking(before: Any, counts: Callable[[Any], bool]) -> type:
    keeper: Any = before or FileCacheManager

    class Looking(keeper):  # type: ignore[misc]
        """Triton looks into its cache before it compiles anything."""

        def __init__(self, *args: Any, **words: Any) -> None:
            try:
                super().__init__(*args, **words)
            except OSError as reason:  # the key is not there, and Triton may not make its folder
                raise (_thread.refusal or reason) from reason

        def get_group(self, filename: str) -> dict[str, str] | None:
            found: dict[str, str] | None = super().get_group(filename)
            compiles = filename not in (found or {}) or knobs.compilation.always_compile
            if compiles and _thread.refusal is not None:
                raise _thread.refusal
            return found

    return Looking


_listener: Final = _Replaced(knobs.compilation, "listener", _hearing)
_cache: Final = _Replaced(knobs.cache, "manager_class", _looking)


@contextlib.contextmanager
def compiles_heard() -> Iterator[list[float]]:
    """Yield a list that grows by the seconds of each compile that this thread asks for inside the `with`.

    A kernel found in Triton's cache, in memory or on disk, is not a compile. A listener that is already set
    still hears everything, and is restored afterwards.
    """
    seconds: list[float] = []
    before = _thread.heard
    with _listener.in_place():
        _thread.heard = (*before, seconds)
        try:
            yield seconds
        finally:
            _thread.heard = before


@contextlib.contextmanager
def compiles_refused(what: str, advice: str) -> Iterator[None]:
    """Raise NotCompiledError where this thread asks Triton for a kernel that its cache does not hold.

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


def as_mode_asks(what: str, advice: str) -> contextlib.AbstractContextManager[None]:
    return compiles_refused(what, advice) if current_mode() == "strict" else contextlib.nullcontext()
