"""What tuning needs to know of what it tunes: two protocols, and the plain values between processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Problem
from tritile.tune.measure.timing import Run, Timed


@dataclass(frozen=True)
class Taken:
    """What a loaded kernel takes: registers and spilled 32-bit words a thread, bytes of shared memory."""

    registers: int | None = None
    spills: int | None = None
    shared: int | None = None


class Stage(Protocol):
    """Operands on the GPU, in the process that measures."""

    @property
    def calls(self) -> Sequence[Any]:
        """Copies of one call."""

    def prepared(self, config: Config) -> tuple[Run, Taken]:
        """What launches this config on a copy. Raises where it does not compile or load."""

    def timed(self, config: Config, run: Run) -> Timed:
        """What times this config on every copy, each as it was before a launch."""

    def check(self, config: Config, run: Run) -> float | None:
        """The relative error of its answer, None where nothing says what is right.

        Raises TuningError for a wrong answer, or memory written that is not the kernel's to write.
        """


class Subject(Protocol):
    """One problem to tune, in values that another process can be sent."""

    @property
    def problem(self) -> Problem:
        """What trials are remembered under."""

    @property
    def device(self) -> Device:
        """The GPU that it is tuned for."""

    def digest(self, config: Config) -> str:
        """The digest of the kernel that a config runs."""

    def compile(self, config: Config) -> None:
        """Compile into Triton's cache, with no GPU. Raises where the compiler refuses."""

    def compile_check(self, config: Config) -> None:
        """Compile what else a check of this config runs. What is refused here is refused there too."""

    @property
    def copies(self) -> int:
        """How many copies of its operands leave the L2 cache cold."""

    def stage(self, copies: int) -> Stage:
        """So many copies of its operands on the current GPU."""
