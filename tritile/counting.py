"""Counting what kernels ask of global memory, as Triton's interpreter runs them.

Each load and store of a tile is seen with its addresses and its mask: what is counted is what was asked
for, edges that were masked off left out, and not what any formula says.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder

from tritile.interpreter import library_lock

SECTOR: Final = 32  # bytes that a GPU moves at the least


@dataclass
class Counts:
    """Bytes read and written, and the same in whole sectors of 32 bytes, those of one access counted once."""

    read: int = 0
    written: int = 0
    read_sectors: int = 0
    written_sectors: int = 0


def _asked(pointers: Any, mask: Any) -> tuple[int, int]:
    """Bytes that an access of a tile touches, and how many different sectors they lie in."""
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    addresses = np.asarray(pointers.data)[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
    ends = np.concatenate((addresses // SECTOR, (addresses + (size - 1)) // SECTOR))
    return size * addresses.size, np.unique(ends).size


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what kernels that are interpreted within ask of memory, in this thread or any other."""
    counts = Counts()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        size, sectors = _asked(pointers, mask)
        counts.read += size
        counts.read_sectors += sectors
        return load(self, pointers, mask, *rest, **options)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        size, sectors = _asked(pointers, mask)
        counts.written += size
        counts.written_sectors += sectors
        return store(self, pointers, value, mask, *rest, **options)

    with library_lock:  # which an interpreted kernel holds too
        InterpreterBuilder.create_masked_load = counting_load
        InterpreterBuilder.create_masked_store = counting_store
        try:
            yield counts
        finally:
            InterpreterBuilder.create_masked_load = load
            InterpreterBuilder.create_masked_store = store
