"""A store that shares its trials with other hosts, through the folder that `TRITILE_SHARED` names.

A thread of each process reads and writes there. Calls do not wait for it, except the first miss, for
`_FIRST_S`. Whatever is wrong with the folder, one warning says so and calls go on with the local store.
"""

import atexit
import contextlib
import itertools
import json
import math
import threading
import time
from pathlib import Path
from typing import Any, Final

from tritile.core.device import Device
from tritile.core.problem import Problem
from tritile.core.settings import cache_dir, store_dir
from tritile.core.threads import at_fork
from tritile.errors import FileError, InvalidValueError, brief
from tritile.tuner.store.files import read_json, sifted, write_whole
from tritile.tuner.store.folder import FORMAT, Folder, Line, now, provenance
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import Store, row_of

FLUSH_S: Final = 15.0  # from the first trial that waits to the object that holds it
PULL_S: Final = 60.0  # between readings, and before a failed write is tried again
EXIT_S: Final = 2.0  # for the last flush of a process
_FIRST_S: Final = 0.05
_HUNG_S: Final = 30.0  # without an answer
_MAX_TRIALS: Final = 1_000_000  # of one reading
_MAX_QUEUED: Final = 10_000
_CHUNK: Final = 250  # rows of a transaction, for which calls may have to wait
_MAX_INDEX: Final = 4 << 20  # bytes of the file that lists the objects that were read


