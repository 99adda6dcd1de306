"""What runs in other processes: a nursery, from which they are forked, and answering requests."""

import contextlib
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
from triton.runtime.cache import triton_key

from tritile.errors import TritileError, brief

_GRACE_S: Final = 20.0  # after its limit, when a process that nobody killed ends itself


def kill(pid: int) -> None:
    """End a process, and those that it started, as an assembler that hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def nurse(number: int) -> None:
    """Fork a process for each "f" with two files, tell how one ended for each "w", until all is closed."""
    control = socket.socket(fileno=number)
    triton_key()  # of Triton's own files, hundreds of megabytes: once for all that are forked
    while True:
        text, files, _, _ = socket.recv_fds(control, 64, 2)
        if not text:
            os._exit(0)
        if text == b"f":
            pid = os.fork()
            if pid == 0:
                control.close()
                os.dup2(files[1], 2)
                os.close(files[1])
                serve(files[0])
            for file in files:
                os.close(file)
            with contextlib.suppress(OSError):  # it may have ended
                os.setpgid(pid, pid)
            control.sendall(b"%d\n" % pid)
        else:
            code = _ended(int(text[1:]))
            control.sendall(b"\n" if code is None else b"%d\n" % code)


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
    """Answer requests from this socket until it is closed: (value, kind of error, text, lost)."""
    connection = Connection(number)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        while True:
            try:
                request = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # without waiting for a GPU that may not answer
            try:
                function, arguments, limit_s = pickle.loads(request)
                # In C, so that it ends a process that hangs in a compiler after its caller was killed.
                faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=nowhere)
                answer = (function(*arguments), "", "", False)
            except Exception as error:
                text = str(error) if isinstance(error, TritileError) else brief(error)
                answer = (None, type(error).__name__, text, _gpu_is_lost())
            finally:
                faulthandler.cancel_dump_traceback_later()
            try:
                connection.send_bytes(cloudpickle.dumps(answer))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
