"""Run in other processes: the loop of a fork server, and that of a process which answers requests."""

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Final, NoReturn

import cloudpickle

from tritile.core.of_triton import read_own_files
from tritile.errors import TritileError, brief

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
    """Tell whether this process's GPU no longer answers, as after an illegal memory access."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
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
