"""Describe what one call launches, with its tensors and workspaces by name and not by address."""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from tritile.core.threads import import_late

COUNTERS: Final = "counters"  # the buffer of a work's counters
ALIGNMENT: Final = 256  # bytes, of each workspace


class Buffer(NamedTuple):
    """Stand for a kernel's pointer argument: the address of a buffer of the work, by its name."""

    buffer: str


class Descriptor(NamedTuple):
    """Stand for a kernel's tensor descriptor argument: a buffer with shape, strides (elements) and block.

    `layout` is that of a tile in shared memory for kernels written in Gluon, None for others. `rounded`: fp32
    is rounded to TF32 on its way to shared memory; tensor cores would truncate it.
    """

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None
    rounded: bool = False


class Workspace(NamedTuple):
    """Describe a workspace: its dtype and number of elements."""

    dtype: str
    elements: int


class Kernel:
    """Name a jitted function, whose module is imported when the function is first needed.

    Triton reads a function's source as it jits it: that of all families takes a quarter of a second.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    @functools.cached_property
    def jitted(self) -> Any:
        return getattr(import_late(self.module), self.name)


class Step(NamedTuple):
    """Describe one launch: a kernel, its grid, its arguments by name, and how to compile it."""

    kernel: Any
    grid: tuple[int, int, int]
    args: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def named(self) -> dict[str, Any]:
        """Return the arguments in the order in which the kernel takes them."""
        return {name: self.args[name] for name in self.kernel.arg_names}

    @property
    def values(self) -> tuple[Any, ...]:
        return tuple(self.named.values())


def step_of(
    kernel: Kernel, grid: tuple[int, int, int], values: Mapping[str, Any], options: Mapping[str, Any]
) -> Step:
    """Return the launch of a kernel with those of the values that it takes."""
    jitted = kernel.jitted
    return Step(jitted, grid, {name: values[name] for name in jitted.arg_names}, options)


class Work(NamedTuple):
    """Hold the launches of one call, one after the other.

    Their buffers are the call's tensors, the workspaces by name and `counters` int64 counters. Counters are
    zero at first, and each launch leaves them ready for the next one of any kind. `main` is the place in
    `steps` of the kernel that does the work; the others prepare operands or combine parts.
    """

    steps: tuple[Step, ...]
    scratch: Mapping[str, Workspace] = MappingProxyType({})
    counters: int = 0
    main: int = -1


def laid_out(scratch: Iterable[Workspace]) -> tuple[list[int], int]:
    """Return where each workspace begins in one piece of memory, and the bytes of that piece."""
    offsets, end = [], 0
    for section in scratch:
        offsets.append(end)
        size = section.elements * getattr(torch, section.dtype).itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
