"""Hold operands of a few subjects in the measuring process, and graphs of their fastest configs.

The process that tunes has the functions at the end called; they return plain values.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Problem
from tritile.core.triton_private import driver
from tritile.tuner.measure.timing import Eager, Run, Timing, interleaved, screen_us

T = TypeVar("T")
_KEPT = 8  # graphs, of the fastest configs, which may be finalists; a graph holds memory


class Taken(NamedTuple):
    """A kernel's resources: registers and spilled 32-bit words a thread, bytes of shared memory."""

    registers: int | None = None
    spills: int | None = None
    shared: int | None = None


class Screened(NamedTuple):
    """A quick timing, and the kernel's resources."""

    timing: Timing
    taken: Taken


class Stage(Protocol):
    """A subject's operands on the GPU, in the process that measures: copies of one call, each with its own.

    `prepared` returns a function that launches a config on a copy; it raises where the config does not
    compile or load. `timed` returns a timer over every copy, each restored before a launch. `check` returns
    the relative error of an answer, None where there is no reference; it raises TuningError for a wrong
    answer, and for writes outside the kernel's memory.
    """

    def prepared(self, config: Config) -> tuple[Run, Taken]: ...
    def timed(self, config: Config, run: Run) -> Eager: ...
    def check(self, config: Config, run: Run) -> float | None: ...


class Subject(Protocol):
    """A problem to tune on a device, in values that can be sent to another process.

    Trials are remembered under `problem` and the `digest` of the kernel that a config runs. `copies` of the
    operands leave the L2 cache cold; `stage` makes them on the current GPU. `compile` compiles into Triton's
    cache, with no GPU, and raises where the compiler refuses. `compile_check` compiles the other kernels that
    a check of a config runs; the check repeats a refusal.
    """

    @property
    def problem(self) -> Problem: ...
    @property
    def device(self) -> Device: ...
    @property
    def copies(self) -> int: ...
    def digest(self, config: Config) -> str: ...
    def compile(self, config: Config) -> None: ...
    def compile_check(self, config: Config) -> None: ...
    def stage(self, copies: int) -> Stage: ...


class Shop(Protocol):
    """Compile and measure subjects: a `Workshop` does so in processes of its own.

    All raise WorkerError where a config is at fault, and TuningError where the subject is.
    """

    benches: int  # subjects whose operands are on the GPU at a time

    def compile(self, subject: Subject, config: Config, for_check: bool = False) -> Future[None]: ...
    def begin(self, subject: Subject) -> None: ...
    def screen(self, subject: Subject, config: Config, fastest_us: float) -> Screened: ...
    def race(self, subject: Subject, configs: Sequence[Config]) -> list[list[float]]: ...
    def check(self, subject: Subject, config: Config) -> float | None: ...
    def end(self, subject: Subject) -> None: ...


class Bench:
    """Hold one subject's operands, and time the configs that are loaded for it.

    Where memory runs out, whatever was under way is done again with half the copies of the operands.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject, self._copies = subject, subject.copies
        self._stage: Stage | None = None
        self._loaded: dict[Config, tuple[Run, Taken]] = {}
        self._graphs: dict[Config, Eager] = {}
        self._times: dict[Config, float] = {}
        self._on_stage(lambda stage: None)

    def _on_stage(self, work: Callable[[Stage], T]) -> T:
        while True:
            try:
                if self._stage is None:
                    self._stage = self._subject.stage(self._copies)
                return work(self._stage)
            except torch.cuda.OutOfMemoryError:
                self._graphs.clear()
                self._loaded.clear()
                if self._copies <= 1:
                    torch.cuda.empty_cache()
                    raise
            self._stage = None  # here no traceback holds its memory any more
            torch.cuda.empty_cache()
            self._copies //= 2

    def _run(self, stage: Stage, config: Config) -> tuple[Run, Taken]:
        if config not in self._loaded:
            self._loaded[config] = stage.prepared(config)
        return self._loaded[config]

    def _graph(self, stage: Stage, config: Config) -> Eager:
        if config not in self._graphs:
            self._graphs[config] = stage.timed(config, self._run(stage, config)[0])
        return self._graphs[config]

    def screen(self, config: Config, fastest_us: float) -> Screened:
        """Time a config quickly."""
        timing = self._on_stage(lambda stage: screen_us(self._graph(stage, config), fastest_us))
        _finish()
        self._times[config] = timing.us
        for slow in sorted(self._graphs, key=lambda c: self._times.get(c, math.inf))[_KEPT:]:
            del self._graphs[slow]
        return Screened(timing, self._loaded[config][1])

    def race(self, configs: Sequence[Config]) -> list[list[float]]:
        """Return microseconds of each config, run after run, the configs taking turns."""
        return self._on_stage(lambda stage: interleaved([self._graph(stage, config) for config in configs]))

    def check(self, config: Config) -> float | None:
        """Return the relative error of a config's answer. Raises TuningError for a wrong one."""
        error = self._on_stage(lambda stage: stage.check(config, self._run(stage, config)[0]))
        _finish()
        return error


def _finish() -> None:
    """Wait for the GPU, so that a config's fault shows while the request is about that config."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


_benches: dict[int, Bench] = {}


def begin(number: int, subject: Subject, gpu: int | None) -> None:
    """Make the operands of a subject on a GPU, unless they are there; later calls name it by its number."""
    if number in _benches:
        return
    if gpu is not None:
        torch.cuda.set_device(gpu)
        _utils = driver.active.utils  # Triton may have to compile these in C, which takes seconds
    _benches[number] = Bench(subject)


def call(number: int, method: str, *arguments: Any) -> tuple[bool, Any]:
    """Return whether a subject was begun here, and what a method of its `Bench` returns."""
    is_begun = number in _benches
    return is_begun, getattr(_benches[number], method)(*arguments) if is_begun else None


def end(number: int, is_worn: bool) -> None:
    """Free a subject's operands, or end the process."""
    if is_worn:
        os._exit(0)
    if _benches.pop(number, None) is not None:
        torch.cuda.empty_cache()
