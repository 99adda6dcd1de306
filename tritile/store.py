"""Trials that this user measured: one SQLite file per GPU model, shared by every process.

Remembering must never break a call. Whatever is wrong with the file, the disk or a row, the store
warns with `StoreWarning` and goes on with what is left. Nothing read back is trusted: each value
passes the checks that any input passes.
"""

import contextlib
import functools
import json
import math
import os
import sqlite3
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from filelock import FileLock

from tritile.config import Config
from tritile.device import Device
from tritile.errors import InvalidValueError, StoreWarning
from tritile.problem import Problem, problem_from_dict, problem_key, problem_to_dict
from tritile.settings import cache_dir

APPLICATION_ID: Final = 0x74726974
VERSION: Final = 1
MAX_TEXT: Final = 1 << 16
MAX_US: Final = 1e12
BUSY_S = 60.0
_ATTEMPTS: Final = 4
_BATCH: Final = 256
_ENVIRONMENT: Final = (
    "name", "backend", "arch", "processors", "l2_bytes", "shared_memory", "triton", "compiler", "kernel"
)  # fmt: skip
_TRIAL: Final = (
    "problem", "op", "config", "us", "spread", "registers", "spills", "shared", "error", "failure",
    "measured_utc",
)  # fmt: skip
# `arch` has no type, so that 90 and "90" stay apart.
_SCHEMA: Final = (
    "CREATE TABLE environments (id INTEGER PRIMARY KEY, name TEXT NOT NULL, backend TEXT NOT NULL, "
    "arch NOT NULL, processors INTEGER NOT NULL, l2_bytes INTEGER NOT NULL, shared_memory INTEGER NOT NULL, "
    "triton TEXT NOT NULL, compiler TEXT NOT NULL, kernel TEXT NOT NULL, "
    f"UNIQUE ({', '.join(_ENVIRONMENT)}))",
    "CREATE TABLE trials (id INTEGER PRIMARY KEY, environment INTEGER NOT NULL, problem TEXT NOT NULL, "
    "op TEXT NOT NULL, config TEXT NOT NULL, us REAL, spread REAL, registers INTEGER, spills INTEGER, "
    "shared INTEGER, error REAL, failure TEXT, measured_utc TEXT NOT NULL, "
    "UNIQUE (environment, problem, config))",
)


def _bounded(names: Iterable[str]) -> str:
    """Columns to select, cut so that a giant value never reaches Python whole."""
    cut = "CASE WHEN typeof({0}) IN ('text', 'blob') THEN substr({0}, 1, {1}) ELSE {0} END"
    return ", ".join(cut.format(name, MAX_TEXT + 1) for name in names)


_JOINED: Final = "FROM trials JOIN environments ON environments.id = environment"
_HERE: Final = " AND ".join(f"{name} = ?" for name in _ENVIRONMENT)
_SELECT: Final = f"SELECT {_bounded(_TRIAL)} {_JOINED} WHERE {_HERE}"
_ALL: Final = f"SELECT trials.id, {_bounded((*_ENVIRONMENT, *_TRIAL))} {_JOINED} WHERE trials.id > ?"
_ADD_ENVIRONMENT: Final = (
    f"INSERT OR IGNORE INTO environments ({', '.join(_ENVIRONMENT)}) "
    f"VALUES ({', '.join('?' * len(_ENVIRONMENT))})"
)
_ADD_TRIAL: Final = (
    f"INSERT INTO trials (environment, {', '.join(_TRIAL)}) SELECT id, {', '.join('?' * len(_TRIAL))} "
    f"FROM environments WHERE {_HERE} ON CONFLICT (environment, problem, config) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _TRIAL)
)
_LOCK = threading.RLock()
_STORES: "weakref.WeakSet[Store]" = weakref.WeakSet()
_ABANDONED: list[Any] = []
_FAULTS: Final = (sqlite3.Error, OSError, OverflowError, UnicodeError)
_Identity = tuple[int, int] | None
T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """One config, measured on one problem, or the reason why it could not be.

    `us` is the median time and `spread` the distance of its 20th and 80th percentiles over it. Registers
    are per thread; spills and shared memory in bytes. `error` is the relative norm against a reference,
    None where the answer was not checked. `failure` is a short line, None where nothing failed.
    """

    problem: Problem
    config: Config
    us: float | None
    spread: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    error: float | None = None
    failure: str | None = None
    measured_utc: str = ""


