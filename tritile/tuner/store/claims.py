"""Claims on searches: of the processes that miss one problem, one measures and the others wait for it.

A claim is a row in a SQLite file next to the store: the problem and its environment, a random token, when it
was made, and a heartbeat that a thread of the claimant renews. One whose heartbeat has stopped is taken over;
process ids would mean nothing across containers. A row goes once its search has ended, except that of a
search that ran out of time: its moment stays, so that other ranks of the job do not each go on with it.

Waiting closes no circle, whatever collectives the ranks are in. A process claims only while its device is
idle, so no kernel that it launched waits for another rank. It measures inside one call, so it sits in no
collective meanwhile, and a thread that holds a claim waits for no other. So a claimant depends on nobody:
those that wait for it, and those that wait for these in a collective, are delayed until it is done, and at
most by the budget of a search, whatever its other threads launch. A process whose device stays busy makes no
claim. It runs the nearest config and asks again at a later call.

Claims save time and make ranks agree, but no call depends on them. Without the file each process measures for
itself.
"""

import contextlib
import logging
import os
import platform
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import torch

from tritile.core.forgetting import new_memo
from tritile.core.log import log
from tritile.core.problem import Problem
from tritile.core.threads import interpreter_lock
from tritile.tuner.store.trials import Store, is_damage, opened

BEAT_S: Final = 1.0  # between heartbeats
DEAD_S = 10.0  # without a heartbeat; a thread that holds the GIL, or a slow disk, may delay some
RETRY_S: Final = 1.0  # until a process asks again about a problem that it could not settle
_POLL_S: Final = 0.05
_FILE_S: Final = 1.0  # how long to wait for another process's lock on the file
_IDLE_S: Final = 1.0  # how long to wait for the device to finish its work
_GLANCE_S: Final = 0.01  # the same, for ten times _IDLE_S after it did not: at most a tenth of the time
_STARTED: Final = time.time()  # a search that ended before is gone on with
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS claims (place TEXT PRIMARY KEY, token TEXT NOT NULL, process TEXT NOT NULL, "
    "started REAL NOT NULL, beat REAL NOT NULL, ended REAL)"
)
_FAULTS: Final = (sqlite3.Error, OSError, UnicodeError)
T = TypeVar("T")


class _Held(threading.local):
    token = ""  # of the claim that this thread holds


class _Row(NamedTuple):
    token: str
    is_alive: bool  # its claimant is
    ended: float | None  # when its search ran out of time

    @property
    def is_open(self) -> bool:
        return self.ended is None


_held: Final = _Held()
_later: Final[dict[Any, float]] = new_memo()  # by file and place: when to ask again, after a wait
_syncs: Final[dict[int, threading.Thread]] = {}  # by GPU: a thread that waits for all its work
_busy: Final[dict[int, float]] = {}  # by GPU: until when to wait but briefly


