"""Worker processes: several that compile, and one that measures. Any of them may hang, crash or be killed.

The caller starts a fork server, which imports torch and touches no GPU. The server forks workers, in
milliseconds each, hands every worker one request at a time, and kills it if a request takes too long. All
processes exit with the caller, even if that is killed.

`multiprocessing` cannot start the server: it would run a script without `if __name__ == "__main__"` a second
time, and it refuses to start anything in a daemonic process.
"""

import contextlib
import ctypes
import heapq
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import cloudpickle
import torch

from tritile.core.config import Config
from tritile.core.triton_private import read_own_files
from tritile.errors import TritileError, TuningError, brief
from tritile.tuner.measure import benchmark, server
from tritile.tuner.measure.benchmark import ScreenResult, Tunable

COMPILE_LIMIT_S = 120.0
_START_S: Final = 120.0  # to import torch on a busy machine
_UNUSED_S: Final = 600.0  # until a server that was started early, and not needed, ends
_BEGIN_S: Final = 300.0  # to initialize the GPU and make operands
_RACE_S: Final = 120.0
_GRACE_S: Final = 1.0  # to let a process end by itself
_IDLE_S: Final = 30.0  # until an unused shared runner ends its processes
_MAX_COMPILERS: Final = 16  # compiling processes, each with its own copy of torch
_NICENESS: Final = 10  # of compiling processes: the measuring one and the caller go first
_MAX_REQUESTS: Final = 256  # per compiling process, as Triton keeps every kernel, about a MB, in memory
_MAX_SCREENED: Final = 2000  # configs per measuring process, for the same reason
_RETRIES: Final = 2  # of a request whose process was killed from outside
_MAX_ANSWER: Final = 1 << 28  # bytes
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)


class WorkerError(TuningError):
    """A request failed in a worker. `retryable`: the worker was killed, and not by the request."""

    def __init__(self, text: str, retryable: bool = False) -> None:
        super().__init__(text)
        self.retryable = retryable


@dataclass(frozen=True, order=True)
class _Request:
    urgency: float
    number: int
    measures: bool  # for the measuring worker, which keeps operands between requests
    limit_s: float
    retries: int  # left
    work: bytes  # pickled: a function and its arguments


_Outcome = bytes | TuningError  # the function's pickled result, or the error to raise


def processes_for(sharers: int = 1) -> int:
    """Return how many compiling processes each of `sharers` tuners on this machine may have."""
    return max(1, min(_MAX_COMPILERS, (os.cpu_count() or 1) // sharers))


def _work(connection: Connection, inherited: Sequence[Connection], stderr: int, nice: bool) -> NoReturn:
    """Worker loop: answer requests with the outcome and whether the GPU is lost, until the server exits."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        # Die with the server, even in the middle of a call.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for other in inherited:  # a config might write to any open file descriptor
        other.close()
    os.setpgid(0, 0)  # a group, so that children such as a hanging assembler are killed with it
    os.dup2(stderr, 2)
    if nice:
        os.nice(_NICENESS)
    while True:
        outcome: _Outcome
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
            outcome, is_lost = cloudpickle.dumps(function(*arguments)), False
        except (EOFError, ConnectionError):
            os._exit(0)  # an ordinary exit waits for the GPU, which may not answer
        except Exception as error:
            text = str(error) if isinstance(error, TritileError) else brief(error)
            outcome, is_lost = WorkerError(text), _gpu_is_lost()
        try:
            connection.send((outcome, is_lost))
        except ConnectionError:
            os._exit(0)


def _gpu_is_lost() -> bool:
    """True if the GPU context of this process is broken, as after an illegal memory access."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:  # whatever it is, this process cannot measure any more
        return True
    return False


class _Worker:
    """A process forked from the server, and its current request."""

    def __init__(self, measures: bool, inherited: Sequence[Connection]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.measures, self.served = measures, 0
        self.request: _Request | None = None
        self.deadline = math.inf
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - the last line says why the process died
        arguments = theirs, [self.connection, *inherited], self._stderr.fileno(), not measures
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        self._process.start()
        theirs.close()

    def begin(self, request: _Request) -> None:
        self.request, self.deadline = request, time.monotonic() + request.limit_s
        self.served += 1
        with contextlib.suppress(ConnectionError):  # it died while idle, as `outcome` will find
            self.connection.send_bytes(request.work)

    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def outcome(self) -> _Outcome:
        """Read the outcome. End the process if it died, lost its GPU or has served its share of requests."""
        self.request, self.deadline = None, math.inf
        outcome: _Outcome
        try:
            outcome, is_lost = pickle.loads(self.connection.recv_bytes(_MAX_ANSWER))
        except (EOFError, ConnectionError):
            self._process.join(_GRACE_S)
            code = self.end()
            reason = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
            self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 4096))
            lines = self._stderr.read().decode(errors="replace").split("\n")
            last = next((f": {line.strip()[:120]}" for line in reversed(lines) if line.strip()), "")
            # No request kills its own process with SIGKILL: the system did, or a user.
            return WorkerError(f"the process died: {reason}{last}", code in (None, -signal.SIGKILL))
        except Exception as error:  # an impossible length, or whatever unpickling raises
            outcome, is_lost = WorkerError(f"garbled: its answer cannot be read: {brief(error)}"), True
        if is_lost or (self.served >= _MAX_REQUESTS and not self.measures):
            self.end()
        return outcome

    def end(self) -> int | None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # it may not have a group of its own yet
        self._process.join(_GRACE_S)  # not for long: it may be stuck in the driver
        return self._process.exitcode


@dataclass(frozen=True)
class CallerState:
    """How many processes compile, and what the server and its workers share with the caller.

    A server that was started early needs it, as the program may have changed any of it meanwhile.
    """

    compilers: int
    path: list[str]
    environment: dict[str, str]
    folder: str

    @classmethod
    def of_caller(cls, compilers: int) -> Self:
        try:
            folder = str(Path.cwd())
        except OSError:  # it was deleted
            folder = "/"
        return cls(compilers, [*map(str, sys.path)], server.environment(), folder)

    def apply(self) -> None:
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)
        with contextlib.suppress(OSError):
            os.chdir(self.folder)


