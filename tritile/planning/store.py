"""Trials that this user measured: one SQLite file per GPU model, shared by every process.

Remembering must never break a call. Whatever is wrong with the file, the disk or a row, the store
warns with `StoreWarning` and goes on with what is left. Nothing read back is trusted: each value
passes the checks that any input passes.
"""

import contextlib
import functools
import math
import os
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from filelock import FileLock

from tritile.core.device import Device
from tritile.core.problem import Problem, problem_key
from tritile.core.settings import cache_dir
from tritile.core.threads import at_fork
from tritile.errors import InvalidValueError, StoreWarning
from tritile.planning import database
from tritile.planning.trial import ENVIRONMENT_COLUMNS, Row, Trial, environment_from, row_of, trial_from

__all__ = ["BATCH", "Store", "Trial", "end_stand_ins", "is_frozen", "own_store", "stand_in", "store_of"]

BATCH: Final = 256
RETRY_S: Final = 30.0  # for which a file that failed is left alone
_ATTEMPTS: Final = 4
_PAUSE_S: Final = 0.01  # the longest between two looks at a lock
_MOST_UNWRITTEN: Final = 4096
# Held while SQLite is at work in any thread, and not while one waits for a lock of another process, but for
# the tenth of a second that a commit gives those who read.
_LOCK = threading.RLock()
_STORES: "weakref.WeakSet[Store]" = weakref.WeakSet()
_ABANDONED: list[Any] = []
T = TypeVar("T")


class _Opened(NamedTuple):
    connection: sqlite3.Connection
    identity: database.Identity


