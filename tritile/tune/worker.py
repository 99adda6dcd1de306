"""Compiling in parallel processes, into Triton's cache on disk, from where the tuner loads."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from tritile.ahead import Resources, compile_resources, compiled_for
from tritile.config import Config
from tritile.device import Device
from tritile.errors import TritileError
from tritile.problem import MatmulProblem, PermuteProblem

Tiled = MatmulProblem | PermuteProblem
COMPILE_LIMIT_S = 120.0
T = TypeVar("T")


Refusals = dict[Config, str]


def _compile(problem: Tiled, configs: list[Config], device: Device) -> Refusals:
    """Compile some configs; which were refused, and why."""
    refused = {}
    for config in configs:
        try:
            compiled_for(problem, config, device)
        except TritileError as error:
            refused[config] = str(error)[:300]
    return refused


def _inspect(problem: Tiled, config: Config, device: Device) -> Resources | str:
    try:
        return compile_resources(problem, config, device)
    except TritileError as error:
        return str(error)[:300]


def _ignore_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; when to stop is for the tuner alone to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class CompilePool:
    """Processes that compile. Each holds a copy of torch; none touches a GPU."""

    def __init__(self, processes: int | None = None) -> None:
        count = processes or min(16, os.cpu_count() or 1)
        self.processes = count
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.processes, mp_context=context, initializer=_ignore_interrupts)

    def _submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        try:
            return self._pool.submit(function, *arguments)
        except BrokenExecutor:  # a worker was killed, for memory say: a new pool goes on
            self._pool = self._started()
            return self._pool.submit(function, *arguments)

    def warm(self, problem: Tiled, configs: Iterable[Config], device: Device) -> list[Future[Refusals]]:
        """Start compiling these configs; the futures end when they lie in Triton's cache."""
        wanted = list(configs)
        chunks = [wanted[start::4] for start in range(4)]
        return [self._submit(_compile, problem, chunk, device) for chunk in chunks if chunk]

    def inspect(self, problem: Tiled, config: Config, device: Device) -> Future[Resources | str]:
        """Start compiling one config; the future gives what it takes, or why it was refused."""
        return self._submit(_inspect, problem, config, device)

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=error is None, cancel_futures=True)
