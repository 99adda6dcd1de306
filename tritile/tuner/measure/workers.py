"""Processes that compile, and one that measures. Any of them may hang, crash or be killed.

A caller starts one server: a program of its own that has imported torch and touches no GPU. The server forks
a worker in milliseconds, hands it one request at a time, and kills it when a request takes too long. The
server is not started by `multiprocessing`, which would run a script without `if __name__ == "__main__"`
again, and starts nothing in a daemonic process. All processes end with the caller, also a killed one.
"""

import contextlib
import ctypes
import heapq
import itertools
import json
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NoReturn, Self

import cloudpickle
import torch

from tritile.core.config import Config
from tritile.core.triton_private import read_own_files
from tritile.errors import TritileError, TuningError, brief
from tritile.tuner.measure import bench
from tritile.tuner.measure.bench import Screened, Subject

COMPILE_LIMIT_S = 120.0
_START_S: Final = 120.0  # for importing torch on a busy machine
_BEGIN_S: Final = 300.0  # for making operands and starting the GPU
_RACE_S: Final = 120.0
_PATIENCE_S: Final = 1.0  # for a process that is to end, before it is killed
_IDLE_S: Final = 30.0  # without a borrower, after which a workshop ends its processes
_MOST: Final = 16  # processes that compile, each of which holds a copy of torch
_NICENESS: Final = 10  # of them, so that the process that measures, and the caller, go first
_WORN: Final = 256  # requests to a process that compiles: Triton keeps what it compiled in memory, a MB each
_WORN_BENCH: Final = 2000  # configs that one process measures: it keeps each kernel in memory
_AGAIN: Final = 2  # times that a request is made again whose process was killed from outside
_LARGEST: Final = 1 << 28  # bytes of an answer
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from tritile.tuner.measure.workers import Connection, serve; "
    "serve(Connection(int(sys.argv[1])), int(sys.argv[2]))"
)


class WorkerError(TuningError):
    """A request failed in a worker. `blameless`: something else than the request killed the worker."""

    def __init__(self, text: str, blameless: bool = False) -> None:
        super().__init__(text)
        self.blameless = blameless


@dataclass(frozen=True, order=True)
class _Request:
    urgency: float
    number: int
    measures: bool  # by the one worker that measures, which keeps operands between requests
    limit_s: float
    again: int  # times that it is made again where it was not at fault
    work: bytes  # a function and its arguments


_Outcome = bytes | TuningError  # what the function returned, or what is raised


