"""Define a store's SQLite file: its tables and statements, opening it, setting a damaged one aside.

Functions here raise what SQLite and the disk raise, which `FAULTS` names. `shared_file.py` decides what then.
"""

import contextlib
import gzip
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tritile.errors import FileError, InvalidValueError
from tritile.planning.trial import (
    ENVIRONMENT_COLUMNS,
    MAX_TEXT,
    TRIAL_COLUMNS,
    Row,
    Trial,
    moment,
    row_of,
    trial_from,
)

APPLICATION_ID: Final = 0x74726974
VERSION: Final = 1
_WAIT_S: Final = 10.0  # for which reading another store waits for a lock
_COMMIT_MS: Final = 100  # for which a commit waits for readers: no new ones come in meanwhile
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


def _bounded(names: Iterable[str]) -> str:
    """Return columns to select, each cut so that a giant value never reaches Python whole."""
    cut = "CASE WHEN typeof({0}) IN ('text', 'blob') THEN substr({0}, 1, {1}) ELSE {0} END"
    return ", ".join(cut.format(name, MAX_TEXT + 1) for name in names)


def _marks(columns: Sequence[object]) -> str:
    return ", ".join("?" * len(columns))


_JOINED: Final = "FROM trials JOIN environments ON environments.id = environment"
_HERE: Final = " AND ".join(f"{name} = ?" for name in ENVIRONMENT_COLUMNS)
_OF_DEVICE: Final = " AND ".join(f"{name} = ?" for name in ENVIRONMENT_COLUMNS[:-1])
SELECT_ALL: Final = f"SELECT {_bounded((*ENVIRONMENT_COLUMNS, *TRIAL_COLUMNS))} {_JOINED} ORDER BY trials.id"
SELECT_PROBLEMS: Final = f"SELECT DISTINCT problem {_JOINED} WHERE {_HERE} AND length(problem) <= {MAX_TEXT}"
_ADD_ENVIRONMENT: Final = (
    f"INSERT OR IGNORE INTO environments ({', '.join(ENVIRONMENT_COLUMNS)}) "
    f"VALUES ({_marks(ENVIRONMENT_COLUMNS)})"
)
ADD_TRIAL: Final = (
    f"INSERT INTO trials (environment, {', '.join(TRIAL_COLUMNS)}) SELECT id, {_marks(TRIAL_COLUMNS)} "
    f"FROM environments WHERE {_HERE} ON CONFLICT (environment, problem, config) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in TRIAL_COLUMNS)
)


class DamagedError(Exception):
    """Say that the file is not a store: it is to be set aside."""


class NewerError(Exception):
    """Say that the file belongs to a later version of tritile: it is to be left alone."""


FAULTS: Final = (sqlite3.Error, OSError, OverflowError, UnicodeError, DamagedError, NewerError)


def has_code(error: Exception, *codes: int) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in codes


