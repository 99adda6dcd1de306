"""What runs in other processes: a nursery, from which they are forked, and answering requests."""

import contextlib
import ctypes
import faulthandler
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

NUMBER_BYTES: Final = 8  # of a request, ahead of it and of its answer
_GRACE_S: Final = 20.0  # after its limit, when a process that nobody killed ends itself
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)


def kill(pid: int) -> None:
    """End a process, and those that it started, as an assembler that hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def nurse(number: int) -> None:
    """Fork a process for each "f" with two files, tell how one ended for each "w", until all is closed.

    The processes end with this one, and this one with its caller, which closes the socket however it ends.
    """
    control = socket.socket(fileno=number)
    read_own_files()  # hundreds of megabytes: once for all that are forked
    forked: set[int] = set()
    while True:
        try:
            text, files, _, _ = socket.recv_fds(control, 64, 2)
        except ConnectionResetError:  # closed before all was read that this process told
            text, files = b"", []
        if not text:
            for pid in forked:
                kill(pid)
            os._exit(0)
        if text == b"f":
            pid = _forked(control, files)
            forked.add(pid)
            answer = b"%d\n" % pid
        else:
            pid = int(text[1:])
            code = _ended(pid)
            forked.discard(pid)
            answer = b"\n" if code is None else b"%d\n" % code
        with contextlib.suppress(BrokenPipeError):
            control.sendall(answer)


def _forked(control: socket.socket, files: list[int]) -> int:
    """A process that serves the first of two files, and writes its errors to the second; its number."""
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
    with contextlib.suppress(OSError):  # it may have ended
        os.setpgid(pid, pid)
    return pid


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even amid a call that never returns."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def nurse_forked(number: int) -> NoReturn:
    """The same in a process that was just forked from another program, of which nothing is to go on."""
    try:
        os.setpgid(0, 0)  # signals to all of a terminal's, or a job's, processes are the caller's
        for taken in (signal.SIGINT, signal.SIGTERM):
            signal.signal(taken, signal.SIG_DFL)
        with open(os.devnull, "r+") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 0)
            os.dup2(nowhere.fileno(), 1)  # a refusal of the assembler prints the whole assembly
        nurse(number)
    finally:
        os._exit(1)


def _ended(pid: int, patience_s: float = 1.0) -> int | None:
    """How a process ended, killed if it does not by itself; None of one that was not forked here."""
    waited = 0.0
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if found:
            return os.waitstatus_to_exitcode(status)
        if waited >= patience_s:
            kill(pid)
        time.sleep(0.01)
        waited += 0.01


def _gpu_is_lost() -> bool:
    """Whether this process's GPU no longer answers, as after an illegal access."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # whatever it is, this process cannot measure any more
        return True
    return False


def serve(number: int) -> None:
    """Answer requests from this socket until it is closed: (value, kind of error, text, lost).

    A request is `NUMBER_BYTES` of its number, which its answer has too, and a pickle.
    """
    connection = Connection(number)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        while True:
            try:
                request = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # without waiting for a GPU that may not answer
            try:
                function, arguments, limit_s = pickle.loads(request[NUMBER_BYTES:])
                # In C, so that it ends a process that hangs in a compiler after its caller was killed.
                faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=nowhere)
                answer = (function(*arguments), "", "", False)
            except Exception as error:
                text = str(error) if isinstance(error, TritileError) else brief(error)
                answer = (None, type(error).__name__, text, _gpu_is_lost())
            finally:
                faulthandler.cancel_dump_traceback_later()
            try:
                connection.send_bytes(request[:NUMBER_BYTES] + cloudpickle.dumps(answer))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
