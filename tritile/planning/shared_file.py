"""Use a store's SQLite file beside other processes, which may lock it, damage it or set it aside meanwhile.

Whatever is wrong with the file or the disk, work goes on without it, after a StoreWarning. A connection is
kept for further work, as opening one takes four times as long as a read. A forked child opens its own.
"""

import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Final, TypeVar

from filelock import FileLock

from tritile.core.threads import at_fork
from tritile.errors import StoreWarning
from tritile.planning import database
from tritile.planning.database import FAULTS, DamagedError, is_busy

READ_S = 1.0  # for which a read waits for a lock
WRITE_S = 10.0  # for which a write waits for a lock
RETRY_S: Final = 30.0  # for which a file that failed is left alone
_ATTEMPTS: Final = 4
_PAUSE_S: Final = 0.01  # the longest time between two attempts at a lock
# Held while SQLite works in any thread. Not held while a thread waits for a lock of another process, except
# for the tenth of a second that a commit gives readers.
LOCK: Final = threading.RLock()
_unusable = False  # whether a thread of the parent was using SQLite as this process was forked
Identity = tuple[int, int] | None
T = TypeVar("T")


def _after_fork(ended: bool) -> None:
    global _unusable
    _unusable = _unusable or not ended


# Nobody forks amid a transaction: the child's SQLite would believe that it holds the parent's locks.
at_fork(LOCK, _after_fork)


def _identity_of(path: Path) -> Identity:
    """Return device and inode of the file, None without one: a file set aside and its successor differ."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


class SharedFile:
    """Give work a connection to the file at `path`, which is checked as a whole once a process.

    A file that fails, or that another process keeps locked, is left alone for `RETRY_S` seconds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned: set[str] = set()
        self._checked: Identity = None
        self._kept: tuple[int, Identity, sqlite3.Connection] | None = None  # of a process, to a file
        self._reads_from = self._writes_from = -inf  # when the file is used again, by `time.monotonic`

    def attempt(self, work: Callable[[sqlite3.Connection], T], nothing: T, write: bool = False) -> T:
        """Return what `work(connection)` gives, or `nothing` where the file does not let it.

        Work is done again if the file was set aside meanwhile, by this process or by another: what was
        written into the old file would be lost. Where a lock is held, try again until `READ_S` or `WRITE_S`.
        """
        result, left, pause = nothing, _ATTEMPTS, _PAUSE_S / 10
        deadline = time.monotonic() + (WRITE_S if write else READ_S)
        while left and time.monotonic() >= (self._writes_from if write else self._reads_from):
            try:
                with LOCK:
                    done, result = self._tried(work, nothing, write)
            except FAULTS as error:
                if not is_busy(error) or time.monotonic() >= deadline:
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
        self._writes_from = -inf

    def warn(self, kind: str, text: str) -> None:
        """Warn with StoreWarning, once for each kind of trouble."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, StoreWarning, stacklevel=5)

    def _tried(self, work: Callable[[sqlite3.Connection], T], nothing: T, create: bool) -> tuple[bool, T]:
        """Return whether the work is done, and its result. Raises `FAULTS`, damage excepted."""
        identity = None
        try:
            if _unusable:
                raise OSError("the parent was using the file as it forked this process")
            identity = _identity_of(self.path)
            if identity is None and not create:
                return True, nothing
            connection = self._connection(identity, create)
            if connection is None:
                return True, nothing
            self._checked = identity = identity or _identity_of(self.path)
            self._kept = os.getpid(), identity, connection
            result = work(connection)
            return _identity_of(self.path) == identity, result
        except FAULTS as error:
            self._close()
            damaged = isinstance(error, DamagedError)
            if damaged or database.has_code(error, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                self._set_aside(str(error), identity)
            elif getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_READONLY_DBMOVED:
                raise
            return False, nothing

    def _connection(self, identity: Identity, create: bool) -> sqlite3.Connection | None:
        """Return this process's connection to this very file, or a new one; None where the file is empty."""
        if self._kept is not None and self._kept[:2] == (os.getpid(), identity):
            return self._kept[2]
        self._close()
        return database.opened(self.path, create, identity is None or identity != self._checked)

    def _close(self) -> None:
        """Close the connection that is kept; a child only forgets that of its parent."""
        kept, self._kept = self._kept, None
        if kept is not None and kept[0] == os.getpid():
            kept[2].close()

    def _leave_alone(self, error: Exception, write: bool) -> None:
        """Stop using the file for a while: a file that cannot be written may still be read."""
        self._writes_from = time.monotonic() + RETRY_S
        if not write:
            self._reads_from = self._writes_from
        self.warn("file", f"{self.path}: {error}; calls go on without it, and it is tried again later")

    def _set_aside(self, reason: str, identity: Identity) -> None:
        """Rename a damaged file, so that work starts a fresh one, unless another process did.

        Raises OSError where that is not allowed, and TimeoutError where another process is at it.
        """
        utc = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{self.path.name}.set-aside-{utc}-{os.getpid()}")
        try:
            with FileLock(f"{self.path}.lock", timeout=0):
                if identity is None or _identity_of(self.path) != identity:
                    return
                database.rename(self.path, aside)
        except (OSError, NotImplementedError) as fault:
            if isinstance(fault, TimeoutError):
                raise
            raise OSError(f"{reason}; setting it aside failed: {fault}") from fault
        text = f"{self.path}: {reason}; it now lies at {aside.name}, and a fresh store is started"
        self.warn(aside.name, text)