def processes_for(sharers: int = 1) -> int:
    """Return how many processes compile for each of `sharers` tuners on this machine."""
    return max(1, min(_MOST, (os.cpu_count() or 1) // sharers))


def _work(connection: Connection, foreign: Sequence[Connection], stderr: int, nice: bool) -> NoReturn:
    """Be a worker: answer requests by an outcome and whether the GPU is lost, until the server is gone."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # at the server's end, amid any call
    for each in foreign:  # a config may write to whatever it finds open
        each.close()
    os.setpgid(0, 0)  # what it starts, such as an assembler that hangs, is killed with it
    os.dup2(stderr, 2)
    if nice:
        os.nice(_NICENESS)
    while True:
        outcome: _Outcome
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
            outcome, is_lost = cloudpickle.dumps(function(*arguments)), False
        except (EOFError, ConnectionError):
            os._exit(0)  # without waiting for a GPU that may not answer
        except Exception as error:
            text = str(error) if isinstance(error, TritileError) else brief(error)
            outcome, is_lost = WorkerError(text), _gpu_is_lost()
        try:
            connection.send((outcome, is_lost))
        except ConnectionError:
            os._exit(0)


def _gpu_is_lost() -> bool:
    """True if this process's GPU no longer answers, as after an illegal memory access."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:  # whatever the error is, this process cannot measure any more
        return True
    return False


class _Worker:
    """A process that was forked from the server, and the request that it is at."""

    def __init__(self, measures: bool, foreign: Sequence[Connection]) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.measures, self.served = measures, 0
        self.request: _Request | None = None
        self.deadline = math.inf
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - its last line says why the process died
        arguments = theirs, [self.connection, *foreign], self._stderr.fileno(), not measures
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
        self._process.start()
        theirs.close()

    def begin(self, request: _Request) -> None:
        self.request, self.deadline = request, time.monotonic() + request.limit_s
        self.served += 1
        with contextlib.suppress(ConnectionError):  # it died while it was idle: `outcome` finds that
            self.connection.send_bytes(request.work)

    def is_late(self) -> bool:
        return time.monotonic() >= self.deadline

    def outcome(self) -> _Outcome:
        """Read an outcome; end a process that died, is worn or cannot measure any more."""
        self.request, self.deadline = None, math.inf
        outcome: _Outcome
        try:
            outcome, is_lost = pickle.loads(self.connection.recv_bytes(_LARGEST))
        except (EOFError, ConnectionError):
            self._process.join(_PATIENCE_S)
            code = self.end()
            how = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
            self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 4096))
            lines = self._stderr.read().decode(errors="replace").split("\n")
            last = next((f": {line.strip()[:120]}" for line in reversed(lines) if line.strip()), "")
            # No request kills its process with this signal: somebody else did.
            return WorkerError(f"the process died: {how}{last}", code in (None, -signal.SIGKILL))
        except Exception as error:  # a length that no outcome has, or whatever unpickling raises
            outcome, is_lost = WorkerError(f"garbled: its answer cannot be read: {brief(error)}"), True
        if is_lost or (self.served >= _WORN and not self.measures):
            self.end()
        return outcome

    def end(self) -> int | None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # it may not have a group of its own yet
        self._process.join(_PATIENCE_S)  # not for long: a driver may hold it
        return self._process.exitcode


def serve(caller: Connection, compilers: int) -> NoReturn:
    """Be the server: give a caller's requests to workers, the most urgent first, until the caller is gone.

    The caller sends requests, the numbers of those that it no longer waits for, and None to end.
    """
    read_own_files()  # hundreds of megabytes: once for all that are forked
    waiting: dict[bool, list[_Request]] = {True: [], False: []}  # by `measures`
    workers: list[_Worker] = []
    caller.send(None)  # ready
    while True:
        for measures, queue in waiting.items():
            own = [worker for worker in workers if worker.measures == measures]
            idle = [worker for worker in own if worker.request is None]
            for _ in range(min(len(queue), (1 if measures else compilers) - len(own) + len(idle))):
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


