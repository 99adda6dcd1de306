"""The plan of a call of a decorated kernel, and the base class of all plans."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import triton

from tritile.core.device import Device
from tritile.core.markup import Tabular
from tritile.core.problem import KernelProblem


@runtime_checkable
class Plannable(Protocol):
    """A kernel that `tritile.autotune` decorates."""

    def planned(
        self, args: tuple[object, ...], kwargs: dict[str, object], device: Device | None
    ) -> "KernelPlan":
        """Return the plan of a call on a GPU; None: the GPU of its tensors."""


@dataclass(frozen=True, repr=False)
class Planned(Tabular):
    problem: Any
    config: Any
    source: str
    device: Device
    us: float | None = None
    why: str = ""

    @property
    def _title(self) -> str:
        return f"Plan for {self.problem.label} on {self.device.name}"

    @property
    def _rows(self) -> tuple[tuple[str, str], ...]:
        time = "" if self.us is None else f", {self.us:.1f} us"
        return ("config", str(self.config)), ("source", f"{self.source}{time}: {self.why}")


@dataclass(frozen=True, repr=False)
class KernelPlan(Planned):
    """The config of a call of a kernel decorated with `tritile.autotune`, and where it comes from.

    It prints as a table.

    Attributes:
        problem: the kernel's name, the values of its key, and the dtypes of its tensors.
        config: the `triton.Config` that runs.
        source: "exact" (measured here for exactly this problem), "table" (measured on a GPU of this model, or
            one of its architecture, and shipped with the kernel), "predicted" (the fastest at the nearest
            measured problem), "model" (nothing was measured: the choice of the kernel's own performance
            model, or the first config) or "interpreter" (TRITON_INTERPRET is set and nothing was measured).
        device: the GPU of the plan.
        us: measured microseconds; None if the source has none.
        why: the source in words.
        tentative: True if another process is measuring the problem, or if the GPU was too busy to: a later
            call chooses again.
    """

    problem: KernelProblem
    config: triton.Config
    tentative: bool = False
