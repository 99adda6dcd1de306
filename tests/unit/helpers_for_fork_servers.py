"""Fork servers that are there at once, and programs that test_engine ends amid a request."""

import contextlib
import math
import multiprocessing
import os
import runpy
import stat
import subprocess
import sys
import warnings
from pathlib import Path

from tests.unit.fake_subjects import Fake, config
from tritile.core.device import HOST
from tritile.planning.store import Store
from tritile.tune.measure import workers
from tritile.tune.measure.engine import Rules, Task, tune
from tritile.tune.measure.workers import Workers, Workshop
from tritile.tune.search import Listed

LONG_S, SCREEN_S, COMPILE_S = 600, 601, 602  # limits that no request reaches


class _Quick:
    """Fork the server from the tests' own, or this process: a program of its own takes seconds to start.

    Requests time out when the subject notes in `folder` that it hangs, and never by the clock.
    """

    def __init__(self, *arguments, folder=None, server=None, **limits):
        self.folder, self._context = folder, server or multiprocessing.get_context("fork")
        super().__init__(*arguments, **limits)

    def _started(self, theirs):
        arguments = theirs, self._compilers, dict(os.environ), self.folder
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        process.wait = process.join
        return process


class QuickWorkers(_Quick, Workers):
    pass


class QuickWorkshop(_Quick, Workshop):
    pass


def _serve(connection, compilers, environment, folder):
    os.setpgid(0, 0)
    for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # of the folder itself
            if stat.S_ISSOCK(os.fstat(file).st_mode) and file != connection.fileno():
                os.close(file)  # the caller's end, say: a program of its own inherits none
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process()._config["daemon"] = False  # as a program of its own: it may fork
    notes = {SCREEN_S: "hung", COMPILE_S: "compiler hung"} if folder else {}

    def is_late(worker):
        note = notes.get(worker.request.limit_s)
        if note is None or not (Path(folder) / note).exists():
            return False
        (Path(folder) / note).unlink()
        return True

    wait = workers.wait
    workers.wait = lambda objects, limit: wait(objects, None if limit is None else 0.01)
    workers._Worker.is_late = is_late
    workers.serve(connection, compilers)


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
    """Be a program with workers: tell the pids of two and their server, then end, or ask what never ends."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ResourceWarning)  # it ends amid what it does
    own = QuickWorkers(1)
    pid, parent, group = own.measure(_look, limit_s=LONG_S)
    assert (parent, group) == (own._server.pid, pid)
    assert os.getpgid(parent) == parent != os.getpid()
    told.send([parent, pid, own.submit(os.getpid).result()])
    if how != "ended":
        own.measure(_wait_for_another, name, limit_s=LONG_S)


def tuner(folder, expires):
    """Tune configs of which the ninth hangs, for good or until it times out; the outcome goes to a file."""
    store = Store(HOST, folder)
    configs = [config(speed) for speed in range(1, 9)] + [config(0.5, "hangs")] + [config(9)]
    known = {t.config: t for t in store.trials("0123456789abcdef", Fake("").problem)}
    task = Task(Fake(str(folder)), Listed(configs), known)
    rules = Rules(exhaustive=True, batch=1, problem_s=math.inf)
    with QuickWorkshop(None, jobs=1, limit_s=SCREEN_S, folder=folder if expires else None) as shop:
        (tuned,) = tune([task], shop, rules, store.add)
    (folder / "tuned").write_text(f"{tuned.best.us} {tuned.trials}")
