"""The trials that this user measured: one SQLite file per GPU model, shared by all processes.

A trial is identified by its environment (the GPU, the versions of Triton and its assembler, the kernel's
digest), its problem and its config. A new trial of the same three replaces the old one.

The store must never break a call. Whatever is wrong with the file, the disk or a row, it warns with
`StoreWarning` and continues with what is left. Every value read back is checked like any other input.
"""

import contextlib
import functools
import gzip
import json
import math
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
from tritile.core.forgetting import Memo
from tritile.core.problem import Problem, problem_key
from tritile.core.settings import shared_url, store_dir
from tritile.core.threads import at_fork
from tritile.errors import FileError, InvalidValueError, StoreWarning, callers_level
from tritile.tuner.store.files import MAX_TEXT, MAX_US, config_from, number_from, problem_from, sifted
from tritile.tuner.store.trial import Trial, best_of, rank

READ_S = 1.0  # how long a read waits for another process's lock
WRITE_S = 10.0  # how long a write waits
_VERSION: Final = 1
_ATTEMPTS: Final = 4  # at a file that other processes keep setting aside
# Fields of Device, and the kernel's digest. The driver's version is not among them: drivers load the machine
# code of Triton's assembler as it is, and every driver update would void all measurements. `arch` has no
# type, so that 90 and "90" stay distinct.
ENVIRONMENT: Final = {
    "name": "TEXT NOT NULL", "backend": "TEXT NOT NULL", "arch": "NOT NULL",
    "processors": "INTEGER NOT NULL", "l2_bytes": "INTEGER NOT NULL", "shared_memory": "INTEGER NOT NULL",
    "triton": "TEXT NOT NULL", "compiler": "TEXT NOT NULL", "kernel": "TEXT NOT NULL",
}  # fmt: skip
TRIAL: Final = {
    "problem": "TEXT NOT NULL", "op": "TEXT NOT NULL", "config": "TEXT NOT NULL", "us": "REAL",
    "spread": "REAL", "registers": "INTEGER", "spills": "INTEGER", "shared": "INTEGER", "error": "REAL",
    "failure": "TEXT", "measured_utc": "TEXT NOT NULL",
}  # fmt: skip
_MAX_ERROR: Final = 1.7e308
_MAX_FAILURE: Final = 2000
_MAX_COUNT: Final = 2**31


def _table(name: str, columns: dict[str, str], first: str, unique: Iterable[str]) -> str:
    typed = ", ".join(f"{column} {kind}" for column, kind in columns.items())
    return f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, {first}{typed}, UNIQUE ({', '.join(unique)}))"


_SCHEMA: Final = (
    _table("environments", ENVIRONMENT, "", ENVIRONMENT),
    _table("trials", TRIAL, "environment INTEGER NOT NULL, ", ("environment", "problem", "config")),
)
_JOINED: Final = "FROM trials JOIN environments ON environments.id = environment"
_ON_DEVICE: Final = " AND ".join(f"{name} = ?" for name in ENVIRONMENT if name != "kernel")
_SELECT: Final = f"SELECT {', '.join(TRIAL)} {_JOINED}"
_SELECT_ALL: Final = f"SELECT {', '.join((*ENVIRONMENT, *TRIAL))} {_JOINED} ORDER BY trials.id"
_ADD_ENVIRONMENT: Final = (
    f"INSERT OR IGNORE INTO environments ({', '.join(ENVIRONMENT)}) "
    f"VALUES ({', '.join('?' for _ in ENVIRONMENT)})"
)
_ADD_TRIAL: Final = (
    f"INSERT INTO trials (environment, {', '.join(TRIAL)}) SELECT id, {', '.join('?' for _ in TRIAL)} "
    f"FROM environments WHERE {_ON_DEVICE} AND kernel = ? ON CONFLICT (environment, problem, config) "
    "DO UPDATE SET " + ", ".join(f"{name} = excluded.{name}" for name in TRIAL)
)
# What `Line.order` says of two rows, so that all who merge the same trials keep the same. The parameter is a
# date that the new trial had before it was corrected, or None.
_ORDER: Final = (
    "(coalesce(julianday({0}.measured_utc), 0), coalesce({0}.error, {0}.failure) IS NOT NULL, "
    "coalesce({0}.us, 0))"
)
_IF_NEWER: Final = (
    f" WHERE trials.measured_utc = ? OR {_ORDER.format('trials')} < {_ORDER.format('excluded')}"
)
# Taken while any thread uses SQLite. A fork waits for it: the child's SQLite would believe that it owns the
# parent's locks.
_LOCK: Final = threading.RLock()
_unusable = False  # True if this process was forked while a thread of the parent used SQLite nevertheless
_FORKED: Final = "the parent was using the file as it forked this process"
Row = tuple[Any, ...]
T = TypeVar("T")


