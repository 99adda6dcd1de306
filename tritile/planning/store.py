"""Remember trials that this user measured: one SQLite file per GPU model, shared by every process.

Remembering must never break a call. Whatever is wrong with the file, the disk or a row, the store
warns with `StoreWarning` and goes on with what is left. Nothing read back is trusted: each value
passes the checks that any input passes.

`database.py` has the file's format, `shared_file.py` its use beside other processes, `trial.py` the rows.
"""

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from tritile.core.device import Device
from tritile.core.problem import Problem, problem_key
from tritile.core.settings import cache_dir
from tritile.errors import FileError, InvalidValueError
from tritile.planning import database
from tritile.planning.shared_file import LOCK, SharedFile
from tritile.planning.trial import (
    ENVIRONMENT_COLUMNS,
    Row,
    Trial,
    best_of,
    environment_from,
    rank,
    row_of,
    trial_from,
)

__all__ = ["Store", "Trial", "store_of"]

_MOST_UNWRITTEN: Final = 4096
T = TypeVar("T")


class Store:
    """Remember the trials of one GPU model in `directory` (default: `settings.cache_dir()`).

    `path` is the file. Only `merge` raises, and only for a file that it cannot take. Adding is one short
    transaction, so that a killed process loses at most the trial it was adding. While a file is left alone
    (`SharedFile`), reads find nothing, and trials wait in memory for the next one to be added.

    Trials count for the environment that they were measured in: see `trial.ENVIRONMENT_COLUMNS`.
    """

    def __init__(self, device: Device, directory: Path | None = None) -> None:
        self.device = device
        self.path = Path(directory or cache_dir()).absolute() / f"{device.slug}.sqlite3"
        self._file = SharedFile(self.path)
        self._waits: tuple[int, dict[Any, tuple[Row, Row]]] = os.getpid(), {}

    @property
    def _waiting(self) -> dict[Any, tuple[Row, Row]]:
        """Return what is still to be written; a forked child forgets it, as its parent writes it."""
        if self._waits[0] != os.getpid():
            self._waits = os.getpid(), {}
        return self._waits[1]

    def add(self, kernel: str, *trials: Trial) -> None:
        """Remember trials of the kernel with this digest; each replaces an earlier one of the same config."""
        waiting = self._waiting
        for trial in trials:
            try:
                environment, row = self._environment(kernel), row_of(trial)
            except InvalidValueError as error:
                self._file.warn("trial", f"a trial cannot be remembered: {error}")
                continue
            with LOCK:
                waiting[environment, row[0], row[2]] = environment, row
                if len(waiting) > _MOST_UNWRITTEN:
                    del waiting[next(iter(waiting))]
        self._write()

    def flush(self) -> int:
        """Write the trials that could not be written as they were added; return how many still wait."""
        self._file.retry_writing()
        self._write()
        return len(self._waiting)

    def _write(self) -> None:
        waiting = self._waiting
        written: list[Any] = []

        def put(connection: sqlite3.Connection) -> bool:
            written[:] = waiting.items()
            with database.transaction(connection, "IMMEDIATE"):
                for _, (environment, row) in written:
                    database.put(connection, environment, row)
            return True

        if bool(waiting) and self._file.attempt(put, False, write=True):
            with LOCK:
                for key, value in written:
                    if waiting.get(key) is value:  # else one thread added it anew, or wrote it too
                        del waiting[key]

    def trials(self, kernel: str, problem: Problem, *more: str) -> list[Trial]:
        """Return all trials of this problem, with this kernel or one of `more`, on this very device."""
        return self._read((kernel, *more), problem)

    def best(self, kernel: str, problem: Problem) -> Trial | None:
        """Return the fastest trial of this problem whose answer was checked, else the fastest that works."""
        return best_of(self.trials(kernel, problem))

    def bests(self, kernel: str, op: str) -> list[Trial]:
        found: dict[Problem, Trial] = {}
        for trial in self._read((kernel,)):
            if trial.works and trial.problem.op == op:
                found[trial.problem] = min(found.get(trial.problem, trial), trial, key=rank)
        return list(found.values())

    def problems(self, kernel: str) -> list[str]:
        """Return the keys of the problems that were measured with this kernel on this very device."""
        with contextlib.suppress(ValueError, TypeError):  # nothing of this form is ever remembered
            found = self._selected(database.SELECT_PROBLEMS, self._environment(kernel))
            return [text for (text,) in found if isinstance(text, str)]
        return []

    def everything(self) -> Iterator[tuple[dict[str, Any], Trial]]:
        """Yield every trial with its environment, by name of `ENVIRONMENT_COLUMNS`."""
        for environment, trial in self._valid(self._selected(database.SELECT_ALL), _pair_from):
            yield dict(zip(ENVIRONMENT_COLUMNS, environment, strict=True)), trial

    def of_file(self, other: Path) -> list[tuple[Row, Trial]]:
        """Return environment and trial of each row of this GPU model in another store, or a .gz of one.

        Raises FileError where that is not a store, is damaged, or holds trials of other GPU models alone.
        """
        pairs = list(self._valid(database.rows_of(other), _pair_from))
        ours = [pair for pair in pairs if pair[0][0] == self.device.name]
        if pairs and not ours:
            raise FileError(f"{other} holds trials of {pairs[0][0][0]}, not of {self.device.name}")
        return ours

    def merge(self, other: Path) -> int:
        """Add the trials of another store, where newer; return how many were added.

        Raises as `of_file` does.
        """
        ours = self.of_file(other)
        return self._file.attempt(lambda connection: database.merge(connection, ours), 0, write=True)

    def _environment(self, kernel: str) -> Row:
        return environment_from([*(getattr(self.device, name) for name in ENVIRONMENT_COLUMNS[:-1]), kernel])

    def _read(self, kernels: tuple[str, ...], problem: Problem | None = None) -> list[Trial]:
        with contextlib.suppress(ValueError, TypeError):  # nothing of this form is ever remembered
            values: Row = (*self._environment(kernels[0]), *kernels[1:])
            where = "" if problem is None else "AND problem = ?"
            values += () if problem is None else (problem_key(problem),)
            return list(self._valid(self._selected(database.select(len(kernels), where), values), trial_from))
        return []

    def _selected(self, query: str, values: Row = ()) -> list[Row]:
        nothing: list[Row] = []
        return self._file.attempt(lambda connection: connection.execute(query, values).fetchall(), nothing)

    def _valid(self, rows: Iterable[Row], made: Callable[[Row], T]) -> Iterator[T]:
        """Yield what is made of each row; warn of bad rows, once, and skip them."""
        for row in rows:
            try:
                yield made(row)
            except InvalidValueError as error:
                self._file.warn("rows", f"{self.path}: skipped a remembered trial that is not valid: {error}")


def _pair_from(row: Row) -> tuple[Row, Trial]:
    """Return environment and trial of a row of `database.SELECT_ALL`."""
    cut = len(ENVIRONMENT_COLUMNS)
    return environment_from(row[:cut]), trial_from(row[cut:])


@functools.lru_cache(maxsize=64)
def _store_in(device: Device, directory: Path) -> Store:
    return Store(device, directory)


def store_of(device: Device) -> Store:
    """Return the store of a device in the cache directory now in force."""
    return _store_in(device, cache_dir())
