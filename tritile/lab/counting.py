"""Counting what kernels ask of global memory, as Triton's interpreter runs them.

Each load and store of a tile is seen with its addresses and its mask: what is counted is what was asked
for, edges that were masked off left out, and not what any formula says.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tritile.core.of_triton import InterpreterBuilder
from tritile.runtime.interpreter import library_lock

SECTOR: Final = 32  # bytes that a GPU moves at the least


@dataclass
class Counts:
    """Bytes read and written, as each lane asks for them, and the sectors of 32 bytes that they lie in.

    A sector that one access of a tile touches twice counts once: a GPU moves it once. Where programs are
    what is counted, the same holds for all accesses of a program.
    """

    read: int = 0
    written: int = 0
    read_sectors: int = 0
    written_sectors: int = 0


class _Seen:
    """Sectors that the present program touched."""

    def __init__(self, programs: bool) -> None:
        self._programs, self._program, self._touched = programs, None, set[int]()

    def new(self, program: Any, sectors: Any) -> int:
        """How many of these sectors count."""
        if not self._programs:
            return len(sectors)
        if program != self._program:
            self._program, self._touched = program, set()
        before = len(self._touched)
        self._touched.update(sectors.tolist())
        return len(self._touched) - before


def _asked(pointers: Any, mask: Any) -> tuple[int, Any]:
    """Bytes that an access of a tile asks for, and the sectors they lie in."""
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    given = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
    addresses = np.asarray(pointers.data)[given]
    ends = np.concatenate((addresses // SECTOR, (addresses + (size - 1)) // SECTOR))
    return size * addresses.size, np.unique(ends)


@contextlib.contextmanager
def counted(programs: bool = False) -> Iterator[Counts]:
    """Count what kernels that are interpreted within ask of memory, in this thread or any other.

    `programs`: a sector counts once for all accesses of a program, and not for each.
    """
    counts, read, written = Counts(), _Seen(programs), _Seen(programs)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        size, sectors = _asked(pointers, mask)
        counts.read += size
        counts.read_sectors += read.new(self.grid_idx, sectors)
        return load(self, pointers, mask, *rest, **options)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        size, sectors = _asked(pointers, mask)
        counts.written += size
        counts.written_sectors += written.new(self.grid_idx, sectors)
        return store(self, pointers, value, mask, *rest, **options)

    def patch(loading: Any, storing: Any) -> None:
        with library_lock:  # no kernel of another thread is amid an access
            InterpreterBuilder.create_masked_load = loading
            InterpreterBuilder.create_masked_store = storing

    patch(counting_load, counting_store)
    try:
        yield counts
    finally:
        patch(load, store)
