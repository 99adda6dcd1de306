"""Count what kernels request of global memory while Triton's interpreter runs them.

Each load and store of a tile is counted by its addresses and its mask; masked elements do not count.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritile.core.of_triton import InterpreterBuilder
from tritile.core.threads import library_lock
from tritile.lab.traffic import SECTOR


@dataclass
class Counts:
    """Bytes read and written, as each lane requests them, and the 32-byte sectors that they lie in.

    A sector counts once for all accesses of a program.
    """

    read: int = 0
    written: int = 0
    read_sectors: int = 0
    written_sectors: int = 0


class _Seen:
    """The sectors that the current program touched."""

    def __init__(self) -> None:
        self._program, self._touched = None, set[int]()

    def new(self, program: Any, sectors: Any) -> int:
        if program != self._program:
            self._program, self._touched = program, set()
        before = len(self._touched)
        self._touched.update(sectors.tolist())
        return len(self._touched) - before


def _requested(pointers: Any, mask: Any) -> tuple[int, Any]:
    """Return the bytes that an access of a tile requests, and the sectors that they lie in."""
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    given = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
    addresses = np.asarray(pointers.data)[given]
    ends = np.concatenate((addresses // SECTOR, (addresses + (size - 1)) // SECTOR))
    return size * addresses.size, np.unique(ends)


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what interpreted kernels request of memory in this context, in any thread."""
    counts, read, written = Counts(), _Seen(), _Seen()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        size, sectors = _requested(pointers, mask)
        counts.read += size
        counts.read_sectors += read.new(self.grid_idx, sectors)
        return load(self, pointers, mask, *rest, **options)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        size, sectors = _requested(pointers, mask)
        counts.written += size
        counts.written_sectors += written.new(self.grid_idx, sectors)
        return store(self, pointers, value, mask, *rest, **options)

    def patch(loading: Any, storing: Any) -> None:
        with library_lock:  # waits until no other thread is in an access
            InterpreterBuilder.create_masked_load = loading
            InterpreterBuilder.create_masked_store = storing

    patch(counting_load, counting_store)
    try:
        yield counts
    finally:
        patch(load, store)
