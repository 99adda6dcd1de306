"""Subjects that need no GPU: what a config does when compiled, timed or checked is told by its FAULT."""

import contextlib
import math
import os
import signal
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tritile.core.config import Config
from tritile.core.device import HOST
from tritile.core.problem import KernelProblem
from tritile.errors import TuningError
from tritile.tune.measure.bench import Taken
from tritile.tune.measure.timing import Eager
from tritile.tune.subject.problem import ProblemSubject


def config(speed, fault="none"):
    """Return a config that takes `speed` microseconds, and goes wrong as its fault says."""
    return Config.of(SPEED=speed, FAULT=fault)


def _abort(text):
    os.write(2, f"{text}\n".encode())
    os.abort()


def scribbled(text):
    """Write to every socket that this process has, as a config may that takes one for its own."""
    for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                os.write(file, text)


@dataclass(frozen=True)
class Fake:
    """Count requests in files of `folder`, over all processes."""

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

    def compile(self, config):
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

    def compile_check(self, config):
        self.note("foreseen")

    def stage(self, copies):
        if copies > self.memory:
            raise torch.cuda.OutOfMemoryError("no room for operands")
        if self.note("staged") > 1 and self.name == "once":
            raise RuntimeError("the GPU is gone")
        return _Stage(self, copies)


class _Timed(Eager):
    def _all_us(self):
        return self._run(None)


class _Stage:
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
                scribbled(b"neither a length nor an answer")
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
            return (lambda call: -1.0), Taken(32, 0, 0)
        return (lambda call: float(config["SPEED"])), Taken(32, 0, 0)

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


def made_up_us(problem, config):
    """Return a time that falls towards one config, and differs for every config."""
    goal = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64}
    steps = sum(
        abs(math.log2(config[name] / value)) for name, value in goal.items() if name in dict(config.kwargs)
    )
    return problem.k / 256 * (10 + steps + len(config.key) % 7 / 10 + config.num_warps / 50)


class Formula(ProblemSubject):
    """Time one of our problems by a formula; each look at a config takes `TRITILE_TEST_PAUSE` seconds."""

    def compile(self, config):
        pass

    def compile_check(self, config):
        pass

    def stage(self, copies):
        return _FormulaStage(self.problem)


class _FormulaStage:
    def __init__(self, problem):
        self.calls, self._problem = [0], problem

    def prepared(self, config):
        us = made_up_us(self._problem, config)
        time.sleep(float(os.environ.get("TRITILE_TEST_PAUSE", "0")))
        return (lambda call: us), Taken(1, 0, 0)

    def timed(self, config, run):
        return _Timed(run, [0])

    def check(self, config, run):
        return 0.0