class _Opened(NamedTuple):
    connection: sqlite3.Connection
    identity: _Identity


class _DamagedError(Exception):
    """The file is no store: it is to be set aside."""


class _NewerError(Exception):
    """The file belongs to a later version of tritile: it is to be left alone."""


def parsed(text: Any) -> Any:
    """The value of a short JSON text. Raises InvalidValueError for anything else."""
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise InvalidValueError(f"{str(text)[:80]!r} is no JSON text of at most {MAX_TEXT} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(f"{text[:80]!r} is no JSON: {error}") from error


def pair_from(problem: Any, config: Any) -> tuple[Problem, Config]:
    """The problem and the config of two parsed dictionaries. Raises InvalidValueError for anything else."""
    try:
        pair = problem_from_dict(problem), Config.from_dict(config)
        hash(pair)
        json.dumps([problem_to_dict(pair[0]), pair[1].to_dict()], allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError(f"no problem and config: {str(error)[:200]}") from error
    return pair


def number_from(value: Any, low: float, high: float, whole: bool = False) -> Any:
    """A number from low to high, or None, as it is. Raises InvalidValueError for anything else."""
    kind = int if whole else (int, float)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high
    ):
        raise InvalidValueError(f"{str(value)[:80]!r}: wanted a number from {low} to {high}")
    return value


def _moment(text: Any) -> float:
    """Seconds since 1970 of an ISO time, minus infinity of "". Raises InvalidValueError for anything else."""
    try:
        when = datetime.fromisoformat(text) if text else None
        aware = when.replace(tzinfo=UTC) if when and when.tzinfo is None else when
        return aware.timestamp() if aware else -math.inf
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidValueError(f"{str(text)[:80]!r} is no ISO time") from error


def _trial(row: Sequence[Any]) -> Trial:
    """The trial of one row. Raises InvalidValueError for a row that `_row` cannot have made."""
    problem_text, op, config_text, us, spread, registers, spills, shared, error, failure, measured = row
    problem, config = pair_from(parsed(problem_text), parsed(config_text))
    # A second spelling of the same key would be a second row of the same trial.
    if (problem_key(problem), problem.op, config.key) != (problem_text, op, config_text):
        raise InvalidValueError(f"{problem_text[:80]!r} and {config_text[:80]!r} are not spelled as keys are")
    if not (failure is None or (isinstance(failure, str) and len(failure) <= MAX_TEXT)):
        raise InvalidValueError(f"{str(failure)[:80]!r} is no line of text")
    if not isinstance(measured, str) or (us is None and failure is None):
        raise InvalidValueError("a trial has a time or a failure, and a date")
    _moment(measured)
    number_from(us, math.ulp(0.0), MAX_US)
    number_from(spread, 0, MAX_US)
    number_from(error, 0, 1.7e308)
    for value in (registers, spills, shared):
        number_from(value, 0, 2**31, whole=True)
    return Trial(problem, config, us, spread, registers, spills, shared, error, failure, measured)


def _row(trial: Trial) -> tuple[Any, ...]:
    """The row of a trial, which `_trial` reads back. Raises InvalidValueError where it could not."""
    us, spread, error, failure = trial.us, trial.spread, trial.error, trial.failure
    # A time that is no number, or an answer that is none, is a failure: it must not win, nor be lost.
    if us is not None and not 0 < us <= MAX_US:
        us, failure = None, failure or f"measured {us} us"
    if error is not None and not error <= 1.7e308:
        error, failure = None, failure or f"wrong answer: relative error {error}"
    spread = spread if spread is not None and math.isfinite(spread) else None
    if failure is not None:  # one line of plain text, whatever a compiler said
        failure = " ".join("".join(c if c.isprintable() else " " for c in failure[:2000]).split())
    trial = replace(trial, us=us, spread=spread, error=error, failure=failure)
    try:
        keys = (problem_key(trial.problem), trial.problem.op, trial.config.key)
    except (ValueError, TypeError, RecursionError) as fault:
        raise InvalidValueError(str(fault)[:200]) from fault
    row = (*keys, *(getattr(trial, name) for name in _TRIAL[3:]))
    _trial(row)
    return row


def _environment(row: Sequence[Any]) -> tuple[Any, ...]:
    """The row of an environment, checked. Raises InvalidValueError for one that no device has."""
    for name, value in zip(_ENVIRONMENT, row, strict=True):
        count = isinstance(value, int) and 0 <= value < 2**63
        text = isinstance(value, str) and len(value) <= MAX_TEXT
        whole = name in ("processors", "l2_bytes", "shared_memory")
        if not (count if whole else text or (name == "arch" and count)):
            raise InvalidValueError(f"{name} = {str(value)[:80]!r} is not of a GPU")
    return tuple(row)


def _identity(path: Path) -> _Identity:
    """Which file lies at this path now: a file set aside and its successor differ in it."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def _open(where: str, uri: bool = False) -> sqlite3.Connection:
    # A connection is used by its own thread only; `close` closes those of other threads too.
    connection = sqlite3.connect(where, BUSY_S, isolation_level=None, check_same_thread=False, uri=uri)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")


def _is_store(connection: sqlite3.Connection) -> bool:
    """Whether it holds our tables; False for a new file. Raises _DamagedError or _NewerError for another."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
    try:
        # One snapshot: else the tables that another process creates meanwhile would seem a stranger's.
        with contextlib.nullcontext() if connection.in_transaction else _transaction(connection, "DEFERRED"):
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            texts = connection.execute(query).fetchall()
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR:
            raise _DamagedError(f"is of no format that SQLite knows ({error})") from error
        raise
    if owner == APPLICATION_ID and version > VERSION:
        raise _NewerError(f"is of version {version}, made by a newer tritile")
    if texts and owner != APPLICATION_ID:
        raise _DamagedError("belongs to another program")
    # The exact text also keeps out triggers, views and lost constraints.
    if texts and tuple(text for (text,) in texts) != _SCHEMA:
        raise _DamagedError("has not the tables of a store")
    return bool(texts)


def _create(connection: sqlite3.Connection) -> None:
    with _transaction(connection, "IMMEDIATE"):
        if not _is_store(connection):
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")


def _put(connection: sqlite3.Connection, environment: tuple[Any, ...], row: tuple[Any, ...]) -> None:
    connection.execute(_ADD_ENVIRONMENT, environment)
    connection.execute(_ADD_TRIAL, (*row, *environment))


def _merge_batch(connection: sqlite3.Connection, batch: Sequence[tuple[tuple[Any, ...], Trial]]) -> int:
    """Adds those trials that are newer than what is there, or replace a bad row; how many they are."""
    merged = 0
    with _transaction(connection, "IMMEDIATE"):
        for environment, trial in batch:
            row = _row(trial)
            query = f"{_SELECT} AND problem = ? AND config = ?"
            known = connection.execute(query, (*environment, row[0], row[2])).fetchone()
            with contextlib.suppress(InvalidValueError):
                if known and _moment(_trial(known).measured_utc) >= _moment(trial.measured_utc):
                    continue
            _put(connection, environment, row)
            merged += 1
    return merged


def _rows_of(path: Path) -> list[Any]:
    """The rows of `_ALL` in another store. Raises InvalidValueError where it cannot be read as one."""
    try:
        with contextlib.closing(_open(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            if not _is_store(connection):
                raise _DamagedError("holds nothing")
            return connection.execute(_ALL, (-1,)).fetchall()
    except (*_FAULTS, _DamagedError, _NewerError) as error:
        raise InvalidValueError(f"{path} is no store that can be read: {error}") from error


def _is_damage(error: Exception) -> bool:
    codes = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return isinstance(error, _DamagedError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in codes


def _rename(path: Path, aside: Path) -> None:
    """Rename a database with its journal. Raises OSError."""
    connection = None
    try:
        # Lets others end their transactions: a journal of theirs must not meet the fresh file.
        with contextlib.suppress(sqlite3.Error):
            connection = _open(str(path))
            connection.execute("BEGIN EXCLUSIVE")
        with contextlib.suppress(FileNotFoundError):
            path.with_name(f"{path.name}-journal").rename(f"{aside}-journal")
        path.rename(aside)
    finally:
        if connection is not None:
            connection.close()


class Store:
    """The trials of one GPU model in `directory` (default: `settings.cache_dir()`), opened on first use.

    Only `merge` raises, and only for a file that it cannot take. Every thread and process has a
    connection of its own. Adding is one short transaction, so that a killed process loses at most the
    trial it was adding. `path` is the file.
    """

    def __init__(self, device: Device, directory: Path | None = None) -> None:
        self.device = device
        self.path = Path(directory or cache_dir()).absolute() / f"{device.slug}.sqlite3"
        self._connections: dict[tuple[int, int], _Opened] = {}
        self._warned: set[str] = set()
        self._reads = self._writes = True
        _STORES.add(self)

    def add(self, kernel: str, trial: Trial) -> None:
        """Remember a trial of the kernel with this digest, in place of an earlier one of the same config."""

        def put(connection: sqlite3.Connection) -> None:
            with _transaction(connection, "IMMEDIATE"):
                _put(connection, environment, row)

        try:
            environment, row = self._environment(kernel), _row(trial)
        except InvalidValueError as error:
            return self._warn("trial", f"a trial cannot be remembered: {error}")
        return self._attempt(put, None, write=True)

    def trials(self, kernel: str, problem: Problem) -> list[Trial]:
        """Everything measured for this problem, with this kernel on this very device."""
        return self._selected(kernel, "problem = ? ORDER BY trials.id", problem)

    def best(self, kernel: str, problem: Problem) -> Trial | None:
        """The fastest trial of this problem that did not fail, None where there is none."""
        found = self._selected(kernel, "problem = ? AND failure IS NULL ORDER BY us", problem, first=True)
        return found[0] if found else None

    def bests(self, kernel: str, op: str) -> list[Trial]:
        """The best trial of each problem of this op."""
        return self._selected(kernel, "op = ? AND failure IS NULL ORDER BY problem, us", op, first=True)

    def everything(self) -> Iterator[tuple[dict[str, Any], Trial]]:
        """Every trial with its environment: the fields of `Device` that count, and `kernel`."""
        query = f"{_ALL} ORDER BY trials.id LIMIT {_BATCH}"
        last = -1
        nothing: list[Any] = []
        while rows := self._attempt(lambda c, after: c.execute(query, (after,)).fetchall(), nothing, last):
            for environment, trial in self._valid(rows):
                yield dict(zip(_ENVIRONMENT, environment, strict=True)), trial
            last = rows[-1][0]

    def merge(self, other: Path) -> int:
        """Add the trials of another store of the same GPU model, where newer; how many were added.

        Raises InvalidValueError where `other` is no store, is damaged, or is of another GPU model.
        """
        pairs = list(self._valid(_rows_of(other)))
        ours = [pair for pair in pairs if pair[0][0] == self.device.name]
        if pairs and not ours:
            raise InvalidValueError(f"{other} holds trials of {pairs[0][0][0]}, not of {self.device.name}")
        batches = [ours[start : start + _BATCH] for start in range(0, len(ours), _BATCH)]
        return sum(self._attempt(_merge_batch, 0, batch, write=True) for batch in batches)

    def close(self) -> None:
        """Close the file, for all threads; a later use opens it again."""
        with _LOCK:
            while self._connections:
                self._connections.popitem()[1].connection.close()

    def _environment(self, kernel: str) -> tuple[Any, ...]:
        return _environment([*(getattr(self.device, name) for name in _ENVIRONMENT[:-1]), kernel])

    def _selected(self, kernel: str, where: str, wanted: Problem | str, first: bool = False) -> list[Trial]:
        """The valid trials that meet the condition, of each problem all or only the first."""

        def select(connection: sqlite3.Connection) -> list[Trial]:
            found: list[Trial] = []
            done = None
            with contextlib.closing(connection.execute(f"{_SELECT} AND {where}", values)) as rows:
                for row in rows:
                    if first and row[0] == done:
                        continue
                    with self._skipping():
                        found.append(_trial(row))
                        done = row[0]
            return found

        try:
            values = (*self._environment(kernel), wanted if isinstance(wanted, str) else problem_key(wanted))
        except (ValueError, TypeError):
            return []  # not of a form in which anything is remembered
        return self._attempt(select, [])

    def _valid(self, rows: Iterable[Sequence[Any]]) -> Iterator[tuple[tuple[Any, ...], Trial]]:
        """Environment and trial of each row of `_ALL`, bad rows left out."""
        cut = 1 + len(_ENVIRONMENT)
        for row in rows:
            with self._skipping():
                pair = _environment(row[1:cut]), _trial(row[cut:])
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
        """What `work(connection, *arguments)` returns, or `nothing` where the file does not let it.

        Work is done again where the file was set aside meanwhile, by this process or by another: what
        was written into the old file would be lost otherwise.
        """
        result, create = nothing, write
        with _LOCK:
            for _ in range(_ATTEMPTS):
                identity = None
                try:
                    if not (self._writes if write else self._reads):
                        return nothing
                    identity = _identity(self.path)
                    opened = self._opened(identity, create)
                    if opened is None:
                        return nothing
                    result = work(opened.connection, *arguments)
                    if _identity(self.path) == opened.identity:
                        return result
                except (*_FAULTS, _DamagedError, _NewerError) as error:
                    create = self._recover(error, identity, write) or create
        return result

    def _opened(self, identity: _Identity, create: bool) -> _Opened | None:
        """The connection of this thread, None where there is no store and none is to be created."""
        mine = os.getpid(), threading.get_ident()
        opened = self._connections.get(mine)
        if opened is not None and opened.identity == identity:
            return opened
        self._drop()
        if identity is None and not create:
            return None
        if create:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise _DamagedError("is a directory")
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(contextlib.closing(_open(str(self.path))))
            if not _is_store(connection):
                if not create:
                    return None
                _create(connection)
            undo.pop_all()
        self._connections[mine] = _Opened(connection, identity or _identity(self.path))
        return self._connections[mine]

    def _drop(self) -> None:
        opened = self._connections.pop((os.getpid(), threading.get_ident()), None)
        if opened is not None:
            opened.connection.close()

    def _recover(self, error: Exception, identity: _Identity, write: bool) -> bool:
        """Set a damaged file aside, or give up what failed; whether a fresh store is to be created."""
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED:
            self._drop()  # another process set the file aside
            return False
        fatal = isinstance(error, _NewerError)
        if _is_damage(error):
            try:
                self._set_aside(str(error), identity)
                return True
            except (OSError, NotImplementedError) as fault:
                fatal, error = True, OSError(f"{error}; setting it aside failed: {fault}")
        self._drop()
        self._writes = False
        self._reads = self._reads and write and not fatal
        self._warn("file", f"{self.path}: {error}; calls go on, and nothing more is remembered")
        return False

    def _set_aside(self, reason: str, identity: _Identity) -> None:
        """Rename the file, unless another process did. Raises OSError where that is not allowed."""
        utc = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{self.path.name}.set-aside-{utc}-{os.getpid()}")
        with FileLock(f"{self.path}.lock", timeout=BUSY_S):
            moved = identity is None or _identity(self.path) != identity
            self._drop()
            if moved:
                return
            _rename(self.path, aside)
        text = f"{self.path}: {reason}; it now lies at {aside.name}, and a fresh store is started"
        self._warn(aside.name, text)


def _after_fork() -> None:
    """Forget the parent's connections without closing them: closing would undo what the parent does."""
    for store in _STORES:
        _ABANDONED.append(dict(store._connections))
        store._connections.clear()
    _LOCK.release()


# Nobody forks amid a transaction: the child's SQLite would believe that it holds the parent's locks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_after_fork)


@functools.lru_cache(maxsize=64)
def _store_in(device: Device, directory: Path) -> Store:
    return Store(device, directory)


def store_of(device: Device) -> Store:
    """This process's store of a device, in the cache directory now in force."""
    return _store_in(device, cache_dir())
