"""The tuner's processes without a GPU: made-up subjects, fork servers that are there at once, programs."""

import contextlib
import math
import multiprocessing
import os
import platform
import signal
import stat
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

from tritile import cli
from tritile.choose import aten
from tritile.cli import shared
from tritile.cli import tuning as command
from tritile.core.config import Config
from tritile.core.device import HOST, target_device
from tritile.core.problem import KernelProblem
from tritile.errors import TuningError
from tritile.runtime.ahead import Resources
from tritile.tune.subject import problem as subjects
from tritile.tune.subject.problem import TunableProblem
from tritile.tune.suites import parse_shape
from tritile.tuner.measure import engine, workers
from tritile.tuner.measure.engine import Rules, TuningTask, tune
from tritile.tuner.measure.timing import Eager
from tritile.tuner.measure.workers import PoolRunner, WorkerPool
from tritile.tuner.search import Listed
from tritile.tuner.store import folder as folder_module
from tritile.tuner.store import shared as shared_module
from tritile.tuner.store.trial import TORCH, Trial
from tritile.tuner.store.trials import Store, store_of

LONG_S, SCREEN_S, COMPILE_S = 600, 601, 602  # limits that no request reaches
H200 = target_device("nvidia-h200")
SHAPES = [f"64x{64 + k}" for k in range(8)]
PROBLEMS = [parse_shape(shape, op="permute", dtype="float16").problem for shape in SHAPES]


# --- Subjects


def config(speed, fault="none"):
    """Return a config that takes `speed` microseconds, and goes wrong as its fault says."""
    return Config.of(SPEED=speed, FAULT=fault)


def _abort(text):
    os.write(2, f"{text}\n".encode())
    os.abort()


def _sockets():
    for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # of the folder itself
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                yield file


@dataclass(frozen=True)
class Fake:
    """Does when compiled, timed or checked what a config's FAULT says; counts in files of `folder`."""

    folder: str
    name: str = "fake"
    memory: int = 8  # copies of operands that there is room for

    @property
    def problem(self):
        return KernelProblem(self.name, (("N", 7),), ())

    device = HOST
    copies = 16

    def digest(self, config):
        return "0123456789abcdef"

    def note(self, what):
        path = Path(self.folder) / what
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return len(path.read_text().splitlines())

    def compile(self, config, for_check=False):
        if for_check:
            self.note("foreseen")
            return
        self.note("compiled")
        match config["FAULT"]:
            case "refused":
                raise ValueError("a tile too small\nand more lines")
            case "compiler aborts":
                _abort("LLVM ERROR: cannot select")
            case "compiler hangs":
                self.note("compiler hung")
                time.sleep(600)
            case "compiler killed once" if self.note("killed") == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case "compiler takes long once" if self.note("killed") == 1:
                time.sleep(600)

    def harness(self, copies):
        if copies > self.memory:
            raise torch.cuda.OutOfMemoryError("no room for operands")
        if self.note("staged") > 1 and self.name == "once":
            raise RuntimeError("the GPU is gone")
        return _Harness(self, copies)


class _Timed(Eager):
    def _all_us(self):
        return self._run(None)


class _Harness:
    def __init__(self, subject, copies):
        self.calls = list(range(copies))
        self._subject = subject

    def prepared(self, config):
        match config["FAULT"]:
            case "does not load":
                raise RuntimeError("out of shared memory")
            case "hangs":
                self._subject.note("hung")
                time.sleep(600)
            case "takes long once" if self._subject.note("killed") == 1:
                time.sleep(600)
            case "scribbles":
                for file in _sockets():  # as a config does that takes one for its own
                    with contextlib.suppress(OSError):
                        os.write(file, b"neither a length nor an answer")
            case "crashes":
                _abort("an illegal memory access")
            case "killed once" if self._subject.note("killed") == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case "killed always":
                os.kill(os.getpid(), signal.SIGKILL)
            case "large" if len(self.calls) > 2:
                raise torch.cuda.OutOfMemoryError("no room for a workspace")
            case "too large":
                raise torch.cuda.OutOfMemoryError("no room for a workspace")
        if config["FAULT"] == "broken clock":
            return (lambda call: -1.0), Resources(32, 0, 0)
        return (lambda call: float(config["SPEED"])), Resources(32, 0, 0)

    def timed(self, config, run):
        return _Timed(run, [0])

    def check(self, config, run):
        if config["FAULT"] == "wrong":
            raise TuningError("wrong answer: relative error 1, above 0.001")
        if config["FAULT"] == "large when checked" and len(self.calls) > 2:
            raise torch.cuda.OutOfMemoryError("no room for what is right")
        if config["FAULT"] == "crashes when checked":
            _abort("an illegal memory access")
        return 1e-4


