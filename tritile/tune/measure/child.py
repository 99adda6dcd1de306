"""Ask processes that answer one request at a time, and may be killed without loss.

They are forked from a fork server: a process with a program of its own that has imported what they need.
One more starts in milliseconds, and a script without an `if __name__ == "__main__"` is not run again in it.
All of them end when the caller does, however the caller ends.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn, TypeVar

import cloudpickle
import torch

from tritile.core.of_triton import read_own_files
from tritile.errors import TritileError, TuningError, brief

T = TypeVar("T")
START_S: Final = 120.0  # for importing torch on a busy machine
_LARGEST: Final = 1 << 28  # bytes of an answer
_PROGRAM: Final = (
    "import json, socket, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from tritile.tune.measure.child import fork_on_request; "
    "fork_on_request(socket.socket(fileno=int(sys.argv[1])))"
)
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)
_PATIENCE_S: Final = 1.0  # for a process that is to end, before it is killed


def kill(pid: int) -> None:
    """End a process and those that it started, such as an assembler that hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def fork_on_request(control: socket.socket) -> NoReturn:
    """Be a fork server: serve a socket until the caller's end of it is closed.

    "f" with two files forks a process and answers its pid. "w" and a pid answers how that process ended. The
    processes end with this one, and this one with its caller, which closes the socket however it ends.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # signals to all of a terminal's, or a job's, processes are the caller's
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with open(os.devnull, "r+") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)  # a refusal of the assembler prints the whole assembly
    read_own_files()  # hundreds of megabytes: once for all that are forked
    forked: set[int] = set()
    while True:
        try:
            text, files, _, _ = socket.recv_fds(control, 64, 2)
        except ConnectionResetError:  # closed before the caller read all answers
            text, files = b"", []
        if not text:
            for pid in forked:
                kill(pid)
            os._exit(0)
        if text == b"f":
            pid = _fork(control, files)
            forked.add(pid)
            answer = b"%d\n" % pid
        else:
            pid = int(text[1:])
            code = _status(pid)
            forked.discard(pid)
            answer = b"\n" if code is None else b"%d\n" % code
        with contextlib.suppress(BrokenPipeError):
            control.sendall(answer)


def _fork(control: socket.socket, files: list[int]) -> int:
    """Fork a process that serves the first file and writes its errors to the second; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _end_with(parent)
        control.close()
        os.dup2(files[1], 2)
        os.close(files[1])
        serve(files[0])
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # the process may have ended
        os.setpgid(pid, pid)
    return pid


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even amid a call that never returns."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _status(pid: int) -> int | None:
    """Wait for a process, kill it if it does not end, and return its status; None if it is not a child."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            kill(pid)
        time.sleep(0.01)


def _gpu_is_lost() -> bool:
    """True if this process's GPU no longer answers, as after an illegal memory access."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # whatever the error is, this process cannot measure any more
        return True
    return False


def serve(number: int) -> NoReturn:
    """Answer the requests of a socket until it is closed, each by (value, failure or None, lost)."""
    connection = Connection(number)
    answer: tuple[object, str | None, bool]
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
            answer = (function(*arguments), None, False)
        except (EOFError, ConnectionError):
            os._exit(0)  # without waiting for a GPU that may not answer
        except Exception as error:
            failure = str(error) if isinstance(error, TritileError) else brief(error)
            answer = (None, failure, _gpu_is_lost())
        try:
            connection.send_bytes(cloudpickle.dumps(answer))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)


class ChildError(TuningError):
    """Tell of a request that failed in another process.

    `lost`: the process is gone, and with it all that it held. `blameless`: nothing says that the request was
    at fault, as the process was killed from outside, or nobody knows how it ended.
    """

    def __init__(self, text: str, lost: bool, blameless: bool = False) -> None:
        super().__init__(text)
        self.lost, self.blameless = lost, blameless