def _after_fork(ended: bool) -> None:
    global _unusable
    _unusable = _unusable or not ended


at_fork(_LOCK, _after_fork)


class _DamagedError(sqlite3.DatabaseError):
    """The file is not a store and has to be set aside."""


_FAULTS: Final = (sqlite3.Error, OSError, OverflowError, UnicodeError)


# --- Rows ---


def moment(text: Any) -> float:
    """Return the seconds since 1970 of an ISO time, -inf for "". Raises InvalidValueError otherwise."""
    if text == "":
        return -math.inf
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidValueError(f"{str(text)[:80]!r} is not an ISO time") from error


def trial_from(row: Sequence[Any]) -> Trial:
    """Return the trial of a row. Raises InvalidValueError for a row that `row_of` cannot have written."""
    problem_text, op, config_text, us, spread, registers, spills, shared, error, failure, measured = row
    if not (isinstance(problem_text, str) and isinstance(config_text, str)):
        raise InvalidValueError("a problem or a config is not text")
    problem, config = problem_from(problem_text), config_from(config_text)
    if problem.op != op:
        raise InvalidValueError(f"{problem_text[:80]!r} is not of {str(op)[:80]!r}")
    if not (failure is None or (isinstance(failure, str) and len(failure) <= MAX_TEXT)):
        raise InvalidValueError(f"{str(failure)[:80]!r} is not a line of text")
    if not isinstance(measured, str) or (us is None and failure is None):
        raise InvalidValueError("a trial needs a date, and a time or a failure")
    moment(measured)
    number_from(us, math.ulp(0.0), MAX_US)
    number_from(spread, 0, MAX_US)
    number_from(error, 0, _MAX_ERROR)
    for count in (registers, spills, shared):
        number_from(count, 0, _MAX_COUNT, whole=True)
    return Trial(problem, config, us, spread, registers, spills, shared, error, failure, measured)


def row_of(trial: Trial) -> Row:
    """Return the row of a trial, as a failure if its time or error is not finite, so that it cannot win.

    Raises InvalidValueError if `trial_from` could not read it back.
    """
    us, spread, error, failure = trial.us, trial.spread, trial.error, trial.failure
    if us is not None and not 0 < us <= MAX_US:
        us, failure = None, failure or f"measured {us} us"
    if error is not None and not error <= _MAX_ERROR:
        error, failure = None, failure or f"wrong answer: relative error {error}"
    if spread is not None and not math.isfinite(spread):
        spread = None
    if failure is not None:
        failure = " ".join("".join(c if c.isprintable() else " " for c in failure[:_MAX_FAILURE]).split())
    try:
        texts = problem_key(trial.problem), trial.problem.op, trial.config.key
    except (ValueError, TypeError, RecursionError) as fault:
        raise InvalidValueError(str(fault)[:200]) from fault
    counts = trial.registers, trial.spills, trial.shared
    row = (*texts, us, spread, *counts, error, failure, trial.measured_utc)
    trial_from(row)
    return row


def facts_of(device: Device) -> Row:
    """Return the facts of a device by which trials count on it: an environment without the kernel."""
    return tuple(getattr(device, name) for name in ENVIRONMENT if name != "kernel")


def environment_from(row: Sequence[Any]) -> Row:
    """Return the row of an environment. Raises InvalidValueError if no device can have it."""
    for (name, kind), value in zip(ENVIRONMENT.items(), row, strict=True):
        is_count = isinstance(value, int) and 0 <= value < 2**63
        is_text = isinstance(value, str) and len(value) <= MAX_TEXT
        if not ((is_count and not kind.startswith("TEXT")) or (is_text and not kind.startswith("INTEGER"))):
            raise InvalidValueError(f"{name} = {str(value)[:80]!r} is not a fact of a GPU")
    return tuple(row)


