"""Locks that a forked child gets free, whatever other threads of its parent were at."""

import os
import threading
from collections.abc import Callable
from typing import Any, Final

WAIT_S: Final = 1.0


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