def is_busy(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or has_code(error, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


# --- The file's format ---


def select(kernels: int, where: str = "") -> str:
    """Return the statement that reads the trials of a device and `kernels` kernels that meet a condition."""
    of_kernels = f"{_OF_DEVICE} AND kernel IN ({_marks(range(kernels))})"
    return f"SELECT {_bounded(TRIAL_COLUMNS)} {_JOINED} WHERE {of_kernels} {where} ORDER BY trials.id"


def _connect(where: str, wait_s: float = 0.0, uri: bool = False) -> sqlite3.Connection:
    """Return a connection without transactions of its own; `shared_file` waits for locks, not SQLite.

    Any thread may use it: `shared_file` has one at a time do so.
    """
    connection = sqlite3.connect(where, wait_s, isolation_level=None, uri=uri, check_same_thread=False)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    """Have what is done inside the `with` happen whole or not at all; kind is DEFERRED or IMMEDIATE."""
    try:
        connection.execute(f"BEGIN {kind}")
        yield
        connection.execute(f"PRAGMA busy_timeout = {_COMMIT_MS}")
        connection.execute("COMMIT")
    finally:
        connection.execute("PRAGMA busy_timeout = 0")
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")


def _facts(connection: sqlite3.Connection) -> tuple[int, int, Row]:
    """Return application id, version and SQL of all tables. Raises DamagedError if unreadable."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
    try:
        # One snapshot: else tables that another process creates meanwhile would seem to be another program's.
        with contextlib.nullcontext() if connection.in_transaction else transaction(connection, "DEFERRED"):
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            return owner, version, tuple(text for (text,) in connection.execute(query).fetchall())
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR:
            raise DamagedError(f"is of no format that SQLite knows ({error})") from error
        raise


def _is_store(connection: sqlite3.Connection) -> bool:
    """Tell whether it holds our tables; False for a new file. Raises DamagedError or NewerError."""
    owner, version, texts = _facts(connection)
    if owner == APPLICATION_ID and version > VERSION:
        raise NewerError(f"is of version {version}, made by a newer tritile")
    if texts and owner != APPLICATION_ID:
        raise DamagedError("belongs to another program")
    # The exact text also keeps out triggers, views and lost constraints.
    if texts and texts != _SCHEMA:
        raise DamagedError("does not have the tables of a store")
    return bool(texts)


def create(connection: sqlite3.Connection) -> None:
    with transaction(connection, "IMMEDIATE"):
        if not _is_store(connection):
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")


def _check(connection: sqlite3.Connection) -> None:
    """Raise DamagedError where pages, rows and indexes do not fit together: lookups would miss rows."""
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise DamagedError(f"is damaged ({str(found).splitlines()[-1][:200]})")


def opened(path: Path, new: bool, check: bool = True) -> sqlite3.Connection | None:
    """Return a connection to the store at this path, created if `new`; else None where the file is empty.

    `check`: read the whole file, some 3 ms for each megabyte. Raises DamagedError where it is not a store.
    """
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise DamagedError("is a directory")
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(contextlib.closing(_connect(str(path))))
        if not _is_store(connection):
            if not new:
                return None
            create(connection)
        if check:
            _check(connection)
        undo.pop_all()
    return connection


def put(connection: sqlite3.Connection, environment: Row, row: Row) -> None:
    connection.execute(_ADD_ENVIRONMENT, environment)
    connection.execute(ADD_TRIAL, (*row, *environment))


def _is_newer(connection: sqlite3.Connection, environment: Row, row: Row) -> bool:
    """Tell whether a row is newer than the valid one of the same key, if there is one."""
    query = select(1, "AND problem = ? AND config = ?")
    known = connection.execute(query, (*environment, row[0], row[2])).fetchone()
    try:
        return not known or moment(trial_from(known).measured_utc) < moment(row[-1])
    except InvalidValueError:
        return True


def merge(connection: sqlite3.Connection, pairs: Iterable[tuple[Row, Trial]]) -> int:
    """Add those trials that are newer than what is there, or replace a bad row; return how many they are."""
    merged = 0
    with transaction(connection, "IMMEDIATE"):
        for environment, trial in pairs:
            row = row_of(trial)
            if _is_newer(connection, environment, row):
                put(connection, environment, row)
                merged += 1
    return merged


def rows_of(path: Path) -> list[Any]:
    """Return the rows of `SELECT_ALL` in another store, or a .gz of one.

    Raises FileError where it cannot be read.
    """
    if not path.is_file():
        raise FileError(f"{path} is not there, or no regular file")
    try:
        with contextlib.ExitStack() as held:
            plain = held.enter_context(_unzipped(path)) if path.suffix == ".gz" else path
            where = f"{plain.absolute().as_uri()}?mode=ro"
            connection = held.enter_context(contextlib.closing(_connect(where, _WAIT_S, uri=True)))
            if not _is_store(connection):
                raise DamagedError("holds nothing")
            _check(connection)
            return connection.execute(SELECT_ALL).fetchall()
    except (*FAULTS, EOFError, zlib.error) as error:
        raise FileError(f"{path} is not a store that can be read: {error}") from error


@contextlib.contextmanager
def _unzipped(path: Path) -> Iterator[Path]:
    with gzip.open(path) as zipped, tempfile.NamedTemporaryFile(suffix=".sqlite3") as plain:
        shutil.copyfileobj(zipped, plain)
        plain.flush()
        yield Path(plain.name)


# --- A file that is damaged ---


def rename(path: Path, aside: Path) -> None:
    """Rename a database with its journal. Raises OSError, or sqlite3.Error where it is in use."""
    with contextlib.ExitStack() as held:
        # Other processes end their transactions first: their journal must not meet the fresh file.
        try:
            connection = held.enter_context(contextlib.closing(_connect(str(path))))
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            if is_busy(error):
                raise
        with contextlib.suppress(FileNotFoundError):
            path.with_name(f"{path.name}-journal").rename(f"{aside}-journal")
        path.rename(aside)
