"""The processes that tuning works with: some that compile, and one that measures."""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from tritile.core.config import Config
from tritile.errors import TuningError
from tritile.tune.measure import bench
from tritile.tune.measure.child import Child, ChildError, Nursery
from tritile.tune.measure.pool import COMPILE_LIMIT_S, CompilePool
from tritile.tune.measure.protocols import Subject

_BEGIN_S = 300.0  # for operands, and for starting the GPU
_RACE_S = 120.0
_WORN = 2000  # configs that one process measures: each costs it some memory
_AGAIN = 2  # times that a process killed from outside is asked once more


class Workshop:
    """Where subjects are compiled and measured.

    `gpu` is the index of the GPU; None where subjects need none. What hangs for `limit_s` seconds, or ends
    its process, costs the config that was asked about, and the process is started anew.
    """

    benches = 2  # subjects whose operands are on the GPU at a time

    def __init__(
        self,
        gpu: int | None,
        jobs: int | None = None,
        limit_s: float = 10.0,
        compile_s: float = COMPILE_LIMIT_S,
        nursery: Nursery | None = None,
    ) -> None:
        self._gpu, self._limit_s, self._compile_s = gpu, limit_s, compile_s
        nursery = nursery or Nursery()
        self._measuring = Child(nursery)
        self.pool = CompilePool(jobs, nursery)
        self._begun: set[int] = set()
        self._screened = 0  # by the process that measures, which keeps every kernel it loaded
        self._started = self._starting()

    def _starting(self) -> list[Future[None]]:
        return [self.pool.submit(_nothing) for _ in range(self.pool.processes)]

    @property
    def measuring_pid(self) -> int | None:
        """The process that measures; None where it does not run."""
        return self._measuring.pid

    def start(self) -> None:
        """Wait until every process is ready: they start by themselves meanwhile."""
        self._asked(_nothing, limit_s=_BEGIN_S)
        for future in self._started:
            future.result()

    def renew(self) -> None:
        """Go on with new processes, which have compiled and loaded nothing yet."""
        self._begun.clear()
        self._measuring.close()
        self.pool.renew()
        self._started = self._starting()
        self.start()

    def compile(self, subject: Subject, config: Config, urgency: float) -> Future[None]:
        """Start compiling; the future raises ChildError where the compiler refuses, dies or hangs.

        It raises TuningError where there is no process to compile.
        """
        return self.pool.submit(_compile, subject, config, urgency=urgency, limit_s=self._compile_s)

    def compile_check(self, subject: Subject, config: Config, urgency: float) -> None:
        """Start compiling what a check of this config will run, so that it need not wait for that."""
        self.pool.submit(_compile_check, subject, config, urgency=urgency, limit_s=self._compile_s)

    def begin(self, number: int, subject: Subject) -> None:
        """Put a subject's operands on the GPU. Raises TuningError where that fails."""
        self._of(number, subject, bench.begun)

    def screen(
        self, number: int, subject: Subject, config: Config, fastest_us: float, held_too: bool
    ) -> bench.Screened:
        """Time a config quickly. Raises ChildError for one that fails, hangs or ends the process."""
        self._screened += 1
        return self._of(number, subject, bench.screen, config, fastest_us, held_too)

    def race(self, number: int, subject: Subject, configs: Sequence[Config]) -> list[list[float]]:
        """Time configs in turns: microseconds of each, run after run. Raises ChildError."""
        return self._of(number, subject, bench.race, list(configs), limit_s=_RACE_S)

    def check(self, number: int, subject: Subject, config: Config) -> float | None:
        """The relative error of a config's answer. Raises ChildError for a wrong one."""
        return self._of(number, subject, bench.check, config, limit_s=_RACE_S)

    def end(self, number: int) -> None:
        """Give up a subject's operands."""
        if number in self._begun:
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

    def _of(
        self,
        number: int,
        subject: Subject,
        function: Callable[..., Any],
        *arguments: Any,
        limit_s: float = math.nan,
    ) -> Any:
        """Ask about a subject, begun again if the process that knew it is gone.

        Raises ChildError where what is asked fails, and TuningError where the subject cannot be begun:
        that is not the doing of the config that is asked about.
        """
        limit_s = self._limit_s if math.isnan(limit_s) else limit_s
        for turn in range(_AGAIN + 1):
            begun = number in self._begun
            try:
                if not begun:
                    self._asked(bench.begin, number, subject, self._gpu, limit_s=_BEGIN_S)
                    self._begun.add(number)
                    begun = True
                return self._asked(function, number, *arguments, limit_s=limit_s)
            except ChildError as error:
                if error.blameless and turn < _AGAIN:
                    continue
                if not begun:
                    raise TuningError(f"its operands cannot be made: {error}") from error
                raise
        raise AssertionError("not reached")

    def _asked(self, function: Callable[..., Any], *arguments: Any, limit_s: float) -> Any:
        try:
            return self._measuring.ask(function, *arguments, limit_s=limit_s)
        except BaseException as error:
            if not isinstance(error, ChildError) or error.lost:
                self._begun.clear()
            raise

    def __enter__(self) -> "Workshop":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _nothing() -> None:
    """What a process is asked to see that it is there."""


def _compile_check(subject: Subject, config: Config) -> None:
    subject.compile_check(config)


def _compile(subject: Subject, config: Config) -> None:
    subject.compile(config)


_IDLE_S = 30.0  # for which a workshop waits for more before its processes end
_lock = threading.RLock()
_shops: dict[int, Workshop] = {}
_idle: dict[int, threading.Timer] = {}


@contextlib.contextmanager
def borrowed(gpu: int) -> Iterator[Workshop]:
    """This process's workshop for a GPU, for one borrower at a time; it ends after half a minute's rest."""
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
    """The processes are the parent's: this one starts its own."""
    global _lock
    _lock = threading.RLock()
    _shops.clear()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
