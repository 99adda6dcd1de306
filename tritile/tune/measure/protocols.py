"""Describe what can be tuned: two protocols, and the resources of a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Problem
from tritile.tune.measure.timing import Run, Timed


@dataclass(frozen=True)
class Taken:
    """Hold a kernel's resources: registers and spilled 32-bit words a thread, bytes of shared memory."""

    registers: int | None = None
    spills: int | None = None
    shared: int | None = None


class Stage(Protocol):
    """Hold a subject's operands on the GPU, in the process that measures."""

    @property
    def calls(self) -> Sequence[Any]:
        """Return copies of one call, each with operands of its own."""

    def prepared(self, config: Config) -> tuple[Run, Taken]:
        """Return a function that launches a config on a copy. Raises where it does not compile or load."""

    def timed(self, config: Config, run: Run) -> Timed:
        """Return a timer of a config over every copy, each restored before a launch."""

    def check(self, config: Config, run: Run) -> float | None:
        """Return the relative error of a config's answer, None where there is no reference.

        Raises TuningError for a wrong answer, and for writes outside the kernel's memory.
        """


class Subject(Protocol):
    """Describe one problem to tune, in values that can be sent to another process."""

    @property
    def problem(self) -> Problem:
        """Return the problem that trials are remembered under."""

    @property
    def device(self) -> Device:
        """Return the GPU that the subject is tuned for."""

    def digest(self, config: Config) -> str:
        """Return the digest of the kernel that a config runs."""

    def compile(self, config: Config) -> None:
        """Compile into Triton's cache, with no GPU. Raises where the compiler refuses."""

    def compile_check(self, config: Config) -> None:
        """Compile the other kernels that a check of a config runs. The check repeats a refusal."""

    @property
    def copies(self) -> int:
        """Return how many copies of the operands leave the L2 cache cold."""

    def stage(self, copies: int) -> Stage:
        """Make copies of the operands on the current GPU."""
