"""Run the processes that tuning works with: some that compile, and one that measures."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from tritile.core.config import Config
from tritile.errors import TuningError
from tritile.tune.measure import bench
from tritile.tune.measure.bench import Screened, Subject
from tritile.tune.measure.child import Child, ChildError, ForkServer
from tritile.tune.measure.pool import COMPILE_LIMIT_S, CompilePool

_BEGIN_S = 300.0  # for making operands and starting the GPU
_RACE_S = 120.0
_WORN = 2000  # configs that one process measures: it keeps each kernel in memory
_AGAIN = 2  # times that a process killed from outside is asked once more


class Workshop:
    """Compile and measure subjects.

    `gpu` is the index of the GPU; None where subjects need none. A config that hangs for `limit_s` seconds,
    or ends its process, fails alone, and the process is started anew.
    """

    benches = 2  # subjects whose operands are on the GPU at a time

    def __init__(
        self,
        gpu: int | None,
        jobs: int | None = None,
        limit_s: float = 10.0,
        compile_s: float = COMPILE_LIMIT_S,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._gpu, self._limit_s, self._compile_s = gpu, limit_s, compile_s
        fork_server = fork_server or ForkServer()
        self._measuring = Child(fork_server)
        self.pool = CompilePool(jobs, fork_server)
        self._numbers: dict[Subject, int] = {}  # in the order in which they came
        self._order = itertools.count()
        self._begun: set[int] = set()
        self._screened = 0  # configs, by the current measuring process
        for _ in range(self.pool.processes):
            self.pool.submit(int)  # whatever it is: the process starts meanwhile

    def _number(self, subject: Subject) -> int:
        if subject not in self._numbers:
            self._numbers[subject] = next(self._order)
        return self._numbers[subject]

    def compile(self, subject: Subject, config: Config, for_check: bool = False) -> Future[None]:
        """Start compiling a config; or what a check of it runs beside, so that the check need not wait.

        Subjects that came first are served first. The future raises ChildError where the compiler refuses,
        dies or hangs, TuningError where no process can be started.
        """
        work, urgency = subject.compile_check if for_check else subject.compile, self._number(subject)
        return self.pool.submit(work, config, urgency=urgency, limit_s=self._compile_s)

    def begin(self, subject: Subject) -> None:
        """Put a subject's operands on the GPU. Raises TuningError where that fails."""
        self._of(subject)

    def screen(self, subject: Subject, config: Config, fastest_us: float) -> Screened:
        """Time a config quickly. Raises ChildError for one that fails, hangs or ends the process."""
        self._screened += 1
        return self._of(subject, "screen", config, fastest_us, limit_s=self._limit_s)

    def race(self, subject: Subject, configs: Sequence[Config]) -> list[list[float]]:
        """Time configs in turns; return the microseconds of each, run after run. Raises ChildError."""
        return self._of(subject, "race", list(configs))

    def check(self, subject: Subject, config: Config) -> float | None:
        """Return the relative error of a config's answer. Raises ChildError for a wrong one."""
        return self._of(subject, "check", config)

    def end(self, subject: Subject) -> None:
        """Free a subject's operands."""
        number = self._numbers.pop(subject, None)
        if number is not None and number in self._begun:
            self._begun.discard(number)
            try:
                self._asked(bench.end, number, limit_s=_BEGIN_S)
            except TuningError:
                self._begun.clear()
        if self._screened > _WORN and not self._begun:
            self._measuring.close()  # the next request starts another
            self._screened = 0

    def close(self) -> None:
        """End every process."""
        self._measuring.close()
        self.pool.close()

    def _of(self, subject: Subject, method: str = "", *arguments: Any, limit_s: float = _RACE_S) -> Any:
        """Ask the measuring process about a subject, which is begun first if that process is new.

        Raises ChildError where the request fails, and TuningError where the subject cannot be begun: then
        the config asked about is not at fault.
        """
        number = self._number(subject)
        for attempt in range(_AGAIN + 1):
            begun = number in self._begun
            try:
                if not begun:
                    self._asked(bench.begin, number, subject, self._gpu, limit_s=_BEGIN_S)
                    self._begun.add(number)
                    begun = True
                return self._asked(bench.ask, number, method, *arguments, limit_s=limit_s) if method else None
            except ChildError as error:
                if error.blameless and attempt < _AGAIN:
                    continue
                if not begun:
                    raise TuningError(f"its operands cannot be made: {error}") from error
                raise
        raise AssertionError("not reached")

    def _asked(self, *request: Any, limit_s: float) -> Any:
        try:
            return self._measuring.ask(*request, limit_s=limit_s)
        except BaseException as error:
            if not isinstance(error, ChildError) or error.lost:
                self._begun.clear()
            raise

    def __enter__(self) -> "Workshop":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_IDLE_S = 30.0  # without a borrower, after which a workshop ends its processes
_lock = threading.RLock()
_shops: dict[int, Workshop] = {}
_idle: dict[int, threading.Timer] = {}


@contextlib.contextmanager
def borrowed(gpu: int) -> Iterator[Workshop]:
    """Lend this process's workshop for a GPU to one borrower at a time; close it after half a minute idle."""
    with _lock:
        if gpu in _idle:
            _idle.pop(gpu).cancel()
        if gpu not in _shops:
            _shops[gpu] = Workshop(gpu)
        try:
            yield _shops[gpu]
        finally:
            _idle[gpu] = threading.Timer(_IDLE_S, _retire, (gpu,))
            _idle[gpu].daemon = True
            _idle[gpu].start()


def _retire(gpu: int) -> None:
    with _lock:
        if _idle.get(gpu) is threading.current_thread():
            del _idle[gpu]
            _shops.pop(gpu).close()


def _after_fork() -> None:
    """Forget workshops in a forked process: their processes are the parent's."""
    global _lock
    _lock = threading.RLock()
    _shops.clear()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