class SharedStore(Store):
    """A store whose trials go to a folder too, and which takes in what others put there."""

    def __init__(self, device: Device, directory: Path, url: str) -> None:
        super().__init__(device, directory)
        self.url = url
        self._index_path = self.path.with_suffix(".shared.json")
        self._notes: dict[str, str] = {}  # warnings of the thread, which the next call issues
        self._begin()

    def _begin(self) -> None:
        """Start without a thread and with nothing to write, as in a forked child."""
        self._thread: threading.Thread | None = None
        self._woken, self._settled = threading.Event(), threading.Event()
        self._queue: list[Line] = []
        self._flush_at = self._since = math.inf  # `_since`: when what the thread does now began
        self._pull_at = -math.inf  # when a miss has the folder read again
        self._wants_pull = self._is_closing = False

    # What calls do

    def add(self, kernel: str, *trials: Trial) -> None:
        """Add trials, as to any store. The thread writes those that the config is the cause of."""
        super().add(kernel, *trials)
        lines, _ = sifted((each for each in trials if each.is_final), lambda each: self._line(kernel, each))
        with _lock:
            self._queue = [*self._queue, *lines][-_MAX_QUEUED:]
            self._flush_at = min(self._flush_at, time.monotonic() + FLUSH_S)
        self._wake()

    def trials(self, kernel: str, problem: Problem, *more: str) -> list[Trial]:
        """Return the trials of a problem. The first look-up has the folder read, and so do later misses."""
        found = super().trials(kernel, problem, *more)
        moment, is_first = time.monotonic(), self._pull_at < 0
        if is_first or (not found and moment >= self._pull_at):
            self._pull_at, self._wants_pull = moment + PULL_S, True
            self._wake()
            if is_first and not found and self._settled.wait(_FIRST_S):
                found = super().trials(kernel, problem, *more)
        self._say()
        return found

    def catch_up(self) -> None:
        """Have the thread write what waits and read what is new, and wait for it while the folder answers."""
        self._settled = settled = threading.Event()
        self._pull_at, self._wants_pull = time.monotonic() + PULL_S, True
        self._wake()
        while self._thread and self._thread.is_alive() and not settled.wait(0.1):
            if time.monotonic() - self._since > _HUNG_S:
                break
        self._say()

    def _line(self, kernel: str, trial: Trial) -> Line:
        return Line(self._environment(kernel), (*row_of(trial), None), provenance(self.device))

    def _wake(self) -> None:
        with _lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tritile-shared", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can be started
                    self._thread.start()
                    _live.append(self)
        self._woken.set()
        self._say()

    def _say(self) -> None:
        if time.monotonic() - self._since > _HUNG_S:
            self._notes["shared"] = f"{self.url}: no answer for {_HUNG_S:.0f} s; calls go on without it"
        notes, self._notes = self._notes, {}
        for kind, text in notes.items():
            super()._warn(kind, text)

    def _warn(self, kind: str, text: str) -> None:
        if threading.current_thread() is self._thread:
            self._notes.setdefault(kind, text)
        else:
            super()._warn(kind, text)

    # What the thread does, and commands

    def _work(self) -> None:
        is_closing = False
        while not is_closing:
            self._woken.wait(max(0.0, min(self._flush_at - time.monotonic(), PULL_S)))
            self._woken.clear()
            is_closing = self._is_closing
            wants_pull, self._wants_pull, settled = self._wants_pull, False, self._settled
            if wants_pull or is_closing or time.monotonic() >= self._flush_at:
                self._try(self.flush)
            if wants_pull:
                self._try(self.pull)
                settled.set()

    def _try(self, work: Any) -> None:
        self._since = time.monotonic()
        try:
            work()
        except Exception as error:  # a file system's own, of any kind
            self._warn("shared", f"{self.url}: {brief(error)}; calls go on without it")
        finally:
            self._since = math.inf

    def flush(self) -> None:
        """Write the trials that wait; if that fails, they wait on. Raises what the file system raises."""
        with _lock:
            lines, self._queue, self._flush_at = self._queue, [], math.inf
        try:
            self._put(lines, written_utc=now().isoformat(timespec="seconds"))
        except BaseException:
            with _lock:
                self._queue = [*lines, *self._queue][-_MAX_QUEUED:]
                self._flush_at = time.monotonic() + PULL_S
            raise

    def _put(self, lines: list[Line], **more: str) -> None:
        """Write lines, and take them in as others will, with their dates corrected."""
        if lines:
            folder = Folder(self.url)
            new = folder.put(self.device.slug, lines, **more)
            read = [line for content in folder.read(new) for line in content.lines if line.row[-1]]
            if read:
                self.take([(line.environment, line.row) for line in read])

    def pull(self, seen: set[tuple[Any, ...]] | None = None) -> int:
        """Take in what the folder has that was not read yet; return how many trials were new here.

        With `seen`, read all objects, and add each trial's contents and dates to it. Raises what the file
        system raises.
        """
        self._take_over()
        folder, cached = Folder(self.url), self._cached() if seen is None else {}
        objects = folder.objects(self.device.slug)
        before = dict(cached)
        for name in cached.keys() - {each.name for each in objects}:  # they were joined
            del cached[name]
        waiting, names, new, total = list[Line](), dict[str, int](), 0, 0
        fresh = (each for each in objects if cached.get(each.name) != each.size)
        for content in itertools.chain(folder.read(fresh), (None,)):
            self._since = time.monotonic() if self._since < math.inf else math.inf
            if content is not None:
                waiting += [line for line in content.lines if line.environment[0] == self.device.name]
                names |= {content.object.name: content.object.size} if content.is_read else {}
                if content.reasons:
                    self._warn("lines", f"{self.url}: skipped what is not valid: {content.reasons[0]}")
            if content is None or len(waiting) >= _CHUNK:
                if seen is not None:
                    for line in waiting:
                        seen.update((line.place, *line.order[1:], date) for date in line.row[-2:])
                taken = self.take([(line.environment, line.row) for line in waiting]) if waiting else 0
                if taken is None:
                    break
                new, total, cached = new + taken, total + len(waiting), cached | names
                waiting, names = [], {}
                if total > _MAX_TRIALS:
                    self._warn("lines", f"{self.url}: took {total} trials, and left the others")
                    break
        if cached != before:
            self._save(cached)
        return new

    def exchange(self) -> tuple[int, int]:
        """Take in all that the folder has, and write what it lacks; return how many trials each.

        Raises FileError if the folder cannot be read or written.
        """
        try:
            self.flush()
            ours, seen, lacking = self.all_trials(), set[tuple[Any, ...]](), list[Line]()
            taken = self.pull(seen)
            for facts, trial in ours:
                line = Line(tuple(facts.values()), (*row_of(trial), None), provenance(self.device))
                if trial.is_final and (line.place, *line.order[1:], trial.measured_utc) not in seen:
                    lacking.append(line)
            self._put(lacking)  # most dates were corrected before, so they say nothing of this host's clock
            if lacking:  # some were corrected, and others then are newer
                self.pull(seen)
        except Exception as error:
            raise FileError(f"{self.url}: {brief(error)}") from error
        return taken, len(lacking)

    def _take_over(self) -> None:
        """Begin with the store of an earlier version, which lies on a network file system."""
        old = cache_dir().absolute() / self.path.name
        if (
            self.path.parent == store_dir().absolute() != old.parent
            and old.exists()
            and not self.path.exists()
        ):
            try:
                self.merge(old)
            except FileError as error:
                self._warn("old", str(error))

    def _cached(self) -> dict[str, int]:
        """Return the sizes of the objects that this store has read, by name; none if it is a new file."""
        with contextlib.suppress(InvalidValueError):
            data = read_json(self._index_path, _MAX_INDEX)
            if isinstance(data, dict) and isinstance(objects := data.pop("objects", None), dict):
                return objects if data == self._origin() else {}
        return {}

    def _save(self, cached: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # the next process reads them again
            write_whole(self._index_path, json.dumps(self._origin() | {"objects": cached}))

    def _origin(self) -> dict[str, Any]:
        return {"url": self.url, "format": FORMAT, "inode": (self._identity() or (0, 0))[1]}


_live: Final[list[SharedStore]] = []  # with a thread
_lock: Final = threading.RLock()


def _after_fork(ended: bool) -> None:
    for store in _live:
        store._begin()
    _live.clear()


at_fork(_lock, _after_fork)


@atexit.register
def _close() -> None:
    """Write what waits as the process ends, within `EXIT_S`, and say what went wrong."""
    until = time.monotonic() + EXIT_S
    for store in _live:
        store._is_closing = True
        store._woken.set()
    for store in _live:
        if store._thread is not None:
            store._thread.join(max(0.0, until - time.monotonic()))
        store._say()
