"""The SQLite file of a store: its tables and statements, opening it, and telling whether it is one.

Functions here raise what SQLite and the disk raise; `FAULTS` names it all. `Store` decides what then.
"""

import contextlib
import functools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tritile.errors import InvalidValueError
from tritile.planning.trial import (
    ENVIRONMENT_COLUMNS,
    MAX_TEXT,
    TRIAL_COLUMNS,
    Row,
    Trial,
    environment_from,
    moment,
    row_of,
    trial_from,
)

APPLICATION_ID: Final = 0x74726974
VERSION: Final = 1
READ_S = 1.0  # that a read waits for a lock at the most
WRITE_S = 10.0  # that a write waits
_COMMIT_MS: Final = 100  # that a commit waits for those who read: no new ones come in meanwhile
_MOST_BYTES: Final = 1 << 30  # of a damaged file that is looked through
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
    """Columns to select, cut so that a giant value never reaches Python whole."""
    cut = "CASE WHEN typeof({0}) IN ('text', 'blob') THEN substr({0}, 1, {1}) ELSE {0} END"
    return ", ".join(cut.format(name, MAX_TEXT + 1) for name in names)


def _places(columns: Sequence[object]) -> str:
    return ", ".join("?" * len(columns))


_JOINED: Final = "FROM trials JOIN environments ON environments.id = environment"
_HERE: Final = " AND ".join(f"{name} = ?" for name in ENVIRONMENT_COLUMNS)
_OF_DEVICE: Final = " AND ".join(f"{name} = ?" for name in ENVIRONMENT_COLUMNS[:-1])
SELECT_ALL: Final = (
    f"SELECT trials.id, {_bounded((*ENVIRONMENT_COLUMNS, *TRIAL_COLUMNS))} {_JOINED} WHERE trials.id > ?"
)
# A damaged failure, neither text nor nothing, is found, and told of as no valid trial.
WORKED: Final = "typeof(failure) <> 'text'"
BEST_FIRST: Final = "error IS NULL, us, config"  # of what worked, as `trial.rank` has it
_ADD_ENVIRONMENT: Final = (
    f"INSERT OR IGNORE INTO environments ({', '.join(ENVIRONMENT_COLUMNS)}) "
    f"VALUES ({_places(ENVIRONMENT_COLUMNS)})"
)
ADD_TRIAL: Final = (
    f"INSERT INTO trials (environment, {', '.join(TRIAL_COLUMNS)}) SELECT id, {_places(TRIAL_COLUMNS)} "
    f"FROM environments WHERE {_HERE} ON CONFLICT (environment, problem, config) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in TRIAL_COLUMNS)
)
Identity = tuple[int, int] | None


class DamagedError(Exception):
    """The file is no store: it is to be set aside."""


class NewerError(Exception):
    """The file belongs to a later version of tritile: it is to be left alone."""


FAULTS: Final = (sqlite3.Error, OSError, OverflowError, UnicodeError, DamagedError, NewerError)