def serve(caller: Connection) -> NoReturn:
    """Server loop: hand the caller's requests to workers, the most urgent first, until the caller exits.

    The caller sends its `CallerState`, then requests, the numbers of cancelled requests, and None to stop.
    """
    read_own_files()  # Triton hashes hundreds of megabytes: once, before any fork
    try:
        caller.send(None)  # ready
        if not caller.poll(_UNUSED_S):
            os._exit(0)
        state: CallerState = caller.recv()
    except (EOFError, ConnectionError):
        os._exit(0)
    state.apply()
    waiting: dict[bool, list[_Request]] = {True: [], False: []}  # by `measures`
    workers: list[_Worker] = []
    while True:
        for measures, queue in waiting.items():
            of_kind = [worker for worker in workers if worker.measures == measures]
            idle = [worker for worker in of_kind if worker.request is None]
            most = 1 if measures else state.compilers
            for _ in range(min(len(queue), most - len(of_kind) + len(idle))):
                if not idle:
                    idle.append(_Worker(measures, [caller, *(worker.connection for worker in workers)]))
                    workers.append(idle[0])
                idle.pop().begin(heapq.heappop(queue))
        due = min((worker.deadline for worker in workers), default=math.inf)
        limit = None if due == math.inf else max(0.0, due - time.monotonic())
        busy = [(worker, worker.request) for worker in workers if worker.request is not None]
        ready = wait([caller, *(worker.connection for worker, _ in busy)], limit)
        for worker, request in busy:
            if worker.connection in ready:
                outcome = worker.outcome()
            elif worker.is_late():
                worker.end()
                outcome = WorkerError(f"hung: no answer in {request.limit_s:g} s")
            else:
                continue
            with contextlib.suppress(ConnectionError):
                caller.send((request.number, outcome))
        if caller in ready:
            try:
                message = caller.recv()
            except (EOFError, ConnectionError):
                message = None
            if isinstance(message, _Request):
                heapq.heappush(waiting[message.measures], message)
            else:
                for worker in workers:
                    if message is None or (worker.request and worker.request.number == message):
                        worker.end()
                if message is None:
                    os._exit(0)
                waiting = {m: [r for r in queue if r.number != message] for m, queue in waiting.items()}
                for queue in waiting.values():
                    heapq.heapify(queue)
        workers = [worker for worker in workers if not worker.connection.closed]