class Claim:
    """The claim on the search of one problem by the kernel of a digest, which any process may hold."""

    def __init__(self, store: Store, kernel: str, problem: Problem) -> None:
        self._store, self._place = store, store.place(kernel, problem)
        self._label, self.path = problem.label, store.path.with_suffix(".claims")

    def is_open(self, alive: bool = False) -> bool:
        """True if another's search has not ended, so that what is stored is a part; `alive`: nor died."""
        row = self._row()
        if row is None or not row.is_open or row.token == _held.token:
            return False
        return row.is_alive or not alive

    def settle(
        self, is_known: Callable[[bool], bool], search: Callable[[bool], bool], wait_s: float,
        gpu: int | None = None,
    ) -> bool:  # fmt: skip
        """Have the store hold the outcome of a search, which this process or another makes.

        `is_known(ended)` reads the store, and says if nothing is left to measure; `ended`: if a search of the
        same job ran out of time. `search(resumes)` measures and stores, and returns True if its time ran out;
        `resumes`: if a process died amid the same, or failed. `wait_s`: how long to wait, once, for another
        process. `gpu`: the index of the device that must be idle, if any.

        Returns False if another process still measures, or if the device is busy: run the nearest, and ask
        again at a later call. Raises what `is_known` and `search` raise.
        """
        if self._place is None or _held.token:  # a call inside a search: waiting might close a circle
            if not is_known(False):
                search(False)
            return True
        where = self.path, self._place
        if time.monotonic() < _later.get(where, 0.0):
            return False
        until, is_done = time.monotonic() + (0.0 if where in _later else wait_s), False
        while True:
            row = self._row()
            if row is not None and row.is_open and row.is_alive:
                if time.monotonic() >= until:
                    return self._ask_later("another process is measuring it")
                with interpreter_lock.lent():
                    time.sleep(_POLL_S)
                continue
            if is_done or ((row is None or not row.is_open) and is_known(_is_of_this_job(row))):
                break
            if not _is_idle(gpu):
                return self._ask_later(f"GPU {gpu} is busy")
            kept = self._searched(is_known, search)
            if kept:
                break
            is_done = kept is not None
        _later.pop(where, None)
        return True

    def _ask_later(self, why: str) -> bool:
        where = self.path, self._place
        if where not in _later:
            text = f"{self._label}: the nearest config runs for now: {why}"
            log("tune", logging.INFO, text, problem=self._label)
        _later[where] = time.monotonic() + RETRY_S
        return False

    def _searched(self, is_known: Callable[[bool], bool], search: Callable[[bool], bool]) -> bool | None:
        """Claim, and search if need be.

        Returns True if the claim was kept until the end, or none could be made, False if another process took
        it over, and None if another was faster to claim.
        """
        token, process = uuid.uuid4().hex, f"{platform.node()} {os.getpid()}"

        def take(file: sqlite3.Connection) -> tuple[bool, _Row | None]:
            with file:
                file.execute("BEGIN IMMEDIATE")
                before = self._row_in(file)
                if before is not None and before.is_open and before.is_alive:
                    return False, before
                row = self._place, token, process, time.time(), time.time(), None
                file.execute("REPLACE INTO claims VALUES (?, ?, ?, ?, ?, ?)", row)
            return True, before

        taken = self._use(take, None, create=True)
        if taken is None:
            if not is_known(False):
                search(False)
            return True
        is_ours, before = taken
        if not is_ours:
            return None
        stop = threading.Event()
        # After an error, such as Ctrl-C, it is dead at once, for others to take over.
        left: tuple[str, Any] = "UPDATE claims SET token = 'left', beat = 0 WHERE token = ?", ()
        _held.token = token
        try:
            with contextlib.suppress(RuntimeError):  # no thread can be started: others may take over
                threading.Thread(target=self._beat, args=(token, stop), daemon=True).start()
            ended = before.ended if before is not None else None
            resumes, knows = before is not None and before.is_open, is_known(_is_of_this_job(before))
            if resumes or not knows:
                ended = time.time() if search(resumes) else None
            left = "DELETE FROM claims WHERE token = ?", ()
            if ended is not None:
                left = "UPDATE claims SET ended = ? WHERE token = ?", (ended,)
        finally:
            _held.token = ""
            stop.set()
            kept = self._write(left[0], (*left[1], token))
        return kept

    def _beat(self, token: str, stop: threading.Event) -> None:
        while not stop.wait(BEAT_S):
            self._write("UPDATE claims SET beat = ? WHERE token = ?", (time.time(), token))

    # The file.

    def _row(self) -> _Row | None:
        return self._use(self._row_in, None) if self._place is not None and self.path.exists() else None

    def _row_in(self, file: sqlite3.Connection) -> _Row | None:
        # By either difference: a clock that was set back leaves no claim that lives on.
        query = "SELECT token, abs(? - beat) <= ?, ended FROM claims WHERE place = ?"
        found = file.execute(query, (time.time(), DEAD_S, self._place)).fetchone()
        if found is None:
            return None
        token, is_alive, ended = found
        return _Row(str(token), bool(is_alive), ended if isinstance(ended, float) else None)

    def _write(self, statement: str, values: tuple[Any, ...]) -> bool:
        """Change a row; return False if it is not there, True also if the file cannot be used."""

        def written(file: sqlite3.Connection) -> bool:
            with file:
                return file.execute(statement, values).rowcount > 0

        return self._use(written, True)

    def _use(self, work: Callable[[sqlite3.Connection], T], nothing: T, create: bool = False) -> T:
        """Return `work(file)`, or `nothing` if the file cannot be used. A damaged file is replaced."""
        try:
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return self._done(work)
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                for name in (self.path.name, f"{self.path.name}-journal"):  # nothing in it is worth keeping
                    self.path.with_name(name).unlink(missing_ok=True)
                return self._done(work)
        except _FAULTS as error:
            self._store.warn_unusable(self.path, error)
        return nothing

    def _done(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with opened(self.path, _FILE_S) as file:
            file.execute("PRAGMA synchronous = OFF")  # what a crash of the machine loses ended with it
            file.execute(_SCHEMA)
            return work(file)


def _is_of_this_job(row: _Row | None) -> bool:
    """True for a search that ran out of time after this process had started."""
    return row is not None and row.ended is not None and row.ended >= _STARTED


# The device.


def _is_idle(gpu: int | None) -> bool:
    """True if a GPU has done all its work, in all streams, or soon will have. Never waits for long."""
    if gpu is None or not torch.cuda.is_available():
        return True
    now = time.monotonic()
    until = now + (_GLANCE_S if now < _busy.get(gpu, 0.0) else _IDLE_S)
    # A thread waits, as CUDA has no query of a device. One that waits since an earlier call may know of less.
    fresh = threading.Thread(target=_synchronize, args=(gpu,), daemon=True)
    for waiting in filter(None, (_syncs.pop(gpu, None), fresh)):
        if waiting is fresh:
            fresh.start()
        waiting.join(max(_GLANCE_S, until - time.monotonic()))
        if waiting.is_alive():
            _syncs[gpu] = waiting
            if now >= _busy.get(gpu, 0.0):
                _busy[gpu] = now + 10 * _IDLE_S
            return False
    return True


def _synchronize(gpu: int) -> None:
    with contextlib.suppress(Exception):  # of an earlier kernel: the call's own launch raises it again
        torch.cuda.synchronize(gpu)