def is_damage(error: Exception) -> bool:
    """Tell whether the error says that the file is no store, rather than that it cannot be used now."""
    codes = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return isinstance(error, DamagedError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in codes


def is_busy(error: Exception) -> bool:
    """Tell whether the error says that another holds a lock, or that none can be had now."""
    codes = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return isinstance(error, TimeoutError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in codes


def identity_of(path: Path) -> Identity:
    """Tell which file lies at this path now: a file set aside and its successor differ in it."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def _connect(where: str, wait_s: float = 0.0, uri: bool = False) -> sqlite3.Connection:
    # A connection is used by its own thread only; `Store.close` closes those of other threads too.
    # SQLite itself hardly waits for locks: `Store` waits, and holds nothing meanwhile.
    connection = sqlite3.connect(where, wait_s, isolation_level=None, check_same_thread=False, uri=uri)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


@functools.cache
def select(kernels: int, where: str) -> str:
    """Return the statement that reads the trials of a device and so many kernels that meet a condition."""
    of_kernels = f"{_OF_DEVICE} AND kernel IN ({_places(range(kernels))})"
    return f"SELECT {_bounded(TRIAL_COLUMNS)} {_JOINED} WHERE {of_kernels} AND {where}"


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    """Make what is done inside the `with` happen whole or not at all; kind is DEFERRED or IMMEDIATE."""
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
    """Application id, version and the SQL of all that a file holds. Raises DamagedError if unreadable."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
    try:
        # One snapshot: else the tables that another process creates meanwhile would seem a stranger's.
        with contextlib.nullcontext() if connection.in_transaction else transaction(connection, "DEFERRED"):
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            return owner, version, tuple(text for (text,) in connection.execute(query).fetchall())
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR:
            raise DamagedError(f"is of no format that SQLite knows ({error})") from error
        raise


def _is_store(connection: sqlite3.Connection) -> bool:
    """Whether it holds our tables; False for a new file. Raises DamagedError or NewerError for another."""
    owner, version, texts = _facts(connection)
    if owner == APPLICATION_ID and version > VERSION:
        raise NewerError(f"is of version {version}, made by a newer tritile")
    if texts and owner != APPLICATION_ID:
        raise DamagedError("belongs to another program")
    # The exact text also keeps out triggers, views and lost constraints.
    if texts and texts != _SCHEMA:
        raise DamagedError("has not the tables of a store")
    return bool(texts)


def create(connection: sqlite3.Connection) -> None:
    """Create the tables in a new file, unless another process did meanwhile."""
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


def open_store(path: Path, new: bool, check: bool = True) -> sqlite3.Connection | None:
    """Return a connection to the store at this path, created if `new`; else None where the file is empty.

    `check`: read the whole file, some 3 ms for each megabyte. Raises DamagedError for one that is no store.
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
    """Add a trial, or replace that of the same problem and config, in a transaction of the caller's."""
    connection.execute(_ADD_ENVIRONMENT, environment)
    connection.execute(ADD_TRIAL, (*row, *environment))


def _is_newer(connection: sqlite3.Connection, environment: Row, row: Row) -> bool:
    """Tell whether a row is newer than the one in its place, or there is none, or a bad one."""
    query = select(1, "problem = ? AND config = ?")
    known = connection.execute(query, (*environment, row[0], row[2])).fetchone()
    try:
        return not known or moment(trial_from(known).measured_utc) < moment(row[-1])
    except InvalidValueError:
        return True


def merge_batch(connection: sqlite3.Connection, batch: Iterable[tuple[Row, Trial]]) -> int:
    """Add those trials that are newer than what is there, or replace a bad row; how many they are."""
    merged = 0
    with transaction(connection, "IMMEDIATE"):
        for environment, trial in batch:
            row = row_of(trial)
            if _is_newer(connection, environment, row):
                put(connection, environment, row)
                merged += 1
    return merged


def rows_of(path: Path) -> list[Any]:
    """The rows of `SELECT_ALL` in another store. Raises InvalidValueError where it cannot be read as one."""
    try:
        where = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(_connect(where, WRITE_S, uri=True)) as connection:
            if not _is_store(connection):
                raise DamagedError("holds nothing")
            _check(connection)
            return connection.execute(SELECT_ALL, (-1,)).fetchall()
    except FAULTS as error:
        raise InvalidValueError(f"{path} is no store that can be read: {error}") from error


def rename(path: Path, aside: Path) -> None:
    """Rename a database with its journal. Raises OSError where that fails, and where `is_busy` says so."""
    with contextlib.ExitStack() as held:
        # Others end their transactions first: a journal of theirs must not meet the fresh file.
        try:
            connection = held.enter_context(contextlib.closing(_connect(str(path))))
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            if is_busy(error):
                raise
        with contextlib.suppress(FileNotFoundError):
            path.with_name(f"{path.name}-journal").rename(f"{aside}-journal")
        path.rename(aside)


def _mended(data: bytes) -> bytes:
    """Return the pages of a store under the first page of a fresh one.

    That page holds the schema, and where each table begins, which is the same in every store.
    """
    with contextlib.closing(_connect(":memory:")) as fresh:
        create(fresh)
        whole = fresh.serialize()
    size = int.from_bytes(whole[16:18], "big")
    pages = len(data) // size
    return whole[:28] + pages.to_bytes(4, "big") + whole[32:size] + data[size : pages * size]


def _readable(connection: sqlite3.Connection, query: str, orders: Sequence[str]) -> dict[int, Row]:
    """Return the rows of a query by their first column, from either end as far as pages can be read."""
    found: dict[int, Row] = {}
    for order in orders:
        with contextlib.suppress(*FAULTS), contextlib.closing(connection.execute(query + order)) as rows:
            for row in rows:
                if row[0] in found:  # from the other end; or pages that refer to each other without end
                    break
                found[row[0]] = row[1:]
    return found


def salvaged(path: Path) -> list[tuple[Row, Trial]]:
    """Environment and trial of each valid row that can be read in a damaged store, none where it was none."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return []
        pages = _mended(path.read_bytes())
        with contextlib.closing(_connect(":memory:")) as connection:
            connection.deserialize(pages)
            return list(_valid_pairs(connection))
    except (*FAULTS, AttributeError, MemoryError):  # AttributeError: a Python without `deserialize`
        return []


def _valid_pairs(connection: sqlite3.Connection) -> Iterator[tuple[Row, Trial]]:
    """The pairs of `salvaged`. Where table and index tell an environment differently, each of them counts."""
    ends = (" ORDER BY id", " ORDER BY id DESC")
    columns, index = _bounded(ENVIRONMENT_COLUMNS), " INDEXED BY sqlite_autoindex_environments_1"
    environments = [
        _readable(connection, f"SELECT id, {columns} FROM environments NOT INDEXED", ends),
        _readable(connection, f"SELECT id, {columns} FROM environments{index}", ("",)),
    ]
    trials = f"SELECT id, environment, {_bounded(TRIAL_COLUMNS)} FROM trials NOT INDEXED"
    for number, *row in _readable(connection, trials, ends).values():
        for facts in dict.fromkeys(told[number] for told in environments if number in told):
            with contextlib.suppress(InvalidValueError):
                yield environment_from(facts), trial_from(row)
