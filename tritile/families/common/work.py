"""Work: what one call launches, with its tensors and workspaces named by number and not by address."""

from typing import Any, NamedTuple


class Buffer(NamedTuple):
    """A kernel's pointer argument: the address of a buffer of the work."""

    buffer: int


class Descriptor(NamedTuple):
    """A kernel's tensor descriptor argument: a buffer with this shape, strides (elements) and block.

    `layout` is that of a tile in shared memory for kernels written in Gluon, None for others. `rounded`:
    fp32 is rounded to TF32 on its way to shared memory, where tensor cores would cut it.
    """

    buffer: int
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
    """One launch: a kernel, its grid, its arguments in order, and how to compile it."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    options: dict[str, Any]


class Work(NamedTuple):
    """The launches of one call, one after the other.

    Their buffers are, in order: the call's tensors, the workspaces, and, where `counters` is above 0, that
    many int64 counters, zero at first, that a launch leaves as the next of any kind wants to find them.
    `main` is the step that makes the product, or moves the elements.
    """

    steps: tuple[Step, ...]
    scratch: tuple[Section, ...] = ()
    counters: int = 0
    main: int = -1
