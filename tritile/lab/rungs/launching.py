"""Launching a rung's kernel: compiled for a GPU that need not be here, interpreted, or run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.pointer import Pointer
from tritile.core.settings import mode
from tritile.errors import brief
from tritile.lab.rungs.climb import ITEMSIZE, Kernel, Library, Rung, Values
from tritile.lab.rungs.matrices import Matrices
from tritile.lab.rungs.reading import Reading
from tritile.planning import plans
from tritile.runtime import ahead
from tritile.runtime.compiles import OPTIONS
from tritile.runtime.interpreter import interpret
from tritile.runtime.offline import Resources, check_fits, compiling_for, resources

_INTERPRETED_PROCESSORS: Final = 3  # few, so that one makes several tiles


def arguments(kernel: Kernel, given: Sequence[Any], n: int, config: Values) -> tuple[Any, ...]:
    """What the kernel takes besides its config: matrices, or descriptors of them, and n."""
    if kernel.blocks is None:
        return (*given, n)
    tiles = zip(given, kernel.blocks(config), strict=True)
    return (*(TensorDescriptor(matrix, [n, n], [n, 1], list(block)) for matrix, block in tiles), n)


def planned(rung: Rung, n: int, device: Device) -> Config | None:
    """The config that a rung runs with: its first, or the library's choice; None for another's call."""
    if isinstance(rung.runs, Kernel):
        return rung.runs.configs[0]
    plan = plans.plan_for(rung.runs.problem(n), device, "cached") if rung.runs.problem else None
    return plan.config if plan else None


def noted(reading: Reading, note: str) -> Reading:
    """The reading with one more reason why there is not more."""
    notes = [reading.note] * bool(reading.note) + [note] * (note not in (reading.note or ""))
    return replace(reading, note="; ".join(filter(None, notes)))


def failed(reading: Reading, why: str) -> Reading:
    """The reading of a rung that should have run and did not, or answered wrongly."""
    return replace(noted(reading, why), failed=True)


def described(rung: Rung, n: int, config: Config | None, device: Device) -> Reading:
    """What is known of a rung before it runs: the bytes it asks for, and what it takes on a device."""
    runs = rung.runs
    reading = Reading(rung.op, rung.name, rung.new, rung.dtype, rung.yardstick)
    if config is None:
        return reading
    asked = runs.asked(n, ITEMSIZE[rung.dtype], config) if isinstance(runs, Kernel) else None
    reading = replace(reading, config=str(config), asked=asked)
    unfit = rung.unfit(device, n)
    if unfit:
        return noted(reading, unfit)
    try:
        found = taken(rung, n, config, device)
    except Exception as error:  # a compiler may raise anything, which is not the other rungs' fault
        return noted(reading, brief(error))
    return replace(reading, registers=found.registers, spills=found.spills, shared=found.shared)


def taken(rung: Rung, n: int, config: Config, device: Device) -> Resources:
    """What the rung's kernel takes, compiled for a device that need not be here.

    Raises TuningError where it asks for more shared memory than there is, or cannot be compiled, and what
    the compiler raises.
    """
    if isinstance(rung.runs, Library):
        assert rung.runs.problem is not None
        return ahead.compile_resources(rung.runs.problem(n), config, device)
    pointers = [Pointer(getattr(torch, rung.dtype))] * (3 if rung.op == "matmul" else 2)
    with compiling_for(device):
        given = arguments(rung.runs, pointers, n, config)
        kernel = rung.runs.jitted.warmup(*given, grid=(1,), **OPTIONS, **config.to_triton().all_kwargs())
    check_fits(kernel, device)
    return resources(kernel)


def _called(library: Library, given: Matrices) -> None:
    """Make a call in the mode whose config is shown, whatever mode is in force."""
    with mode("cached"):
        library.call(*given)


def run_interpreted(rung: Rung, given: Matrices) -> None:
    """Run a rung on matrices in host memory, in Triton's interpreter."""
    if isinstance(rung.runs, Library):
        _called(rung.runs, given)
        return
    kernel, n, config = rung.runs, given[0].shape[0], rung.runs.configs[0]
    grid = kernel.grid(n, config, _INTERPRETED_PROCESSORS)
    interpret(kernel.jitted, grid, arguments(kernel, given, n, config), dict(config.kwargs))


def run_compiled(rung: Rung, given: Matrices, config: Config | None, processors: int) -> None:
    """Run a rung on the current GPU, a kernel of ours with this config."""
    if isinstance(rung.runs, Library):
        _called(rung.runs, given)
        return
    assert config is not None
    kernel, n = rung.runs, given[0].shape[0]
    options = {**OPTIONS, **config.to_triton().all_kwargs()}
    kernel.jitted[kernel.grid(n, config, processors)](*arguments(kernel, given, n, config), **options)
