"""Count what kernels ask of global memory while Triton's interpreter runs them.

Each load and store of a tile is counted by its addresses and its mask; masked elements do not count.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tritile.core.of_triton import InterpreterBuilder
from tritile.core.threads import library_lock

SECTOR: Final = 32  # the fewest bytes that a GPU moves


@dataclass
class Counts:
    """Count bytes read and written, as each lane asks for them, and the 32-byte sectors they lie in.

    A sector counts once for an access of a tile, as a GPU moves it once; or once for all accesses of a
    program, if `counted` is asked to count by programs.
    """

    read: int = 0
    written: int = 0
    read_sectors: int = 0
    written_sectors: int = 0


class _Seen:
    """Hold the sectors that the current program touched."""

    def __init__(self, programs: bool) -> None:
        self._programs, self._program, self._touched = programs, None, set[int]()

    def new(self, program: Any, sectors: Any) -> int:
        """Return how many of these sectors count."""
        if not self._programs:
            return len(sectors)
        if program != self._program:
            self._program, self._touched = program, set()
        before = len(self._touched)
        self._touched.update(sectors.tolist())
        return len(self._touched) - before


def _asked(pointers: Any, mask: Any) -> tuple[int, Any]:
    """Return the bytes that an access of a tile asks for, and the sectors they lie in."""
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    given = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
    addresses = np.asarray(pointers.data)[given]
    ends = np.concatenate((addresses // SECTOR, (addresses + (size - 1)) // SECTOR))
    return size * addresses.size, np.unique(ends)


@contextlib.contextmanager
def counted(programs: bool = False) -> Iterator[Counts]:
    """Count what interpreted kernels ask of memory in this context, in any thread.

    With `programs` a sector counts once for all accesses of a program, else once for each access.
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
        with library_lock:  # waits until no other thread is in an access
            InterpreterBuilder.create_masked_load = loading
            InterpreterBuilder.create_masked_store = storing

    patch(counting_load, counting_store)
    try:
        yield counts
    finally:
        patch(load, store)