class Workers:
    """Run functions in several processes that compile, and in one that measures.

    A request that ends its process, or takes too long, fails alone. Functions are sent by name where they can
    be imported, else whole.
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
        limit_s: float = COMPILE_LIMIT_S, again: int = 1, measures: bool = False,
    ) -> Future[Any]:  # fmt: skip
        """Call a function in a process that compiles; requests of lower urgency are served first.

        The future raises WorkerError where the call fails, TuningError where no process can be started. A
        process that is at a request which is cancelled is killed.
        """
        future, number = Future[Any](), next(self._numbers)
        work = cloudpickle.dumps((function, arguments))
        self._request(future, _Request(urgency, number, measures, limit_s, again, work))
        future.add_done_callback(lambda future: self._drop(number) if future.cancelled() else None)
        return future

    def measure(
        self, function: Callable[..., Any], *arguments: Any, limit_s: float = _RACE_S, again: int = 0
    ) -> Any:
        """Return what a function does in the process that measures. Raises as the futures of `submit` do."""
        future = self.submit(function, *arguments, limit_s=limit_s, again=again, measures=True)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C, say

    def start(self) -> None:
        """Start the server, which takes seconds, unless it runs. Raises TuningError where that fails."""
        with self._lock:
            if self._connection is None:
                ours, theirs = multiprocessing.Pipe()
                try:
                    with theirs:
                        self._server = self._started(theirs)
                except OSError as error:
                    raise TuningError(f"no process can be started: {brief(error)}") from error
                self._connection, arguments = ours, (self._server, ours)
                self._reader = threading.Thread(target=self._read, args=arguments, daemon=True)
                self._reader.start()

    def _started(self, theirs: Connection) -> Any:
        number, path = theirs.fileno(), json.dumps([str(each) for each in sys.path])
        return subprocess.Popen(
            # -P: else a json.py of the folder it runs in would be imported before sys.path is set.
            [sys.executable, "-P", "-c", _PROGRAM, str(number), str(self._compilers), path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a refusal of the assembler prints the whole assembly
            pass_fds=(number,),
            process_group=0,  # signals to all of a terminal's, or a job's, processes are the caller's
            # The last lines that a process writes say why it died: nothing is logged there.
            env={name: value for name, value in os.environ.items() if name != "TRITILE_LOG"},
        )

    def _request(self, future: Future[Any], request: _Request) -> None:
        self._pending[request.number] = future, request
        try:
            self.start()
        except TuningError as error:
            self._settle(request.number, error)
        else:
            self._send(request)

    def _send(self, message: _Request | int | None) -> None:
        with self._lock, contextlib.suppress(OSError):  # of a server that ended: `_read` finds that
            if self._connection is not None:
                self._connection.send(message)

    def _drop(self, number: int) -> None:
        if self._pending.pop(number, None) is not None:
            self._send(number)

    def _read(self, server: Any, connection: Connection) -> None:
        """Settle requests until the server ends, and then all that it was at."""
        failure = TuningError("no process can be started: the first one ended")
        with contextlib.suppress(EOFError, OSError):
            if connection.poll(_START_S):
                connection.recv()
                failure = WorkerError("the process died, and the one that forks", blameless=True)
                while True:
                    self._settle(*connection.recv())
        server.kill()
        server.wait()
        with self._lock:
            connection.close()
            self._connection = None if self._connection is connection else self._connection
        for number in list(self._pending):
            self._settle(number, failure)

    def _settle(self, number: int, outcome: _Outcome) -> None:
        """Give a future its outcome; make a request again that was not at fault."""
        future, request = self._pending.pop(number, (None, None))
        if future is None or request is None or future.cancelled():
            return
        is_blameless = isinstance(outcome, WorkerError) and outcome.blameless
        if is_blameless and request.again and not self._is_closed:
            self._request(future, replace(request, again=request.again - 1))
            return self._drop(number) if future.cancelled() else None  # meanwhile
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, TuningError):
            return future.set_exception(outcome)
        try:
            value = pickle.loads(outcome)
        except Exception as error:  # whatever unpickling raises
            future.set_exception(WorkerError(f"garbled: its answer cannot be read: {brief(error)}"))
        else:
            future.set_result(value)

    def close(self) -> None:
        self._is_closed = True
        while self._pending:
            future, _ = self._pending.popitem()[1]
            if future.cancel():
                future.set_running_or_notify_cancel()  # for whoever waits
        self._send(None)
        if self._reader is not None:
            self._reader.join(10 * _PATIENCE_S)
            self._server.kill()  # where it did not end
            self._reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Workshop(Workers):
    """Compile and measure subjects, as `Shop` says.

    `gpu` is the index of the GPU; None where subjects need none. A config that hangs for `limit_s` seconds,
    or ends its process, fails alone. Subjects that came first are compiled first.
    """

    benches = 2  # subjects whose operands are on the GPU at a time

    def __init__(
        self, gpu: int | None, jobs: int | None = None, limit_s: float = 10.0,
        compile_s: float = COMPILE_LIMIT_S,
    ) -> None:  # fmt: skip
        super().__init__(jobs)
        self._gpu, self._limit_s, self._compile_s = gpu, limit_s, compile_s
        self._subjects: dict[Subject, int] = {}  # by their numbers, in the order in which they came
        self._subject_numbers = itertools.count()
        self._screened = 0  # configs, by the current measuring process
        with contextlib.suppress(TuningError):  # each request says so
            self.start()

    def _number(self, subject: Subject) -> int:
        if subject not in self._subjects:
            self._subjects[subject] = next(self._subject_numbers)
        return self._subjects[subject]

    def compile(self, subject: Subject, config: Config, for_check: bool = False) -> Future[None]:
        """Start compiling a config; or what else a check of it runs, so that the check need not wait.

        The future raises WorkerError where the compiler refuses, dies or hangs, TuningError where no process
        can be started.
        """
        work = subject.compile_check if for_check else subject.compile
        return self.submit(work, config, urgency=self._number(subject), limit_s=self._compile_s)

    def begin(self, subject: Subject) -> None:
        """Put a subject's operands on the GPU. Raises TuningError where that fails."""
        request = self._number(subject), subject, self._gpu
        try:
            self.measure(bench.begin, *request, limit_s=_BEGIN_S, again=_AGAIN)
        except WorkerError as error:
            raise TuningError(f"its operands cannot be made: {error}") from error

    def screen(self, subject: Subject, config: Config, fastest_us: float) -> Screened:
        self._screened += 1
        return self._of(subject, "screen", config, fastest_us, limit_s=self._limit_s)

    def race(self, subject: Subject, configs: Sequence[Config]) -> list[list[float]]:
        return self._of(subject, "race", list(configs))

    def check(self, subject: Subject, config: Config) -> float | None:
        return self._of(subject, "check", config)

    def _of(self, subject: Subject, method: str, *arguments: Any, limit_s: float = _RACE_S) -> Any:
        """Ask the measuring process about a subject, which is begun first if that process is new.

        Raises WorkerError where the request fails, and TuningError where the subject cannot be begun: then
        the config in question is not at fault.
        """
        again = _AGAIN
        while True:
            request = self._number(subject), method, *arguments
            try:
                is_begun, value = self.measure(bench.call, *request, limit_s=limit_s)
                if is_begun:
                    return value
            except WorkerError as error:
                if not error.blameless or not again:
                    raise
                again -= 1
            self.begin(subject)

    def end(self, subject: Subject) -> None:
        """Free a subject's operands."""
        number, is_worn = self._subjects.pop(subject, None), self._screened > _WORN_BENCH
        if number is not None:
            with contextlib.suppress(TuningError):
                self.measure(bench.end, number, is_worn, limit_s=_BEGIN_S)
        if is_worn:
            self._screened = 0


