"""Share work among threads, import for them, and free locks in a forked child."""

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from importlib import import_module
from typing import Any, Final, TypeVar

WAIT_S: Final = 1.0
# Held while Triton compiles, and while its interpreter patches triton.language in place.
library_lock: Final = threading.RLock()
T = TypeVar("T")


def at_fork(lock: Any, in_child: Callable[[bool], None] = lambda ended: None) -> None:
    """Have a fork wait for a reentrant lock, for `WAIT_S` seconds at most, and its child get it free.

    `in_child(ended)` is called in the child. `ended` is False where another thread held the lock for longer:
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
    with library_lock:
        return import_module(module)


at_fork(library_lock)
_under_way: dict[Hashable, tuple[Future[Any], int]] = {}  # with the thread that works
_lock = threading.RLock()
# A child process lacks the threads that were at work.
at_fork(_lock, lambda ended: _under_way.clear())


def once(key: Hashable, work: Callable[[], T]) -> T:
    """Return what `work()` gives; of threads that call this with one key at the same time one does it.

    The others wait, and get its result or the error that it raised. Where it was interrupted, one of them
    begins anew. Work that needs its own key, as a benchmark that calls its kernel, does not wait.
    """
    mine: Future[T] = Future()
    thread = threading.get_ident()
    while True:
        with _lock:
            doing, worker = _under_way.setdefault(key, (mine, thread))
        if doing is mine:
            break
        if worker == thread:
            return work()
        try:
            return doing.result()
        except CancelledError:
            continue
    try:
        mine.set_result(work())
    except Exception as error:
        mine.set_exception(error)
    finally:
        with _lock:
            _under_way.pop(key, None)
        mine.cancel()  # unless it is done
    return mine.result()
