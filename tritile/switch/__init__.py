"""torch's own calls made by tritile where it is expected to win: kernels for aten, and who decides."""

from tritile.switch.report import Report
from tritile.switch.use import use_in_torch

__all__ = ["Report", "use_in_torch"]