@dataclass
class _Lending:
    """The workshop of one GPU, for one borrower at a time, and what ends it once it is idle."""

    lock: Any = field(default_factory=threading.RLock)
    shop: Workshop | None = None
    idle: threading.Timer | None = None


_lendings: dict[int, _Lending] = {}  # by GPU; `setdefault` of a dictionary is atomic


@contextlib.contextmanager
def borrowed(gpu: int) -> Iterator[Workshop]:
    """Lend this process's workshop for a GPU to one borrower at a time; close it after half a minute idle.

    Workshops of several GPUs work side by side.
    """
    lending = _lendings.setdefault(gpu, _Lending())
    with lending.lock:
        if lending.idle is not None:
            lending.idle.cancel()
        if lending.shop is None:
            lending.shop = Workshop(gpu)
        try:
            yield lending.shop
        finally:
            lending.idle = threading.Timer(_IDLE_S, _retire, (lending,))
            lending.idle.daemon = True
            lending.idle.start()


def _retire(lending: _Lending) -> None:
    with lending.lock:
        if lending.idle is threading.current_thread() and lending.shop is not None:
            shop, lending.shop, lending.idle = lending.shop, None, None
            shop.close()


def _after_fork() -> None:
    """Forget workshops in a forked process: their processes are the parent's, and end with it alone."""
    for lending in _lendings.values():
        if lending.shop is not None and lending.shop._connection is not None:
            lending.shop._connection.close()
    _lendings.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
