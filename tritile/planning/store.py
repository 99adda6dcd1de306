"""Remember trials that this user measured: one SQLite file per GPU model, shared by every process.

Remembering must never break a call. Whatever is wrong with the file, the disk or a row, the store warns with
`StoreWarning` and goes on with what is left. Nothing read back is trusted: each value passes the checks that
any input passes, in `trial.py`.
"""

import contextlib
import functools
import gzip
import os
import sqlite3
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from filelock import FileLock

from tritile.core.device import Device
from tritile.core.problem import Problem, problem_key
from tritile.core.settings import cache_dir
from tritile.core.threads import at_fork
from tritile.errors import FileError, InvalidValueError, StoreWarning, callers_level
from tritile.planning.trial import (
    ENVIRONMENT_COLUMNS,
    TRIAL_COLUMNS,
    Row,
    Trial,
    best_of,
    environment_from,
    rank,
    row_of,
    trial_from,
)

__all__ = ["Store", "Trial", "store_of"]

READ_S = 1.0  # for which a read waits for a lock of another process
WRITE_S = 10.0  # for which a write does
_VERSION: Final = 1
_ATTEMPTS: Final = 4  # at a file that other processes set aside meanwhile
# `arch` has no type, so that 90 and "90" stay apart.
_SCHEMA: Final = (
    "CREATE TABLE environments (id INTEGER PRIMARY KEY, name TEXT NOT NULL, backend TEXT NOT NULL, "
    "arch NOT NULL, processors INTEGER NOT NULL, l2_bytes INTEGER NOT NULL, shared_memory INTEGER NOT NULL, "
    "triton TEXT NOT NULL, compiler TEXT NOT NULL, kernel TEXT NOT NULL, "
    f"UNIQUE ({', '.join(ENVIRONMENT_COLUMNS)}))",
    "CREATE TABLE trials (id INTEGER PRIMARY KEY, environment INTEGER NOT NULL, problem TEXT NOT NULL, "
    "op TEXT NOT NULL, config TEXT NOT NULL, us REAL, spread REAL, registers INTEGER, spills INTEGER, "
    "shared INTEGER, error REAL, failure TEXT, measured_utc TEXT NOT NULL, "
    "UNIQUE (environment, problem, config))",
)
_ENVIRONMENT: Final = ", ".join(ENVIRONMENT_COLUMNS)
_TRIAL: Final = ", ".join(TRIAL_COLUMNS)
_JOINED: Final = "FROM trials JOIN environments ON environments.id = environment"
_ON_DEVICE: Final = " AND ".join(f"{name} = ?" for name in ENVIRONMENT_COLUMNS[:-1])
_HERE: Final = f"{_ON_DEVICE} AND kernel = ?"
_SELECT_ALL: Final = f"SELECT {_ENVIRONMENT}, {_TRIAL} {_JOINED} ORDER BY trials.id"
_ADD_ENVIRONMENT: Final = (
    f"INSERT OR IGNORE INTO environments ({_ENVIRONMENT}) "
    f"VALUES ({', '.join('?' for _ in ENVIRONMENT_COLUMNS)})"
)
_ADD_TRIAL: Final = (
    f"INSERT INTO trials (environment, {_TRIAL}) SELECT id, {', '.join('?' for _ in TRIAL_COLUMNS)} "
    f"FROM environments WHERE {_HERE} ON CONFLICT (environment, problem, config) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in TRIAL_COLUMNS)
)
_IF_NEWER: Final = " WHERE coalesce(julianday(trials.measured_utc), 0) < julianday(excluded.measured_utc)"
# Held while SQLite works in any thread. Nobody forks meanwhile: the child's SQLite would believe that it
# holds the parent's locks.
_LOCK: Final = threading.RLock()
_unusable = False  # whether a thread of the parent was using SQLite as this process was forked nevertheless
T = TypeVar("T")


def _after_fork(ended: bool) -> None:
    global _unusable
    _unusable = _unusable or not ended


at_fork(_LOCK, _after_fork)


class _DamagedError(Exception):
    """The file is not a store: it is to be set aside."""


class _NewerError(Exception):
    """The file belongs to a later version of tritile: it is to be left alone."""


_FAULTS: Final = (sqlite3.Error, OSError, OverflowError, UnicodeError, _DamagedError, _NewerError)


# --- The file ---


def _connected(where: str, wait_s: float, uri: bool = False) -> contextlib.closing[sqlite3.Connection]:
    connection = sqlite3.connect(where, wait_s, isolation_level="IMMEDIATE", uri=uri)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return contextlib.closing(connection)


