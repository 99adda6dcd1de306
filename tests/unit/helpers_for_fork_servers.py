"""Fork servers that are there at once, and programs that test_engine ends amid a request."""

import math
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.unit.fake_subjects import Fake, config
from tritile.core.device import HOST
from tritile.planning.store import Store
from tritile.tune.measure.child import START_S, Child, ForkServer, fork_on_request
from tritile.tune.measure.engine import tune
from tritile.tune.measure.tasks import Rules, Task
from tritile.tune.measure.workshop import Workshop
from tritile.tune.spaces import Listed

LONG_S, SCREEN_S, COMPILE_S = 600, 601, 602  # limits that no request reaches


def expire_when_hung(monkeypatch, folder):
    """Time requests out when the subject notes in `folder` that it hangs, and never by the clock."""
    poll, notes = Connection.poll, {SCREEN_S: folder / "hung", COMPILE_S: folder / "compiler hung"}

    def answered(connection, limit_s=0.0):
        note = notes.get(limit_s)
        while not poll(connection, 0.01):
            if note is not None and note.exists():
                note.unlink()
                return False
        return True

    monkeypatch.setattr(Connection, "poll", answered)


class QuickForkServer(ForkServer):
    """Fork the server from the tests' own, or this process: a program of its own takes seconds to start."""

    def __init__(self, server=None):
        super().__init__()
        self._server = server or multiprocessing.get_context("fork")

    def _start(self):
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._server.Process(
                target=_fork_on_request, args=(theirs, ours, dict(os.environ)), daemon=True
            )
            process.start()
        process.wait = process.join
        ours.settimeout(START_S)
        self._process, self._control = process, ours
        return ours


def _fork_on_request(control, callers, environment):
    callers.close()
    os.environ.clear()
    os.environ.update(environment)
    fork_on_request(control)


def run_script(script, argument, environment, told):
    """Run a script with an argument in a fresh process; what it prints goes to a file."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = [argument]
    with told.open("w") as sys.stdout:
        runpy.run_path(str(script))


def _look():
    return os.getpid(), os.getppid(), os.getpgid(0)


def _wait_for_another(name):
    process = subprocess.Popen(["sleep", "600"])
    Path(name).write_text(f"{process.pid}\n")
    process.wait()


def program(how, told, name):
    """Be a program with a fork server and one child: tell their pids, then end, or ask what never ends."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ResourceWarning)  # it ends amid what it does
    fork_server = QuickForkServer()
    child = Child(fork_server)
    pid, parent, group = child.ask(_look, limit_s=LONG_S)
    assert (pid, parent, group) == (child.pid, fork_server._process.pid, pid)
    assert os.getpgid(fork_server._process.pid) == fork_server._process.pid != os.getpid()
    told.send([fork_server._process.pid, child.pid])
    if how != "ended":
        child.ask(_wait_for_another, name, limit_s=LONG_S)


def tuner(folder, expires):
    """Tune configs of which the ninth hangs, for good or until it times out; the outcome goes to a file."""
    store = Store(HOST, folder)
    configs = [config(speed) for speed in range(1, 9)] + [config(0.5, "hangs")] + [config(9)]
    known = {t.config: t for t in store.trials("0123456789abcdef", Fake("").problem)}
    task = Task(Fake(str(folder)), Listed(configs), known)
    rules = Rules(exhaustive=True, batch=1, problem_s=math.inf)
    with pytest.MonkeyPatch.context() as patch:
        if expires:
            expire_when_hung(patch, folder)
        with Workshop(None, jobs=1, limit_s=SCREEN_S, fork_server=QuickForkServer()) as shop:
            (tuned,) = tune([task], shop, rules, store.add)
    (folder / "tuned").write_text(f"{tuned.best.us} {tuned.trials}")