def pair_from(row: Sequence[Any]) -> tuple[Row, Trial]:
    """Return the environment and the trial of a row with both. Raises InvalidValueError for any other row."""
    cut = len(ENVIRONMENT)
    return environment_from(row[:cut]), trial_from(row[cut:])


# --- The file ---


def _connected(where: str, wait_s: float, uri: bool = False) -> contextlib.closing[sqlite3.Connection]:
    connection = sqlite3.connect(where, timeout=wait_s, isolation_level="IMMEDIATE", uri=uri)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return contextlib.closing(connection)


@contextlib.contextmanager
def opened(path: Path, wait_s: float) -> Iterator[sqlite3.Connection]:
    """Open a SQLite file that is not a store, in one thread at a time: see `_LOCK`. Raises as `_use` does."""
    with _LOCK:
        if _unusable:
            raise OSError(_FORKED)
        with _connected(str(path), wait_s) as connection:
            yield connection


def _is_store(connection: sqlite3.Connection) -> bool:
    """True for a store, False for an empty file. Raises sqlite3.Error for anything else."""
    query = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
    texts = tuple(text for (text,) in connection.execute(query))
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > _VERSION:
        raise sqlite3.NotSupportedError(f"is of version {version}, made by a newer tritile")
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
    """Raise _DamagedError if pages, rows and indexes are inconsistent, where look-ups would miss rows.

    This reads the whole file, at some 3 ms per megabyte.
    """
    found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if found != "ok":
        raise _DamagedError(f"is damaged ({str(found).splitlines()[-1][:200]})")


def is_damage(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, _DamagedError) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _put(connection: sqlite3.Connection, pairs: Sequence[tuple[Row, Row]], condition: str = "") -> int:
    """Write environments and rows of trials, all or none; return how many rows were added or replaced.

    With a condition, a row ends in its parameter.
    """
    with connection:
        connection.executemany(_ADD_ENVIRONMENT, dict.fromkeys(environment for environment, _ in pairs))
        cut = len(TRIAL)
        rows = ((*row[:cut], *environment, *row[cut:]) for environment, row in pairs)
        return connection.executemany(_ADD_TRIAL + condition, rows).rowcount


def rows_of(path: Path) -> list[Row]:
    """Return the rows of another store, or of a .gz of one, unchecked: environment, then trial.

    Raises FileError if it cannot be read.
    """
    if not path.is_file():
        raise FileError(f"{path} does not exist, or is not a regular file")
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


