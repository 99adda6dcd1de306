"""torch's own calls made by tritile where it is expected to win: kernels for aten, and who decides."""

from tritile.in_torch.report import Report
from tritile.in_torch.use import use_in_torch

__all__ = ["Report", "use_in_torch"]
