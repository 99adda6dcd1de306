"""Watch what kernels load and store while Triton's interpreter runs them, access by access."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tritile.core.threads import interpreter_lock
from tritile.lab.traffic import SECTOR

# Called with the program, the address of each element of a tile, its mask, and bytes of an element.
Watcher = Callable[[tuple[int, int, int], np.ndarray, np.ndarray, int], None]


@contextlib.contextmanager
def watched(on_load: Watcher, on_store: Watcher) -> Iterator[None]:
    """Have these called before each access of a tile, in any thread."""
    before = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watching(access: Callable[..., Any], watcher: Watcher, rest: int) -> Callable[..., Any]:
        def seen(self: Any, pointers: Any, *args: Any, **options: Any) -> Any:
            mask = np.broadcast_to(args[rest].data, pointers.data.shape).astype(bool)
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            watcher(self.grid_idx, np.array(pointers.data), mask, size)
            return access(self, pointers, *args, **options)

        return seen

    def patch(load: Any, store: Any) -> None:
        with interpreter_lock:  # waits until no other thread is in an access
            InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store

    patch(watching(before[0], on_load, 0), watching(before[1], on_store, 1))
    try:
        yield
    finally:
        patch(*before)


@dataclass
class Counts:
    """Bytes that unmasked elements take, and the 32-byte sectors that they lie in, each once a program."""

    read: int = 0
    written: int = 0
    read_sectors: int = 0
    written_sectors: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    counts, sectors = Counts(), {"read": set(), "written": set()}

    def counting(kind: str) -> Watcher:
        def count(program, addresses, mask, size):
            first = addresses[mask]
            ends = np.unique(np.concatenate((first // SECTOR, (first + (size - 1)) // SECTOR)))
            sectors[kind].update((program, sector) for sector in ends.tolist())
            setattr(counts, kind, getattr(counts, kind) + size * first.size)
            setattr(counts, f"{kind}_sectors", len(sectors[kind]))

        return count

    with watched(counting("read"), counting("written")):
        yield counts


def places(tensor: torch.Tensor) -> np.ndarray:
    """The addresses of a tensor's elements."""
    found = np.array(tensor.data_ptr())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + np.arange(size) * step * tensor.element_size()
    return found.reshape(-1)


@contextlib.contextmanager
def reading_only(*tensors: torch.Tensor) -> Iterator[None]:
    """Fail at a load of anything but elements of these tensors, and elements that a kernel stored before."""
    allowed = np.unique(np.concatenate([places(tensor) for tensor in tensors]))
    stored: list[np.ndarray] = []

    def check(program, addresses, mask, size):
        nonlocal allowed
        found = addresses[mask]
        if stored and not is_within(found, allowed):
            allowed = np.unique(np.concatenate([allowed, *stored]))
            stored.clear()
        assert is_within(found, allowed), "elements are read outside of the operands"

    with watched(check, lambda program, addresses, mask, size: stored.append(addresses[mask])):
        yield


def is_within(found: np.ndarray, allowed: np.ndarray) -> bool:
    return bool((allowed[np.searchsorted(allowed[:-1], found)] == found).all())
