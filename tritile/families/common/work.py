"""Describe what one call launches, with its tensors and workspaces by name and not by address."""

import functools
from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import triton.language as tl

from tritile.core.call import MatmulCall, View
from tritile.core.epilogue import SIDES
from tritile.core.threads import import_late

COUNTERS: Final = "counters"  # the buffer of a work's counters


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
    scratch: Mapping[str, Section] = MappingProxyType({})
    counters: int = 0
    main: int = -1


class Lowered(NamedTuple):
    """Describe what a product is lowered to: launches before the core, the core, launches after it.

    Steps, and views of the core, name the buffers of the call and of `scratch`.
    """

    before: tuple[Step, ...]
    core: MatmulCall
    after: tuple[Step, ...] = ()
    scratch: Mapping[str, Section] = MappingProxyType({})

    def around(self, core: Work) -> Work:
        """Return all launches of a call: its core's work between the launches before and after."""
        assert not self.scratch.keys() & core.scratch.keys()
        scratch, main = {**self.scratch, **core.scratch}, core.main - len(self.after)
        return Work((*self.before, *core.steps, *self.after), scratch, core.counters, main)


def copied_batch(
    view: View, batch_shape: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return how the matrices of an operand are copied side by side, those of a stretched dimension once.

    That is their number, their batch's sizes and strides, and the strides of the whole batch over the copies,
    in copies.
    """
    dims = [(n, step) for n, step in zip(batch_shape, view.batch_strides, strict=True) if n > 1 and step]
    count = before = prod(n for n, _ in dims)
    steps = []
    for n, step in zip(batch_shape, view.batch_strides, strict=True):
        own = n > 1 and step != 0
        before //= n if own else 1
        steps.append(before if own else 0)
    shape, strides = zip(*dims, strict=True) if dims else ((1,), (0,))
    return count, tuple(shape), tuple(strides), tuple(steps)


# --- Arguments that kernels of several families take ---


def extra(sides: Mapping[str, View], rank: int, weights: tuple[Any, Any] = (None, None)) -> tuple[Any, ...]:
    """Return an epilogue's operands, then alpha and beta, as `common.epilogue.finished` takes them.

    `rank`: the number of batch dimensions that kernels see.
    """
    found: list[Any] = []
    for name in SIDES:
        if (view := sides.get(name)) is None:
            found += [None] * (3 + rank)
        else:
            missing = (0,) * (rank - len(view.batch_strides))
            found += [Buffer(view.buffer), *view.strides, *missing, *view.batch_strides]
    return (*found, *weights)


def epilogue_arguments(call: MatmulCall, rank: int) -> dict[str, Any]:
    """Return what kernels take of an epilogue; None where nothing is fused.

    Of float64, alpha and beta are compiled in, to keep all their digits: Triton passes a float as fp32.
    """
    weights: tuple[Any, Any] = (call.alpha, call.beta) if call.epilogue.weighted else (None, None)
    if call.dtype == "float64" and call.epilogue.weighted:
        weights = tl.constexpr(call.alpha), tl.constexpr(call.beta)
    found = extra(call.sides, rank, weights) if call.epilogue else None
    return {"extra": found, "EPILOGUE": call.epilogue.constants}


def fallback_arguments(call: MatmulCall) -> dict[str, Any]:
    if call.fallback is None:
        return {"flag_ptr": None, "FLAGS": None}
    flag, least, end = call.fallback
    return {"flag_ptr": Buffer(flag.buffer), "FLAGS": (least, end)}