class Store:
    """The trials of one GPU model in `directory` (default: `settings.cache_dir()`), opened on first use.

    Only `merge` raises, and only for a file that it cannot take. Every thread and process has a
    connection of its own. Adding is one short transaction, so that a killed process loses at most the
    trial it was adding. A file that fails, or that another process keeps locked, is left alone for `RETRY_S`
    seconds: reads find nothing meanwhile, and trials wait in memory for the next one to be added.
    A process checks a file as it first opens it. `path` is the file.

    Trials count for the GPU, the versions of Triton and its assembler, and the kernel's source that they were
    measured with (`trial.ENVIRONMENT_COLUMNS`), whatever the driver: it loads the machine code as it is.
    """

    def __init__(self, device: Device, directory: Path | None = None) -> None:
        self.device = device
        self.path = Path(directory or cache_dir()).absolute() / f"{device.slug}.sqlite3"
        self._connections: dict[tuple[int, int], _Opened] = {}
        self._warned: set[str] = set()
        self._checked: database.Identity = None
        self._reads_from = self._writes_from = -math.inf  # when the file is used again, by `time.monotonic`
        self._unwritten: dict[tuple[Any, ...], tuple[Row, Row]] = {}
        _STORES.add(self)

    def add(self, kernel: str, trial: Trial) -> None:
        """Remember a trial of the kernel with this digest, in place of an earlier one of the same config."""
        try:
            environment, row = self._environment(kernel), row_of(trial)
        except InvalidValueError as error:
            return self._warn("trial", f"a trial cannot be remembered: {error}")
        with _LOCK:
            self._unwritten[environment, row[0], row[2]] = environment, row
            if len(self._unwritten) > _MOST_UNWRITTEN:
                del self._unwritten[next(iter(self._unwritten))]
        return self._write()

    def flush(self) -> int:
        """Write the trials that could not be written when they were added; how many still cannot be."""
        self._writes_from = -math.inf
        self._write()
        return len(self._unwritten)

    def _write(self) -> None:
        written: list[Any] = []

        def put(connection: sqlite3.Connection) -> bool:
            written[:] = self._unwritten.items()
            with database.transaction(connection, "IMMEDIATE"):
                for _, (environment, row) in written:
                    database.put(connection, environment, row)
            return True

        if not self._unwritten:
            return
        if self._attempt(put, False, write=True):
            with _LOCK:
                for key, value in written:
                    if self._unwritten.get(key) is value:  # else one thread added it anew, or wrote it too
                        del self._unwritten[key]

    def trials(self, kernel: str, problem: Problem, *more: str) -> list[Trial]:
        """Everything measured for this problem, with this kernel or one of `more`, on this very device."""
        return self._selected((kernel, *more), "problem = ? ORDER BY trials.id", problem)

    def best(self, kernel: str, problem: Problem) -> Trial | None:
        """The fastest trial of this problem whose answer was checked, else the fastest that did not fail."""
        which = f"problem = ? AND {database.WORKED} ORDER BY {database.BEST_FIRST}"
        found = self._selected((kernel,), which, problem, True)
        return found[0] if found else None

    def bests(self, kernel: str, op: str) -> list[Trial]:
        """Return the best trial of each problem of this op."""
        # Not by the column of ops, which no index holds twice: a damaged one would hide its row unseen.
        found = self._selected(
            (kernel,), f"{database.WORKED} ORDER BY problem, {database.BEST_FIRST}", first=True
        )
        return [trial for trial in found if trial.problem.op == op]

    def everything(self) -> Iterator[tuple[dict[str, Any], Trial]]:
        """Every trial with its environment: the fields of `Device` that count, and `kernel`."""
        query = f"{database.SELECT_ALL} ORDER BY trials.id LIMIT {BATCH}"
        last = -1
        nothing: list[Any] = []
        while rows := self._attempt(lambda c, after: c.execute(query, (after,)).fetchall(), nothing, last):
            for environment, trial in self._valid(rows):
                yield dict(zip(ENVIRONMENT_COLUMNS, environment, strict=True)), trial
            last = rows[-1][0]

    def merge(self, other: Path) -> int:
        """Add the trials of another store of the same GPU model, where newer; how many were added.

        Raises InvalidValueError where `other` is no store, is damaged, or is of another GPU model.
        """
        pairs = list(self._valid(database.rows_of(other)))
        ours = [pair for pair in pairs if pair[0][0] == self.device.name]
        if pairs and not ours:
            raise InvalidValueError(f"{other} holds trials of {pairs[0][0][0]}, not of {self.device.name}")
        batches = [ours[start : start + BATCH] for start in range(0, len(ours), BATCH)]
        return sum(self._attempt(database.merge_batch, 0, batch, write=True) for batch in batches)

    def close(self) -> None:
        """Close the file, for all threads; a later use opens it again."""
        with _LOCK:
            while self._connections:
                self._connections.popitem()[1].connection.close()
            self._checked = None

    def _environment(self, kernel: str) -> Row:
        return environment_from([*(getattr(self.device, name) for name in ENVIRONMENT_COLUMNS[:-1]), kernel])

    def _selected(
        self, kernels: tuple[str, ...], where: str, wanted: Problem | None = None, first: bool = False
    ) -> list[Trial]:
        """Return the valid trials that meet the condition, of each problem all or only the first."""

        def selected(connection: sqlite3.Connection) -> list[Row]:
            values = *self._environment(kernels[0]), *kernels[1:]
            values += () if wanted is None else (problem_key(wanted),)
            # All at once: who reads keeps others from writing.
            return connection.execute(database.select(len(kernels), where), values).fetchall()

        rows: list[Row] = []
        with contextlib.suppress(ValueError, TypeError):  # not of a form in which anything is remembered
            rows = self._attempt(selected, rows)
        found: list[Trial] = []
        done = None
        for row in rows:
            if first and row[0] == done:
                continue
            with self._skipping():
                found.append(trial_from(row))
                done = row[0]
        return found

    def _valid(self, rows: Iterable[Sequence[Any]]) -> Iterator[tuple[Row, Trial]]:
        """Environment and trial of each row of `database.SELECT_ALL`, bad rows left out."""
        cut = 1 + len(ENVIRONMENT_COLUMNS)
        for row in rows:
            with self._skipping():
                pair = environment_from(row[1:cut]), trial_from(row[cut:])
                yield pair

    @contextlib.contextmanager
    def _skipping(self) -> Iterator[None]:
        try:
            yield
        except InvalidValueError as error:
            self._warn("rows", f"{self.path}: skipped a remembered trial that is not valid: {error}")

    def _warn(self, kind: str, text: str) -> None:
        """Say it, once for each kind of trouble."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, StoreWarning, stacklevel=4)

    def _attempt(self, work: Callable[..., T], nothing: T, *arguments: Any, write: bool = False) -> T:
        """Tell what `work(connection, *arguments)` returns, or `nothing` where the file does not let it.

        Work is done again where the file was set aside meanwhile, by this process or by another: what
        was written into the old file would be lost otherwise. Where a lock is held, it waits a moment.
        """
        result, left, pause = nothing, _ATTEMPTS, _PAUSE_S / 10
        deadline = time.monotonic() + (database.WRITE_S if write else database.READ_S)
        while left and time.monotonic() >= (self._writes_from if write else self._reads_from):
            try:
                with _LOCK:
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

    def _tried(
        self, work: Callable[..., T], nothing: T, arguments: tuple[Any, ...], create: bool
    ) -> tuple[bool, T]:
        """Tell whether that was all, and what it gave. Raises `database.FAULTS`, damage excepted."""
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
        """Use the file no more for a while: a file that cannot be written may still be read."""
        with _LOCK:
            self._drop()
        self._writes_from = time.monotonic() + RETRY_S
        if not write:
            self._reads_from = self._writes_from
        self._warn("file", f"{self.path}: {error}; calls go on without it, and it is tried again later")

    def _set_aside(self, reason: str, identity: database.Identity) -> None:
        """Start a fresh store with what can be read of a damaged one, unless another process did.

        Raises OSError where that is not allowed, and as `database.is_busy` tells.
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
        self._warn(aside.name, f"{text} with the {saved} trials that could be read" if saved else text)

    def _salvage(self, aside: Path) -> int:
        """Create the store with the trials that can be read of a damaged one; how many they are."""
        pairs = database.salvaged(aside)
        with contextlib.suppress(*database.FAULTS):
            connection = database.open_store(self.path, new=True)
            assert connection is not None
            with contextlib.closing(connection):
                return database.merge_batch(connection, pairs)
        return 0