class ForkServer:
    """Start processes by forking a server, which is started when first needed, and again if it was lost."""

    def __init__(self) -> None:
        self._process: Any = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def fork(self, connection: int, stderr: int) -> int:
        """Start a process that serves a socket and writes its errors to a file; return its pid.

        Raises TuningError where none can be started.
        """
        with self._lock:
            for _ in range(2):
                control = self._control or self._start()
                with self._in_step():
                    socket.send_fds(control, [b"f"], [connection, stderr])
                    return int(_line(control))
        raise TuningError("no process can be started")

    def status(self, pid: int) -> int | None:
        """Return a process's exit status, or minus the signal it died by; None where nobody knows."""
        with self._lock, self._in_step():
            if self._control is not None:
                self._control.sendall(b"w%d\n" % pid)
                text = _line(self._control).strip()
                return int(text) if text else None
        return None

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """End the server where its answer was not read: the next request would get that answer."""
        try:
            yield
        except (OSError, ValueError):
            self._end()
        except BaseException:
            self._end()
            raise

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        # The last lines that a process writes tell why it died: nothing is logged there.
        environment = {name: value for name, value in os.environ.items() if name != "TRITILE_LOG"}
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                # -P: else a json.py of the folder it runs in would be imported before sys.path is set.
                [sys.executable, "-P", "-c", _PROGRAM, str(number), json.dumps([str(p) for p in sys.path])],
                pass_fds=(number,),
                process_group=0,
                env=environment,
            )
        ours.settimeout(START_S)
        self._control = ours
        return ours

    def _end(self) -> None:
        control, process = self._control, self._process
        self._control = self._process = None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the server, and the processes that were forked from it."""
        with self._lock:
            self._end()


def _line(control: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        piece = control.recv(64)
        if not piece:
            raise OSError("the fork server is gone")
        text += piece
    return text


class Child:
    """Ask one process, forked at the first request, and again after it was lost."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._connection: Connection | None = None
        self._stderr: Any = None
        self.pid: int | None = None  # None where it does not run

    def ask(self, function: Callable[..., T], *arguments: Any, limit_s: float) -> T:
        """Call a function in the process; it is sent by name where it can be imported, else whole.

        Raises ChildError where the function raises, takes more than `limit_s` seconds, ends the process, or
        writes to its socket so that no answer can be read. Raises TuningError where no process starts.
        """
        request = cloudpickle.dumps((function, arguments))
        connection = self._connection or self._start()
        try:
            connection.send_bytes(request)
            answer = connection.recv_bytes(_LARGEST) if connection.poll(limit_s) else None
        except (EOFError, ConnectionError):
            raise self._death() from None
        except OSError as error:  # a length that no answer has
            raise self._garbled(error) from error
        except BaseException:  # Ctrl-C, say: whoever asks next would get this answer
            self._drop()
            raise
        if answer is None:
            self._drop()
            raise ChildError(f"hung: no answer in {limit_s:g} s", lost=True)
        try:
            value, failure, lost = pickle.loads(answer)
        except Exception as error:  # whatever unpickling raises
            raise self._garbled(error) from error
        if lost:
            self.close()
        if failure is not None:
            raise ChildError(failure, lost)
        return value

    def _start(self) -> Connection:
        try:
            ours, theirs = multiprocessing.Pipe()
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has died
            with theirs:
                self.pid = self._fork_server.fork(theirs.fileno(), self._stderr.fileno())
        except OSError as error:
            raise TuningError(f"no process can be started: {brief(error)}") from error
        self._connection = ours
        return ours

    def kill(self) -> None:
        """End the process, from any thread; a request in progress fails."""
        pid = self.pid
        if pid is not None:
            kill(pid)

    def _drop(self) -> None:
        """End the process and forget it; a later request starts another."""
        self.kill()
        self.close()

    def _garbled(self, error: Exception) -> ChildError:
        self._drop()
        return ChildError(f"garbled: its answer cannot be read: {brief(error)}", lost=True)

    def _death(self) -> ChildError:
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 4096))
        lines = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        code = self.close()
        how = signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
        # No request kills its process with this signal: somebody else did.
        outside = code is None or code == -signal.SIGKILL
        return ChildError(f"the process died: {how}{': ' + last[:120] if last else ''}", True, outside)

    def close(self) -> int | None:
        """End the process if it has not ended, and return its status. A later request starts another."""
        connection, pid, stderr = self._connection, self.pid, self._stderr
        self._connection = self.pid = self._stderr = None
        if stderr is not None:
            stderr.close()
        if connection is not None:
            connection.close()  # the process ends at that, unless it is amid a request
        return self._fork_server.status(pid) if pid is not None else None
