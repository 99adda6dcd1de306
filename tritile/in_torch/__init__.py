"""Compute torch's own calls by tritile where that is expected to be faster."""

from tritile.in_torch.report import Report
from tritile.in_torch.use import use_in_torch

__all__ = ["Report", "use_in_torch"]