def _is_store(connection: sqlite3.Connection) -> bool:
    """True for a store, False for an empty file. Raises _DamagedError or _NewerError for anything else."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
    texts = tuple(text for (text,) in connection.execute(query))
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > _VERSION:
        raise _NewerError(f"is of version {version}, made by a newer tritile")
    if texts and texts != _SCHEMA:  # the exact text also keeps out triggers, views and lost constraints
        raise _DamagedError("does not have the tables of a store")
    return bool(texts)


def _create(connection: sqlite3.Connection) -> None:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if not _is_store(connection):
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")


def _check(connection: sqlite3.Connection) -> None:
    """Raise _DamagedError where pages, rows and indexes do not fit together: lookups would miss rows.

    It reads the whole file, some 3 ms for each megabyte.
    """
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise _DamagedError(f"is damaged ({str(found).splitlines()[-1][:200]})")


def _is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, _DamagedError) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _put(connection: sqlite3.Connection, pairs: Sequence[tuple[Row, Row]], condition: str = "") -> int:
    """Write environments with rows of trials, all or none; return how many were new or replaced another."""
    with connection:
        connection.executemany(_ADD_ENVIRONMENT, dict.fromkeys(environment for environment, _ in pairs))
        rows = ((*row, *environment) for environment, row in pairs)
        return connection.executemany(_ADD_TRIAL + condition, rows).rowcount


def rows_of(path: Path) -> list[Row]:
    """Return environment and trial of each row of another store, or of a .gz of one, unchecked.

    Raises FileError where it cannot be read.
    """
    if not path.is_file():
        raise FileError(f"{path} is not there, or no regular file")
    try:
        zipped = path.suffix == ".gz"
        where = ":memory:" if zipped else f"{path.absolute().as_uri()}?mode=ro"
        with _connected(where, WRITE_S, uri=True) as connection:
            if zipped:
                connection.deserialize(gzip.decompress(path.read_bytes()))
            if not _is_store(connection):
                raise _DamagedError("holds nothing")
            _check(connection)
            return connection.execute(_SELECT_ALL).fetchall()
    except (*_FAULTS, EOFError, zlib.error) as error:
        raise FileError(f"{path} is not a store that can be read: {error}") from error


# --- The store ---


def _pair_from(row: Row) -> tuple[Row, Trial]:
    cut = len(ENVIRONMENT_COLUMNS)
    return environment_from(row[:cut]), trial_from(row[cut:])


class Store:
    """Remember the trials of one GPU model in `directory` (default: `settings.cache_dir()`).

    `path` is the file. `lost` counts trials that could not be written. Only `merge` and `of_file` raise, and
    only for a file that they cannot take. Adding is one short transaction, so that a killed process loses at
    most what it was adding.

    Trials count for the environment that they were measured in: see `trial.ENVIRONMENT_COLUMNS`.
    """

    def __init__(self, device: Device, directory: Path | None = None) -> None:
        self.device = device
        self.path = Path(directory or cache_dir()).absolute() / f"{device.slug}.sqlite3"
        self.lost = 0
        self._warned: set[str] = set()
        self._checked: tuple[int, int] | None = None

    def add(self, kernel: str, *trials: Trial) -> None:
        """Remember trials of the kernel with this digest; each replaces an earlier one of the same config."""
        pairs = []
        for trial in trials:
            try:
                pairs.append((self._environment(kernel), row_of(trial)))
            except InvalidValueError as error:
                self._warn("trial", f"a trial cannot be remembered: {error}")
        if pairs and self._use(lambda connection: _put(connection, pairs), None, write=True) is None:
            self.lost += len(pairs)

    def trials(self, kernel: str, problem: Problem, *more: str) -> list[Trial]:
        """Return all trials of this problem, with this kernel or one of `more`, on this very device."""
        return self._trials((kernel, *more), problem)

    def best(self, kernel: str, problem: Problem) -> Trial | None:
        """Return the fastest trial of this problem whose answer was checked, else the fastest that works."""
        return best_of(self.trials(kernel, problem))

    def bests(self, kernel: str, op: str) -> list[Trial]:
        found: dict[Problem, Trial] = {}
        for trial in self._trials((kernel,)):
            if trial.works and trial.problem.op == op:
                found[trial.problem] = min(found.get(trial.problem, trial), trial, key=rank)
        return list(found.values())

    def problems(self, kernel: str) -> list[str]:
        """Return the keys of the problems that were measured with this kernel on this very device."""
        with contextlib.suppress(ValueError, TypeError):  # nothing of this form is ever remembered
            query = f"SELECT DISTINCT problem {_JOINED} WHERE {_HERE}"
            found = self._selected(query, self._environment(kernel))
            return [text for (text,) in found if isinstance(text, str)]
        return []

    def everything(self) -> Iterator[tuple[dict[str, Any], Trial]]:
        """Yield every trial with its environment, by name of `ENVIRONMENT_COLUMNS`."""
        for environment, trial in self._valid(self._selected(_SELECT_ALL), _pair_from):
            yield dict(zip(ENVIRONMENT_COLUMNS, environment, strict=True)), trial

    def of_file(self, other: Path) -> list[tuple[Row, Trial]]:
        """Return environment and trial of each row of this GPU model in another store, or a .gz of one.

        Raises FileError where that is not a store, is damaged, or holds trials of other GPU models alone.
        """
        pairs = list(self._valid(rows_of(other), _pair_from))
        ours = [pair for pair in pairs if pair[0][0] == self.device.name]
        if pairs and not ours:
            raise FileError(f"{other} holds trials of {pairs[0][0][0]}, not of {self.device.name}")
        return ours

    def merge(self, other: Path) -> int:
        """Add the trials of another store, where newer; return how many were added.

        Raises as `of_file` does.
        """
        pairs = [(environment, row_of(trial)) for environment, trial in self.of_file(other)]
        return self._use(lambda connection: _put(connection, pairs, _IF_NEWER), 0, write=True)

    def _environment(self, kernel: str) -> Row:
        return environment_from([*(getattr(self.device, name) for name in ENVIRONMENT_COLUMNS[:-1]), kernel])

    def _trials(self, kernels: tuple[str, ...], problem: Problem | None = None) -> list[Trial]:
        with contextlib.suppress(ValueError, TypeError):  # nothing of this form is ever remembered
            values: Row = (*self._environment(kernels[0]), *kernels[1:])
            where = f"{_ON_DEVICE} AND kernel IN ({', '.join('?' for _ in kernels)})"
            if problem is not None:
                where, values = f"{where} AND problem = ?", (*values, problem_key(problem))
            query = f"SELECT {_TRIAL} {_JOINED} WHERE {where} ORDER BY trials.id"
            return list(self._valid(self._selected(query, values), trial_from))
        return []

    def _selected(self, query: str, values: Row = ()) -> list[Row]:
        nothing: list[Row] = []
        return self._use(lambda connection: connection.execute(query, values).fetchall(), nothing)

    def _valid(self, rows: Iterable[Row], made: Callable[[Row], T]) -> Iterator[T]:
        """Yield what is made of each row; warn of bad rows, once, and skip them."""
        for row in rows:
            try:
                yield made(row)
            except InvalidValueError as error:
                self._warn("rows", f"{self.path}: skipped a remembered trial that is not valid: {error}")

    def _warn(self, kind: str, text: str) -> None:
        """Warn with StoreWarning, once for each kind of trouble."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, StoreWarning, stacklevel=callers_level())

    def _use(self, work: Callable[[sqlite3.Connection], T], nothing: T, write: bool = False) -> T:
        """Return what `work(connection)` gives, or `nothing` where there is no file or it does not work.

        A damaged file is set aside. What was written to a file that was set aside meanwhile is written again.
        """
        try:
            with _LOCK:
                if _unusable:
                    raise OSError("the parent was using the file as it forked this process")
                for _ in range(_ATTEMPTS):
                    identity = self._identity(create=write)
                    if identity is None:
                        return nothing
                    try:
                        result = self._done(work, WRITE_S if write else READ_S, identity)
                    except _FAULTS as error:
                        if _is_damage(error):
                            self._set_aside(str(error), identity)
                        elif self._identity() == identity:
                            raise
                    else:
                        if not write or self._identity() == identity:
                            return result
                raise OSError("other processes set it aside again and again")
        except _FAULTS as error:
            self._warn("file", f"{self.path}: {error}; calls go on without it")
        return nothing

    def _done(self, work: Callable[[sqlite3.Connection], T], wait_s: float, identity: tuple[int, int]) -> T:
        with _connected(str(self.path), wait_s) as connection:
            if not _is_store(connection):
                _create(connection)
            if identity != self._checked:
                _check(connection)
                self._checked = identity
            return work(connection)

    def _identity(self, create: bool = False) -> tuple[int, int] | None:
        """Return device and inode of the file, None without one: they tell a file from its successor."""
        if create:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return None
        return facts.st_dev, facts.st_ino

    def _set_aside(self, reason: str, identity: tuple[int, int]) -> None:
        """Rename a damaged file, unless another process did, so that work starts a fresh one.

        Raises OSError where that is not allowed, or another process uses the file.
        """
        utc = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{self.path.name}.set-aside-{utc}-{os.getpid()}")
        try:
            with FileLock(f"{self.path}.lock", timeout=WRITE_S):
                if self._identity() != identity:
                    return
                with _connected(str(self.path), READ_S) as connection:
                    # Others end their transactions first: no journal is left to meet the fresh file.
                    try:
                        connection.execute("BEGIN EXCLUSIVE")
                    except sqlite3.Error as error:
                        if not _is_damage(error):
                            raise
                    self.path.rename(aside)
        except (*_FAULTS, NotImplementedError) as error:
            raise OSError(f"{reason}; setting it aside failed: {error}") from error
        self._warn(
            aside.name, f"{self.path}: {reason}; it now lies at {aside.name}, and a fresh store is started"
        )


@functools.lru_cache(maxsize=64)
def _store_in(device: Device, directory: Path) -> Store:
    return Store(device, directory)


def store_of(device: Device) -> Store:
    """Return the store of a device in the cache directory now in force."""
    return _store_in(device, cache_dir())
