"""Remember trials that this user measured: one SQLite file per GPU model, shared by every process.

Remembering must never break a call. Whatever is wrong with the file, the disk or a row, the store
warns with `StoreWarning` and goes on with what is left. Nothing read back is trusted: each value
passes the checks that any input passes.

`database.py` has the file's format, `shared_file.py` its use beside other processes, `trial.py` the rows.
"""

import contextlib
import functools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tritile.core.device import Device
from tritile.core.problem import Problem, problem_key
from tritile.core.settings import cache_dir
from tritile.errors import InvalidValueError
from tritile.planning import database
from tritile.planning.shared_file import LOCK, SharedFile
from tritile.planning.trial import ENVIRONMENT_COLUMNS, Row, Trial, environment_from, row_of, trial_from

__all__ = ["BATCH", "Store", "Trial", "end_stand_ins", "is_frozen", "own_store", "stand_in", "store_of"]

BATCH: Final = 256
_MOST_UNWRITTEN: Final = 4096


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

    def add(self, kernel: str, trial: Trial) -> None:
        """Remember a trial of the kernel with this digest; it replaces an earlier one of the same config."""
        try:
            environment, row = self._environment(kernel), row_of(trial)
        except InvalidValueError as error:
            return self._file.warn("trial", f"a trial cannot be remembered: {error}")
        waiting = self._file.waiting
        with LOCK:
            waiting[environment, row[0], row[2]] = environment, row
            if len(waiting) > _MOST_UNWRITTEN:
                del waiting[next(iter(waiting))]
        return self._write()

    def flush(self) -> int:
        """Write the trials that could not be written as they were added; return how many still wait."""
        self._file.retry_writing()
        self._write()
        return len(self._file.waiting)

    def _write(self) -> None:
        waiting = self._file.waiting
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
        return self._selected((kernel, *more), "problem = ? ORDER BY trials.id", problem)

    def best(self, kernel: str, problem: Problem) -> Trial | None:
        """Return the fastest trial of this problem whose answer was checked, else the fastest that works."""
        which = f"problem = ? AND {database.WORKED} ORDER BY {database.BEST_FIRST}"
        found = self._selected((kernel,), which, problem, True)
        return found[0] if found else None

    def bests(self, kernel: str, op: str) -> list[Trial]:
        """Return the best trial of each problem of this op."""
        # Not by the column of ops, which no index repeats: a damaged op would hide its row without a warning.
        found = self._selected(
            (kernel,), f"{database.WORKED} ORDER BY problem, {database.BEST_FIRST}", first=True
        )
        return [trial for trial in found if trial.problem.op == op]

    def everything(self) -> Iterator[tuple[dict[str, Any], Trial]]:
        """Yield every trial with its environment, by name of `ENVIRONMENT_COLUMNS`."""
        query = f"{database.SELECT_ALL} ORDER BY trials.id LIMIT {BATCH}"
        last = -1
        nothing: list[Any] = []
        while rows := self._file.attempt(
            lambda c, after: c.execute(query, (after,)).fetchall(), nothing, last
        ):
            for environment, trial in self._valid(rows):
                yield dict(zip(ENVIRONMENT_COLUMNS, environment, strict=True)), trial
            last = rows[-1][0]

    def merge(self, other: Path) -> int:
        """Add the trials of another store of the same GPU model, where newer; return how many were added.

        Raises InvalidValueError where `other` is not a store, is damaged, or is of another GPU model.
        """
        pairs = list(self._valid(database.rows_of(other)))
        ours = [pair for pair in pairs if pair[0][0] == self.device.name]
        if pairs and not ours:
            raise InvalidValueError(f"{other} holds trials of {pairs[0][0][0]}, not of {self.device.name}")
        batches = [ours[start : start + BATCH] for start in range(0, len(ours), BATCH)]
        return sum(self._file.attempt(database.merge_batch, 0, batch, write=True) for batch in batches)

    def close(self) -> None:
        """Close the file, for all threads; a later use opens it again."""
        self._file.close()

    def _environment(self, kernel: str) -> Row:
        return environment_from([*(getattr(self.device, name) for name in ENVIRONMENT_COLUMNS[:-1]), kernel])

    def _selected(
        self, kernels: tuple[str, ...], where: str, wanted: Problem | None = None, first: bool = False
    ) -> list[Trial]:
        """Return the valid trials that meet the condition: all, or only the first of each problem."""

        def selected(connection: sqlite3.Connection) -> list[Row]:
            values = *self._environment(kernels[0]), *kernels[1:]
            values += () if wanted is None else (problem_key(wanted),)
            # All at once: readers keep others from writing.
            return connection.execute(database.select(len(kernels), where), values).fetchall()

        rows: list[Row] = []
        with contextlib.suppress(ValueError, TypeError):  # nothing of this form is ever remembered
            rows = self._file.attempt(selected, rows)
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
        """Yield environment and trial of each row of `database.SELECT_ALL`, and skip bad rows."""
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
            self._file.warn("rows", f"{self.path}: skipped a remembered trial that is not valid: {error}")


@functools.lru_cache(maxsize=64)
def _store_in(device: Device, directory: Path) -> Store:
    return Store(device, directory)


def own_store(device: Device) -> Store:
    """Return this process's own store of a device, in the cache directory now in force."""
    return _store_in(device, cache_dir())


_standing_in: dict[Device, Store] = {}


def store_of(device: Device) -> Store:
    """Return the store that this process plans by: what stands in for its own store, else that."""
    return _standing_in.get(device) or own_store(device)


def stand_in(store: Store) -> None:
    """Have `store_of` return this store for its device."""
    _standing_in[store.device] = store


def end_stand_ins() -> None:
    """Have `store_of` return this process's own stores again."""
    _standing_in.clear()


def is_frozen(device: Device) -> bool:
    """Tell whether another store stands in for the device's own: then measuring more changes no plan."""
    return device in _standing_in
