"""Describe what one call launches, with its tensors and workspaces by name and not by address."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tritile.core.threads import import_late
from tritile.core.views import Placed

COUNTERS: Final = "counters"  # the buffer of a work's counters


class Buffer(NamedTuple):
    """Stand for a kernel's pointer argument: the address of a buffer of the work, by its name."""

    buffer: str


def buffer_of(tensor: Any, role: str) -> Buffer:
    """Return the buffer of a call's tensor, which has the name of its role if it is the caller's."""
    return Buffer(tensor.buffer if isinstance(tensor, Placed) else role)


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


class Section(NamedTuple):
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
    def values(self) -> tuple[Any, ...]:
        return tuple(self.args[name] for name in self.kernel.arg_names)


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
    scratch: Mapping[str, Section] = MappingProxyType({})
    counters: int = 0
    main: int = -1
