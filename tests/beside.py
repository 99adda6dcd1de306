"""Watch kernels in the interpreter: which elements they load."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from tritile.core.of_triton import InterpreterBuilder


def _places(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of a tensor's elements."""
    found = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dim] = size
        found += (torch.arange(size) * step * tensor.element_size()).view(shape)
    return set((found + tensor.data_ptr()).flatten().tolist())


def _given(pointers, mask) -> set[int]:
    chosen = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
    return set(np.asarray(pointers.data)[chosen].tolist())


@contextlib.contextmanager
def reading_only(*tensors: torch.Tensor) -> Iterator[None]:
    """Fail at a load of anything but elements of these tensors, and elements that a kernel stored before."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    allowed = set().union(*map(_places, tensors))

    def checking(self, pointers, mask, *rest, **options):
        beside = _given(pointers, mask) - allowed
        assert not beside, f"{len(beside)} elements are read beside the operands"
        return load(self, pointers, mask, *rest, **options)

    def noting(self, pointers, value, mask, *rest, **options):
        allowed.update(_given(pointers, mask))
        return store(self, pointers, value, mask, *rest, **options)

    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checking, noting
    try:
        yield
    finally:
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
