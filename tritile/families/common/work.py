"""Work: what one call launches, with its tensors and workspaces named and not by address."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tritile.core.views import Placed

COUNTERS: Final = "counters"  # the buffer of a work's counters


class Buffer(NamedTuple):
    """A kernel's pointer argument: the address of a buffer of the work, by its name."""

    buffer: str


def buffer_of(tensor: Any, role: str) -> Buffer:
    """Return the buffer of a call's tensor, which has the name of its role if it is the caller's."""
    return Buffer(tensor.buffer if isinstance(tensor, Placed) else role)


class Descriptor(NamedTuple):
    """A kernel's tensor descriptor argument: a buffer with this shape, strides (elements) and block.

    `layout` is that of a tile in shared memory for kernels written in Gluon, None for others. `rounded`:
    fp32 is rounded to TF32 on its way to shared memory, where tensor cores would cut it.
    """

    buffer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None
    rounded: bool = False


class Section(NamedTuple):
    """A workspace: so many elements of a dtype."""

    dtype: str
    elements: int


class Step(NamedTuple):
    """One launch: a kernel, its grid, its arguments by name, and how to compile it."""

    kernel: Any
    grid: tuple[int, int, int]
    args: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        """Return the arguments in the order of the kernel's parameters."""
        return tuple(self.args[name] for name in self.kernel.arg_names)


def step_of(
    kernel: Any, grid: tuple[int, int, int], values: Mapping[str, Any], options: Mapping[str, Any]
) -> Step:
    """Return the launch of a kernel with those of some values that it takes."""
    return Step(kernel, grid, {name: values[name] for name in kernel.arg_names}, options)


class Work(NamedTuple):
    """The launches of one call, one after the other.

    Their buffers are the call's tensors, the workspaces by name, and, where `counters` is above 0, that many
    int64 counters, zero at first, that a launch leaves as the next of any kind wants to find them.
    `main` is the step that makes the product, or moves the elements.
    """

    steps: tuple[Step, ...]
    scratch: Mapping[str, Section] = MappingProxyType({})
    counters: int = 0
    main: int = -1