class WorkerPool:
    """A pool of processes: several that compile, and one that measures.

    A request that crashes its process or takes too long stops no other. Functions are sent by name if they
    can be imported, else by value.
    """

    def __init__(self, compilers: int | None = None) -> None:
        self._compilers = compilers or processes_for()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Future[Any], _Request]] = {}
        self._server: Any = None
        self._connection: Connection | None = None
        self._reader: threading.Thread | None = None
        self._is_closed = False

    def submit(
        self, function: Callable[..., Any], *arguments: Any, urgency: float = 0.0,
        limit_s: float = COMPILE_LIMIT_S, retries: int = 1, measures: bool = False,
    ) -> Future[Any]:  # fmt: skip
        """Call a function in a compiling process; requests with a lower `urgency` go first.

        The future raises WorkerError if the call fails, and TuningError if no process can be started.
        Cancelling it kills the process that runs the request.
        """
        future, number = Future[Any](), next(self._numbers)
        work = cloudpickle.dumps((function, arguments))
        self._request(future, _Request(urgency, number, measures, limit_s, retries, work))
        future.add_done_callback(lambda future: self._drop(number) if future.cancelled() else None)
        return future

    def measure(
        self, function: Callable[..., Any], *arguments: Any, limit_s: float = _RACE_S, retries: int = 0
    ) -> Any:
        """Return the result of a function in the measuring process. Raises like a future of `submit`."""
        future = self.submit(function, *arguments, limit_s=limit_s, retries=retries, measures=True)
        try:
            return future.result()
        finally:
            future.cancel()  # if Ctrl-C interrupted the wait

    def start(self) -> None:
        """Start the server, which takes seconds, unless it is running. Raises TuningError if that fails."""
        with self._lock:
            if self._connection is None:
                try:
                    self._server, number = self._started()
                except OSError as error:
                    raise TuningError(f"no process can be started: {brief(error)}") from error
                self._connection = Connection(number)
                arguments = self._server, self._connection
                with contextlib.suppress(OSError):  # it ended, as `_read` will find
                    self._connection.send(CallerState.of_caller(self._compilers))
                self._reader = threading.Thread(target=self._read, args=arguments, daemon=True)
                self._reader.start()

    _started = staticmethod(server.take)

    def _request(self, future: Future[Any], request: _Request) -> None:
        self._pending[request.number] = future, request
        try:
            self.start()
        except TuningError as error:
            self._resolve(request.number, error)
        else:
            self._send(request)

    def _send(self, message: _Request | int | None) -> None:
        with self._lock, contextlib.suppress(OSError):  # the server ended, as `_read` will find
            if self._connection is not None:
                self._connection.send(message)

    def _drop(self, number: int) -> None:
        if self._pending.pop(number, None) is not None:
            self._send(number)

    def _read(self, server: Any, connection: Connection) -> None:
        """Resolve futures until the server exits, then fail the pending ones."""
        failure = TuningError("no process can be started: the first one ended")
        with contextlib.suppress(EOFError, OSError):
            if connection.poll(_START_S):
                connection.recv()
                failure = WorkerError("the process died, and the fork server too", retryable=True)
                while True:
                    self._resolve(*connection.recv())
        server.kill()
        server.wait()
        with self._lock:
            connection.close()
            self._connection = None if self._connection is connection else self._connection
        for number in list(self._pending):
            self._resolve(number, failure)

    def _resolve(self, number: int, outcome: _Outcome) -> None:
        """Set the outcome of a future, or send the request again if it was not at fault."""
        future, request = self._pending.pop(number, (None, None))
        if future is None or request is None or future.cancelled():
            return
        is_retryable = isinstance(outcome, WorkerError) and outcome.retryable
        if is_retryable and request.retries and not self._is_closed:
            self._request(future, replace(request, retries=request.retries - 1))
            return self._drop(number) if future.cancelled() else None  # in the meantime
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, TuningError):
            return future.set_exception(outcome)
        try:
            value = pickle.loads(outcome)
        except Exception as error:  # unpickling may raise anything
            future.set_exception(WorkerError(f"garbled: its answer cannot be read: {brief(error)}"))
        else:
            future.set_result(value)

    def close(self) -> None:
        self._is_closed = True
        while self._pending:
            future, _ = self._pending.popitem()[1]
            if future.cancel():
                future.set_running_or_notify_cancel()  # wakes up waiting threads
        self._send(None)
        if self._reader is not None:
            self._reader.join(10 * _GRACE_S)
            self._server.kill()  # if it did not exit
            self._reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PoolRunner(WorkerPool):
    """The `Runner` that compiles and measures in processes of its own.

    `gpu` is the index of the GPU; None if tunables need none. A config that hangs for `limit_s` seconds or
    crashes its process stops no other. Tunables compile in order of arrival.
    """

    max_resident = 2

    def __init__(
        self, gpu: int | None, jobs: int | None = None, limit_s: float = 10.0,
        compile_s: float = COMPILE_LIMIT_S,
    ) -> None:  # fmt: skip
        super().__init__(jobs)
        self._gpu, self._limit_s, self._compile_s = gpu, limit_s, compile_s
        self._tunables: dict[Tunable, int] = {}  # numbered in order of arrival
        self._tunable_numbers = itertools.count()
        self._screened = 0  # configs, in the current measuring process
        with contextlib.suppress(TuningError):  # requests raise it again
            self.start()

    def _number(self, tunable: Tunable) -> int:
        if tunable not in self._tunables:
            self._tunables[tunable] = next(self._tunable_numbers)
        return self._tunables[tunable]

    def compile(self, tunable: Tunable, config: Config, for_check: bool = False) -> Future[None]:
        """Start compiling a config or, `for_check`, the other kernels that its check runs.

        The future raises WorkerError if the compiler fails, crashes or hangs, and TuningError if no process
        can be started.
        """
        urgency = self._number(tunable)
        return self.submit(tunable.compile, config, for_check, urgency=urgency, limit_s=self._compile_s)

    def begin(self, tunable: Tunable) -> None:
        """Put the operands on the GPU. Raises TuningError if that fails."""
        request = self._number(tunable), tunable, self._gpu
        try:
            self.measure(benchmark.begin, *request, limit_s=_BEGIN_S, retries=_RETRIES)
        except WorkerError as error:
            raise TuningError(f"its operands cannot be made: {error}") from error

    def screen(self, tunable: Tunable, config: Config, fastest_us: float) -> ScreenResult:
        self._screened += 1
        return self._call(tunable, "screen", config, fastest_us, limit_s=self._limit_s)

    def race(self, tunable: Tunable, configs: Sequence[Config]) -> list[list[float]]:
        return self._call(tunable, "race", list(configs))

    def check(self, tunable: Tunable, config: Config) -> float | None:
        return self._call(tunable, "check", config)

    def _call(self, tunable: Tunable, method: str, *arguments: Any, limit_s: float = _RACE_S) -> Any:
        """Call a method of the tunable's `Benchmark`, which is made first if the measuring process is new.

        Raises WorkerError if the call fails, and TuningError if the benchmark cannot be made, for which the
        config is not to blame.
        """
        retries = _RETRIES
        while True:
            request = self._number(tunable), method, *arguments
            try:
                is_begun, value = self.measure(benchmark.call, *request, limit_s=limit_s)
                if is_begun:
                    return value
            except WorkerError as error:
                if not error.retryable or not retries:
                    raise
                retries -= 1
            self.begin(tunable)

    def end(self, tunable: Tunable) -> None:
        number, is_exhausted = self._tunables.pop(tunable, None), self._screened > _MAX_SCREENED
        if number is not None:
            with contextlib.suppress(TuningError):
                self.measure(benchmark.end, number, is_exhausted, limit_s=_BEGIN_S)
        if is_exhausted:
            self._screened = 0


