"""What the measuring process owns: operands of a few tunables, and graphs of their fastest configs.

The tuning process calls the functions at the end through the pool; they return plain values.
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
from tritile.runtime.ahead import Resources
from tritile.tuner.measure.timing import Eager, Run, Timing, interleaved, screen_us

T = TypeVar("T")
_MAX_GRAPHS = 8  # kept, of the fastest configs, which may become finalists: a graph takes memory


class ScreenResult(NamedTuple):
    timing: Timing
    resources: Resources | None


class Harness(Protocol):
    """Copies of one call on the GPU, in the measuring process, and how to run configs on them.

    `prepared` returns a function that launches a config on a copy; it raises if the config does not compile
    or load. It also returns the kernel's resources, if it can. `timed` returns a timer over all copies,
    restored before each run. `check` returns the relative error of the answer, None without a reference; it
    raises TuningError for a wrong answer and for writes outside the kernel's memory.
    """

    def prepared(self, config: Config) -> tuple[Run, Resources | None]: ...
    def timed(self, config: Config, run: Run) -> Eager: ...
    def check(self, config: Config, run: Run) -> float | None: ...


class Tunable(Protocol):
    """A problem to tune on a device, made of plain values that can be sent to another process.

    Trials are stored under `problem` and the `digest` of the kernel that a config runs. `copies`: how many
    copies of the operands keep the L2 cache cold; `harness` makes them on the current GPU. `compile` compiles
    into Triton's cache without a GPU, and raises if the compiler refuses; `for_check` it compiles what else
    the check of a config launches.
    """

    @property
    def problem(self) -> Problem: ...
    @property
    def device(self) -> Device: ...
    @property
    def copies(self) -> int: ...
    def digest(self, config: Config) -> str: ...
    def compile(self, config: Config, for_check: bool = False) -> None: ...
    def harness(self, copies: int) -> Harness: ...


class Runner(Protocol):
    """Compiles and measures tunables; `PoolRunner` does so in processes of its own.

    Methods raise WorkerError if the config is at fault, and TuningError if the tunable is.
    """

    max_resident: int  # tunables whose operands are on the GPU at a time

    def compile(self, tunable: Tunable, config: Config, for_check: bool = False) -> Future[None]: ...
    def begin(self, tunable: Tunable) -> None: ...
    def screen(self, tunable: Tunable, config: Config, fastest_us: float) -> ScreenResult: ...
    def race(self, tunable: Tunable, configs: Sequence[Config]) -> list[list[float]]: ...
    def check(self, tunable: Tunable, config: Config) -> float | None: ...
    def end(self, tunable: Tunable) -> None: ...


class Benchmark:
    """One tunable's operands, and timers of the configs loaded for it.

    When memory runs out, the operation is repeated with half as many copies of the operands.
    """

    def __init__(self, tunable: Tunable) -> None:
        self._tunable, self._copies = tunable, tunable.copies
        self._harness: Harness | None = None
        self._loaded: dict[Config, tuple[Run, Resources | None]] = {}
        self._graphs: dict[Config, Eager] = {}
        self._times: dict[Config, float] = {}
        self._on_harness(lambda harness: None)

    def _on_harness(self, work: Callable[[Harness], T]) -> T:
        while True:
            try:
                if self._harness is None:
                    self._harness = self._tunable.harness(self._copies)
                return work(self._harness)
            except torch.cuda.OutOfMemoryError:
                self._graphs.clear()
                self._loaded.clear()
                if self._copies <= 1:
                    torch.cuda.empty_cache()
                    raise
            self._harness = None  # outside of `except`, where no traceback holds its memory
            torch.cuda.empty_cache()
            self._copies //= 2

    def _run(self, harness: Harness, config: Config) -> tuple[Run, Resources | None]:
        if config not in self._loaded:
            self._loaded[config] = harness.prepared(config)
        return self._loaded[config]

    def _graph(self, harness: Harness, config: Config) -> Eager:
        if config not in self._graphs:
            self._graphs[config] = harness.timed(config, self._run(harness, config)[0])
        return self._graphs[config]

    def screen(self, config: Config, fastest_us: float) -> ScreenResult:
        timing = self._on_harness(lambda harness: screen_us(self._graph(harness, config), fastest_us))
        _finish()
        self._times[config] = timing.us
        for slow in sorted(self._graphs, key=lambda c: self._times.get(c, math.inf))[_MAX_GRAPHS:]:
            del self._graphs[slow]
        return ScreenResult(timing, self._loaded[config][1])

    def race(self, configs: Sequence[Config]) -> list[list[float]]:
        """Return the microseconds of each config, round by round, interleaved."""
        return self._on_harness(
            lambda harness: interleaved([self._graph(harness, config) for config in configs])
        )

    def check(self, config: Config) -> float | None:
        """Return the relative error of a config's answer. Raises TuningError for a wrong one."""
        error = self._on_harness(lambda harness: harness.check(config, self._run(harness, config)[0]))
        _finish()
        return error


def _finish() -> None:
    """Wait for the GPU, so that a fault is blamed on the config that caused it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


_benchmarks: dict[int, Benchmark] = {}


def begin(number: int, tunable: Tunable, gpu: int | None) -> None:
    """Make the operands of a tunable on a GPU, unless they exist; later calls pass its number."""
    if number in _benchmarks:
        return
    if gpu is not None:
        torch.cuda.set_device(gpu)
        _utils = driver.active.utils  # Triton may have to compile these first, which takes seconds
    _benchmarks[number] = Benchmark(tunable)


def call(number: int, method: str, *arguments: Any) -> tuple[bool, Any]:
    """Return whether the tunable was begun in this process, and what a method of its `Benchmark` returns."""
    is_begun = number in _benchmarks
    return is_begun, getattr(_benchmarks[number], method)(*arguments) if is_begun else None


def end(number: int, is_exhausted: bool) -> None:
    """Free the operands of a tunable, or exit."""
    if is_exhausted:
        os._exit(0)
    if _benchmarks.pop(number, None) is not None:
        torch.cuda.empty_cache()