_unusable = False  # whether SQLite was amid something in a thread of the parent as it forked this process


def _after_fork(ended: bool) -> None:
    """Forget the parent's connections without closing them: closing would undo what the parent does."""
    global _unusable
    _unusable = _unusable or not ended
    for store in list(_STORES):
        _ABANDONED.append(dict(store._connections))
        store._connections.clear()
        store._unwritten.clear()  # the parent writes them


# Nobody forks amid a transaction: the child's SQLite would believe that it holds the parent's locks.
at_fork(_LOCK, _after_fork)


@functools.lru_cache(maxsize=64)
def _store_in(device: Device, directory: Path) -> Store:
    return Store(device, directory)


def own_store(device: Device) -> Store:
    """This process's own store of a device, in the cache directory now in force."""
    return _store_in(device, cache_dir())


_standing_in: dict[Device, Store] = {}


def store_of(device: Device) -> Store:
    """Tell what this process knows of a device: its own store, or what stands in for it."""
    return _standing_in.get(device) or own_store(device)


def stand_in(store: Store) -> None:
    """Have `store_of` give this store for its device."""
    _standing_in[store.device] = store


def end_stand_ins() -> None:
    """Have `store_of` give this process's own stores again."""
    _standing_in.clear()


def is_frozen(device: Device) -> bool:
    """Tell whether what is known of a device stays as it is, so that there is no use in measuring more."""
    return device in _standing_in