@dataclass
class _SharedRunner:
    """The runner of one GPU, its lock, and the timer that closes it when idle."""

    lock: Any = field(default_factory=threading.RLock)
    runner: PoolRunner | None = None
    idle: threading.Timer | None = None


_runners: dict[int, _SharedRunner] = {}  # by GPU; `setdefault` of a dictionary is atomic


@contextlib.contextmanager
def shared_runner(gpu: int) -> Iterator[PoolRunner]:
    """Yield this process's runner for a GPU, to one thread at a time; it is closed after half a minute idle.

    Runners of different GPUs work in parallel.
    """
    shared = _runners.setdefault(gpu, _SharedRunner())
    with shared.lock:
        if shared.idle is not None:
            shared.idle.cancel()
        if shared.runner is None:
            shared.runner = PoolRunner(gpu)
        try:
            yield shared.runner
        finally:
            shared.idle = threading.Timer(_IDLE_S, _close_idle, (shared,))
            shared.idle.daemon = True
            shared.idle.start()


def _close_idle(shared: _SharedRunner) -> None:
    with shared.lock:
        if shared.idle is threading.current_thread() and shared.runner is not None:
            runner, shared.runner, shared.idle = shared.runner, None, None
            runner.close()


def _after_fork() -> None:
    """Drop the runners in a forked child: their processes belong to the parent."""
    for shared in _runners.values():
        if shared.runner is not None and shared.runner._connection is not None:
            shared.runner._connection.close()
    _runners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