class Formula(TunableProblem):
    """Times one of our problems by a formula."""

    def compile(self, config, for_check=False):
        pass

    def harness(self, copies):
        while self.problem.label == os.environ.get("HANGS"):
            time.sleep(1)
        return _FormulaStage(self.problem)


class _FormulaStage:
    def __init__(self, problem):
        self.calls, self._problem = [0], problem

    def prepared(self, config):
        us = self._problem.bytes * (1 + len(config.key) % 7 / 10 + config.num_warps / 50)
        return (lambda call: us), Resources(1, 0, 0)

    def timed(self, config, run):
        return _Timed(run, [0])

    def check(self, config, run):
        return 0.0


# --- Fork servers


class _Quick:
    """Fork the server from the tests' own, or this process: a program of its own takes seconds to start.

    Requests time out when the subject notes in `folder` that it hangs, and never by the clock.
    """

    def __init__(self, *arguments, folder=None, server=None, **limits):
        self.folder, self._context = folder, server or multiprocessing.get_context("fork")
        super().__init__(*arguments, **limits)

    def _started(self):
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = self._context.Process(target=_serve, args=(theirs, self.folder), daemon=True)
            process.start()
        process.wait = process.join
        number = os.dup(ours.fileno())
        ours.close()
        return process, number


class QuickWorkers(_Quick, WorkerPool):
    pass


class QuickWorkshop(_Quick, PoolRunner):
    pass


def _serve(connection, folder):
    os.setpgid(0, 0)
    for file in {*_sockets()} - {connection.fileno()}:
        os.close(file)  # the caller's end, say: a program of its own inherits none
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
    workers.serve(connection)


# --- Programs


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
    task = TuningTask(Fake(str(folder)), Listed(configs), known)
    rules = Rules(exhaustive=True, batch=1, problem_s=math.inf)
    with QuickWorkshop(None, jobs=1, limit_s=SCREEN_S, folder=folder if expires else None) as shop:
        (tuned,) = tune([task], shop, rules, store.add)
    (folder / "tuned").write_text(f"{tuned.best.us} {tuned.trials}")


def enter_rank(rank, ranks, folder, **more):
    """Tune as torchrun starts a rank, two on a host, on a made-up H200; what is printed goes to a file.

    Hosts have clocks of their own. `more`: variables of the environment.
    """
    host, on_host = divmod(rank, 2)
    facts = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": on_host, "LOCAL_WORLD_SIZE": 2}
    facts |= {"TRITILE_CACHE_DIR": folder} | more
    os.environ.update({name: str(value) for name, value in facts.items()})
    with (folder / f"told-{rank}").open("w") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())
    shared_module.FLUSH_S, engine._LOOKAHEAD = 0.1, 1

    def clock():
        return datetime.now(UTC) + timedelta(days=host)

    def time_torch(problem, device, index):
        store_of(device).add(TORCH, Trial(problem, aten.CONFIG, 9.0, measured_utc=engine.now()))

    folder_module.now = shared_module.now = clock
    engine.now = lambda: clock().isoformat(timespec="seconds")
    platform.node = lambda: f"host-{host}"
    subjects.TunableProblem, command.PoolRunner = Formula, QuickWorkshop
    shared.gpu_here = lambda *advice: H200
    command.now.time_torch = time_torch
    cli.app(["tune", *SHAPES, "--op", "transpose", "--dtype", "float16"], prog_name="tritile")
