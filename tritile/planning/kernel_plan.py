"""Tell which config a call of a decorated kernel runs, and why: `KernelPlan`."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import triton

from tritile.core.device import Device
from tritile.core.markup import Tabular
from tritile.core.problem import KernelProblem


@dataclass(frozen=True, repr=False)
class KernelPlan(Tabular):
    """Tell which config runs for a call of a kernel that `tritile.autotune` decorates, and why.

    - `problem`: the kernel's name, the values of its key and the dtypes of its tensors.
    - `source`: "exact" (measured here for just this problem), "table" (measured for it on a GPU of this
      model, and shipped with the kernel), "predicted" (the fastest at the nearest measured problem), "model"
      (by the kernel's own performance model, or the first of its configs: nothing was measured) or
      "interpreter" (tensors in host memory, and nothing was measured).
    - `us`: microseconds that were measured; None where the source has none.
    - `why`: the source in words.
    """

    problem: KernelProblem
    config: triton.Config
    source: str
    device: Device
    us: float | None = None
    why: str = ""

    @property
    def _rows(self) -> tuple[tuple[str, str], ...]:
        time = "" if self.us is None else f", {self.us:.1f} us"
        return ("config", str(self.config)), ("source", f"{self.source}{time}: {self.why}")

    @property
    def _title(self) -> str:
        return f"Plan for {self.problem.label} on {self.device.name}"


@runtime_checkable
class Plannable(Protocol):
    """Describe a kernel that `tritile.autotune` decorates to those that may not import the tuner."""

    def planned(
        self, args: tuple[object, ...], kwargs: dict[str, object], device: Device | None
    ) -> KernelPlan:
        """Return the plan of a call, on a GPU or, where that is None, on the GPU of its tensors."""