class Store:
    """The trials of one GPU model, in the file `path` of `directory` (default: `settings.store_dir()`).

    Trials that cannot be written count in this process, and are written with the next ones. Only `merge` and
    `of_file` raise, and only for a file that they cannot read. Adding is one short transaction: a killed
    process loses at most what it was adding.
    """

    def __init__(self, device: Device, directory: Path | None = None) -> None:
        self.device = device
        self.path = Path(directory or store_dir()).absolute() / f"{device.slug}.sqlite3"
        self.unwritten: Memo[Any, tuple[Row, Row]] = Memo()  # by environment, problem and config
        self._warned: set[str] = set()
        self._checked: tuple[int, int] | None = None

    def add(self, kernel: str, *trials: Trial) -> None:
        """Add trials of the kernel with this digest; each replaces an earlier one of the same config."""
        pairs, reasons = sifted(trials, lambda trial: (self._environment(kernel), row_of(trial)))
        if reasons:
            self._warn("trial", f"a trial cannot be remembered: {reasons[0]}")
        for environment, row in pairs:
            self.unwritten[environment, row[0], row[2]] = environment, row
        written = dict(self.unwritten)
        if pairs and self._use(lambda file: _put(file, [*written.values()]), None, write=True) is not None:
            for place, pair in written.items():
                if self.unwritten.get(place) is pair:  # another thread may have replaced it
                    self.unwritten.pop(place)

    def trials(self, kernel: str, problem: Problem, *more: str) -> list[Trial]:
        """Return the trials of this problem by this kernel, or one of `more`, on exactly this device."""
        digests, new = (kernel, *more), dict[str, Row]()

        def selected(connection: sqlite3.Connection) -> list[Row]:
            values = (*self._environment(kernel), *more, problem_key(problem))
            kernels = f"kernel IN ({', '.join('?' for _ in digests)})"
            query = f"{_SELECT} WHERE {_ON_DEVICE} AND {kernels} AND problem = ? ORDER BY trials.id"
            return connection.execute(query, values).fetchall()

        try:
            rows = self._use(selected, list[Row]())
            if self.unwritten:
                here, text = self._environment(kernel)[:-1], problem_key(problem)
                new = {
                    config: row
                    for (place, of, config), (_, row) in list(self.unwritten.items())
                    if of == text and place[:-1] == here and place[-1] in digests
                }
        except (ValueError, TypeError):  # nothing of this form is ever remembered
            return []
        return self._valid([row for row in rows if row[2] not in new] + list(new.values()), trial_from)

    def rows(self, kernel: str, problems: Iterable[str]) -> dict[str, list[Row]]:
        """Return the rows of this kernel's trials on exactly this device, unchecked, by keys of problems."""
        here, found = self._environment(kernel), {problem: dict[str, Row]() for problem in problems}
        query = f"{_SELECT} WHERE {_ON_DEVICE} AND kernel = ? AND problem = ?"

        def selected(connection: sqlite3.Connection) -> list[Row]:
            return [row for key in found for row in connection.execute(query, (*here, key))]

        nothing: list[Row] = []
        new = [row for (of, key, _), (_, row) in list(self.unwritten.items()) if of == here and key in found]
        for row in (*self._use(selected, nothing), *new):
            found[row[0]][row[2]] = row
        return {problem: list(rows.values()) for problem, rows in found.items()}

    def best(self, kernel: str, problem: Problem) -> Trial | None:
        """Return the fastest trial of this problem whose answer was checked, else the fastest that works."""
        return best_of(self.trials(kernel, problem))

    def bests(self, kernel: str, op: str) -> list[Trial]:
        query = f"{_SELECT} WHERE {_ON_DEVICE} AND kernel = ? ORDER BY trials.id"
        found: dict[Problem, Trial] = {}
        for trial in self._valid(self._selected(query, self._environment(kernel)), trial_from):
            if trial.works and trial.problem.op == op:
                found[trial.problem] = min(found.get(trial.problem, trial), trial, key=rank)
        return list(found.values())

    def problems(self, kernel: str) -> list[str]:
        """Return the keys of the problems measured with this kernel on exactly this device."""
        query = f"SELECT DISTINCT problem {_JOINED} WHERE {_ON_DEVICE} AND kernel = ?"
        found = self._selected(query, self._environment(kernel))
        return [text for (text,) in found if isinstance(text, str)]

    def all_trials(self) -> list[tuple[dict[str, Any], Trial]]:
        """Return every trial with its environment, by column name."""
        pairs = self._valid(self._selected(_SELECT_ALL), pair_from)
        return [(dict(zip(ENVIRONMENT, environment, strict=True)), trial) for environment, trial in pairs]

    def of_file(self, other: Path) -> list[tuple[Row, Trial]]:
        """Return this GPU model's rows of another store, or of a .gz of one: environment and trial.

        Raises FileError if it is not a store, is damaged, or has only trials of other GPU models.
        """
        pairs = self._valid(rows_of(other), pair_from)
        ours = [pair for pair in pairs if pair[0][0] == self.device.name]
        if pairs and not ours:
            raise FileError(f"{other} holds trials of {pairs[0][0][0]}, not of {self.device.name}")
        return ours

    def merge(self, other: Path) -> int:
        """Add another store's trials where they are newer; return how many were. Raises like `of_file`."""
        return (
            self.take([(environment, (*row_of(trial), None)) for environment, trial in self.of_file(other)])
            or 0
        )

    def take(self, pairs: Sequence[tuple[Row, Row]]) -> int | None:
        """Add valid rows where they are newer; return how many were, None if nothing can be written.

        A row ends in the date that its trial had before it was corrected, or None. A row of that date is
        the same trial, and is replaced.
        """
        return self._use(lambda connection: _put(connection, pairs, _IF_NEWER), None, write=True)

    def catch_up(self) -> None:
        """Exchange trials with other hosts, and wait for it. This store has nobody to exchange them with."""

    def clear(self, kernel: str | None = None) -> int:
        """Delete all trials of this GPU model, or those of one decorated kernel; return how many."""
        name = "" if kernel is None else f'"kernel":{json.dumps(kernel)}'  # as `problem_key` has it

        def deleted(connection: sqlite3.Connection) -> int:
            with connection:
                return connection.execute("DELETE FROM trials WHERE instr(problem, ?)", (name,)).rowcount

        for place in [place for place in self.unwritten if name in place[1]]:
            self.unwritten.pop(place)
        return self._use(deleted, 0, write=True) if self.path.exists() else 0

    def place(self, kernel: str, problem: Problem) -> str | None:
        """Return the environment and problem of trials as a text; None if they are never remembered."""
        try:
            return json.dumps([*self._environment(kernel), problem_key(problem)])
        except (ValueError, TypeError, RecursionError):
            return None

    def warn_unusable(self, path: Path, error: Exception) -> None:
        """Warn, once for all files of this store, that one of them cannot be used."""
        self._warn("file", f"{path}: {error}; calls go on without it")

    def _environment(self, kernel: str) -> Row:
        return environment_from((*facts_of(self.device), kernel))

    def _selected(self, query: str, values: Row = ()) -> list[Row]:
        nothing: list[Row] = []
        return self._use(lambda connection: connection.execute(query, values).fetchall(), nothing)

    def _valid(self, rows: list[Row], make: Callable[[Row], T]) -> list[T]:
        """Return what `make` makes of each row; skip bad rows, with one warning."""
        good, reasons = sifted(rows, make)
        if reasons:
            self._warn("rows", f"{self.path}: skipped a remembered trial that is not valid: {reasons[0]}")
        return good

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, StoreWarning, stacklevel=callers_level())

    def _use(self, work: Callable[[sqlite3.Connection], T], nothing: T, write: bool = False) -> T:
        """Return the result of `work(connection)`, or `nothing` if there is no file or it cannot be used.

        A damaged file is set aside. A write to a file that another process set aside meanwhile is repeated.
        """
        try:
            with _LOCK:
                if _unusable:
                    raise OSError(_FORKED)
                for _ in range(_ATTEMPTS):
                    identity = self._identity(create=write)
                    if identity is None:
                        return nothing
                    try:
                        result = self._done(work, WRITE_S if write else READ_S, identity)
                    except _FAULTS as error:
                        if is_damage(error):
                            self._set_aside(str(error), identity)
                        elif self._identity() == identity:
                            raise
                    else:
                        if not write or self._identity() == identity:
                            return result
                raise OSError("other processes set it aside again and again")
        except _FAULTS as error:
            self.warn_unusable(self.path, error)
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
        """Return device and inode, by which a new file of the same name differs; None without a file."""
        if create:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return None
        return facts.st_dev, facts.st_ino

    def _set_aside(self, reason: str, identity: tuple[int, int]) -> None:
        """Rename a damaged file, unless another process did, so that a new one is started.

        Raises OSError if that is not permitted or another process uses the file.
        """
        utc = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{self.path.name}.set-aside-{utc}-{os.getpid()}")
        try:
            with FileLock(f"{self.path}.lock", timeout=WRITE_S):
                if self._identity() != identity:
                    return
                with _connected(str(self.path), READ_S) as connection:
                    # Others end their transactions first, so that no journal is left for the new file.
                    try:
                        connection.execute("BEGIN EXCLUSIVE")
                    except sqlite3.Error as error:
                        if not is_damage(error):
                            raise
                    self.path.rename(aside)
        except (*_FAULTS, NotImplementedError) as error:
            raise OSError(f"{reason}; setting it aside failed: {error}") from error
        what = f"it was renamed to {aside.name}, and a new store is started"
        self._warn(aside.name, f"{self.path}: {reason}; {what}")


@functools.lru_cache(maxsize=64)
def _store_in(device: Device, directory: Path, url: str | None) -> Store:
    if url is None:
        return Store(device, directory)
    from tritile.tuner.store.shared import SharedStore  # a subclass

    return SharedStore(device, directory, url)


def store_of(device: Device) -> Store:
    """Return the store of a device in the folder now in force, which hosts share if that is set."""
    return _store_in(device, store_dir(), shared_url())
