"""Share work among threads, run the interpreter in one at a time, and free locks in a forked child."""

import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError, Future
from importlib import import_module
from typing import Any, Final, TypeVar

WAIT_S: Final = 1.0
T = TypeVar("T")


class LendableLock:
    """A reentrant lock that its holder lends to other threads while it waits for one of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0  # times that the holder has acquired it

    def acquire(self, timeout: float = -1) -> bool:
        if not self._lock.acquire(timeout=timeout):
            return False
        self._holder, self._depth = threading.get_ident(), self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Leave the lock to others inside the `with`, if this thread holds it."""
        times = self._depth if self._holder == threading.get_ident() else 0
        for _ in range(times):
            self.release()
        try:
            yield
        finally:
            for _ in range(times):
                self.acquire()

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]


# Held while Triton's interpreter runs a kernel: it patches triton.language in place, and has one memory and
# one grid for all threads. A compiled launch never takes it.
interpreter_lock: Final = LendableLock()


def at_fork(lock: Any, in_child: Callable[[bool], None] = lambda ended: None) -> None:
    """Have a fork wait for a reentrant lock, for `WAIT_S` seconds at most, and its child get it free.

    `in_child(ended)` is called in the child. `ended` is False if another thread had the lock for longer:
    what it guards is as that thread, which the child lacks, happened to leave it.
    """
    mine = threading.local()  # other threads may fork at the same time

    def before() -> None:
        mine.ended = lock.acquire(timeout=WAIT_S)

    def in_parent() -> None:
        if mine.ended:
            lock.release()

    def after() -> None:
        if mine.ended:
            lock.release()
        else:
            lock._at_fork_reinit()
        in_child(mine.ended)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=after)


def import_late(module: str) -> Any:
    """Return a module that imports triton.language, at a time when that is not patched."""
    with interpreter_lock:
        return import_module(module)


at_fork(interpreter_lock)
_under_way: dict[Hashable, tuple[Future[Any], int]] = {}  # with the thread that works
_waiting: dict[int, int] = {}  # the thread that each waiting thread waits for
_lock = threading.RLock()


def _forget(ended: bool) -> None:
    """In a forked child: it lacks the threads that were at work."""
    _under_way.clear()
    _waiting.clear()


at_fork(_lock, _forget)


def _waits_for(worker: int | None, thread: int) -> bool:
    """True if a thread is another, or waits for it, however many threads lie between."""
    while worker is not None and worker != thread:
        worker = _waiting.get(worker)
    return worker == thread


def once(key: Hashable, work: Callable[[], T]) -> T:
    """Return what `work()` gives; of threads that call this with one key at the same time one does it.

    The others wait, and get its result or the error that it raised. If it was interrupted, one of them
    begins anew. A thread that would wait for itself does the work, too: a benchmark that calls its own
    kernel, or two kernels whose grids call each other.
    """
    mine: Future[T] = Future()
    thread = threading.get_ident()
    while True:
        with _lock:
            doing, worker = _under_way.setdefault(key, (mine, thread))
            if doing is mine:
                break
            waits = not _waits_for(worker, thread)
            if waits:
                _waiting[thread] = worker
        if not waits:
            return work()
        try:
            with interpreter_lock.lent():
                return doing.result()
        except CancelledError:
            continue
        finally:
            del doing
            with _lock:
                _waiting.pop(thread, None)
    try:
        made = work()
        mine.set_result(made)
        return made
    except Exception as error:
        mine.set_exception(error)
        raise
    finally:
        with _lock:
            _under_way.pop(key, None)
        mine.cancel()  # unless it is done
        # A future refers to its error, and an error to this frame and its callers'.
        del mine, doing
