"""Use a store's SQLite file beside other processes, which may lock it, damage it or set it aside meanwhile.

Every thread of every process has a connection of its own. Whatever is wrong with the file or the disk, work
goes on without it, after a StoreWarning.
"""

import contextlib
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from filelock import FileLock

from tritile.core.threads import at_fork
from tritile.errors import StoreWarning
from tritile.planning import database, salvage

RETRY_S: Final = 30.0  # for which a file that failed is left alone
_ATTEMPTS: Final = 4
_PAUSE_S: Final = 0.01  # the longest time between two attempts at a lock
# Held while SQLite works in any thread. Not held while a thread waits for a lock of another process, except
# for the tenth of a second that a commit gives readers.
LOCK: Final = threading.RLock()
_FILES: "weakref.WeakSet[SharedFile]" = weakref.WeakSet()
_ABANDONED: list[Any] = []
T = TypeVar("T")


class _Opened(NamedTuple):
    connection: sqlite3.Connection
    identity: database.Identity


class SharedFile:
    """Give work a connection to the file at `path`, which is opened on first use and checked once a process.

    A file that fails, or that another process keeps locked, is left alone for `RETRY_S` seconds. `waiting`
    holds what is still to be written; a forked child forgets it, as its parent writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: dict[Any, Any] = {}
        self._connections: dict[tuple[int, int], _Opened] = {}
        self._warned: set[str] = set()
        self._checked: database.Identity = None
        self._reads_from = self._writes_from = -inf  # when the file is used again, by `time.monotonic`
        _FILES.add(self)

    def attempt(self, work: Callable[..., T], nothing: T, *arguments: Any, write: bool = False) -> T:
        """Return what `work(connection, *arguments)` gives, or `nothing` where the file does not let it.

        Work is done again if the file was set aside meanwhile, by this process or by another: what was
        written into the old file would be lost. Where a lock is held, try again until `database.READ_S` or
        `WRITE_S`.
        """
        result, left, pause = nothing, _ATTEMPTS, _PAUSE_S / 10
        deadline = time.monotonic() + (database.WRITE_S if write else database.READ_S)
        while left and time.monotonic() >= (self._writes_from if write else self._reads_from):
            try:
                with LOCK:
                    done, result = self._tried(work, nothing, arguments, write)
            except database.FAULTS as error:
                if not database.is_busy(error) or time.monotonic() >= deadline:
                    self._leave_alone(error, write)
                    return nothing
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_S)
            else:
                if done:
                    return result
                left -= 1
        return result

    def retry_writing(self) -> None:
        """Use the file for writing again, though it failed a moment ago."""
        self._writes_from = -inf

    def close(self) -> None:
        """Close the file, for all threads; a later use opens it again."""
        with LOCK:
            while self._connections:
                self._connections.popitem()[1].connection.close()
            self._checked = None

    def warn(self, kind: str, text: str) -> None:
        """Warn with StoreWarning, once for each kind of trouble."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, StoreWarning, stacklevel=5)

    def _tried(
        self, work: Callable[..., T], nothing: T, arguments: tuple[Any, ...], create: bool
    ) -> tuple[bool, T]:
        """Return whether the work is done, and its result. Raises `database.FAULTS`, damage excepted."""
        identity, result = None, nothing
        try:
            if _unusable:
                raise OSError("the parent was using the file as it forked this process")
            identity = database.identity_of(self.path)
            opened = self._opened(identity, create)
            if opened is None:
                return True, nothing
            result = work(opened.connection, *arguments)
            return database.identity_of(self.path) == opened.identity, result
        except database.FAULTS as error:
            moved = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED
            if not moved and not database.is_damage(error):
                raise
            if not moved:
                self._set_aside(str(error), identity)
            self._drop()
            return False, nothing

    def _opened(self, identity: database.Identity, create: bool) -> _Opened | None:
        """Return the connection of this thread, None where there is no store and none is to be created."""
        mine = os.getpid(), threading.get_ident()
        opened = self._connections.get(mine)
        if opened is not None and opened.identity == identity:
            return opened
        self._drop()
        if identity is None and not create:
            return None
        connection = database.open_store(self.path, create, identity is None or identity != self._checked)
        if connection is None:
            return None
        opened = _Opened(connection, identity or database.identity_of(self.path))
        self._connections[mine], self._checked = opened, opened.identity
        return opened

    def _drop(self) -> None:
        opened = self._connections.pop((os.getpid(), threading.get_ident()), None)
        if opened is not None:
            opened.connection.close()

    def _leave_alone(self, error: Exception, write: bool) -> None:
        """Stop using the file for a while: a file that cannot be written may still be read."""
        with LOCK:
            self._drop()
        self._writes_from = time.monotonic() + RETRY_S
        if not write:
            self._reads_from = self._writes_from
        self.warn("file", f"{self.path}: {error}; calls go on without it, and it is tried again later")

    def _set_aside(self, reason: str, identity: database.Identity) -> None:
        """Start a fresh store with what can be read of a damaged one, unless another process did.

        Raises OSError where that is not allowed, and TimeoutError where another process is at it.
        """
        utc = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{self.path.name}.set-aside-{utc}-{os.getpid()}")
        try:
            with FileLock(f"{self.path}.lock", timeout=0):
                self._drop()
                if identity is None or database.identity_of(self.path) != identity:
                    return
                database.rename(self.path, aside)
                saved = self._salvage(aside)
        except (OSError, NotImplementedError) as fault:
            if isinstance(fault, TimeoutError):
                raise
            raise OSError(f"{reason}; setting it aside failed: {fault}") from fault
        text = f"{self.path}: {reason}; it now lies at {aside.name}, and a fresh store is started"
        self.warn(aside.name, f"{text} with the {saved} trials that could be read" if saved else text)

    def _salvage(self, aside: Path) -> int:
        """Create the store with the trials that can be read of a damaged one; return how many they are."""
        pairs = salvage.salvaged(aside)
        with contextlib.suppress(*database.FAULTS):
            connection = database.open_store(self.path, new=True)
            assert connection is not None
            with contextlib.closing(connection):
                return database.merge_batch(connection, pairs)
        return 0


_unusable = False  # whether a thread of the parent was using SQLite as this process was forked


def _after_fork(ended: bool) -> None:
    """Forget the parent's connections without closing them: closing would undo what the parent does."""
    global _unusable
    _unusable = _unusable or not ended
    for file in list(_FILES):
        _ABANDONED.append(dict(file._connections))
        file._connections.clear()
        file.waiting.clear()


# Nobody forks amid a transaction: the child's SQLite would believe that it holds the parent's locks.
at_fork(LOCK, _after_fork)
