"""Launch the kernel of a step: compiled ahead for any GPU, interpreted, or run."""

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
from tritile.lab.ladder.matrices import Matrices
from tritile.lab.ladder.reading import Reading
from tritile.lab.ladder.steps import ITEMSIZE, Kernel, Library, Step, Values
from tritile.planning import plans
from tritile.runtime import ahead
from tritile.runtime.compiles import OPTIONS
from tritile.runtime.interpreter import interpret
from tritile.runtime.offline import Resources, check_fits, compiling_for, resources

_INTERPRETED_PROCESSORS: Final = 3  # few, so that one makes several tiles


def arguments(kernel: Kernel, given: Sequence[Any], n: int, config: Values) -> tuple[Any, ...]:
    """Return the kernel's arguments besides its config: matrices, or descriptors of them, and n."""
    if kernel.blocks is None:
        return (*given, n)
    tiles = zip(given, kernel.blocks(config), strict=True)
    return (*(TensorDescriptor(matrix, [n, n], [n, 1], list(block)) for matrix, block in tiles), n)


def planned(step: Step, n: int, device: Device) -> Config | None:
    """Return the config that a step runs with: its first, or the library's choice; None for torch's calls."""
    if isinstance(step.runs, Kernel):
        return step.runs.configs[0]
    plan = plans.plan_for(step.runs.problem(n), device, "cached") if step.runs.problem else None
    return plan.config if plan else None


def noted(reading: Reading, note: str) -> Reading:
    """Return the reading with one more note."""
    notes = [reading.note] * bool(reading.note) + [note] * (note not in (reading.note or ""))
    return replace(reading, note="; ".join(filter(None, notes)))


def failed(reading: Reading, why: str) -> Reading:
    """Return the reading of a step that should have run and did not, or answered wrongly."""
    return replace(noted(reading, why), failed=True)


def reading_of(step: Step, n: int, config: Config | None, device: Device) -> Reading:
    """Return what is known of a step before it runs: the bytes it asks for, and its resources on a device."""
    runs = step.runs
    reading = Reading(step.op, step.name, step.new, step.dtype, step.yardstick)
    if config is None:
        return reading
    asked = runs.asked(n, ITEMSIZE[step.dtype], config) if isinstance(runs, Kernel) else None
    reading = replace(reading, config=str(config), asked=asked)
    unfit = step.unfit(device, n)
    if unfit:
        return noted(reading, unfit)
    try:
        found = resources_of(step, n, config, device)
    except Exception as error:  # a compiler may raise anything
        return noted(reading, brief(error))
    return replace(reading, registers=found.registers, spills=found.spills, shared=found.shared)


def resources_of(step: Step, n: int, config: Config, device: Device) -> Resources:
    """Compile a step's kernel for a device, which need not be here, and return its resources.

    Raises TuningError where the kernel needs too much shared memory or cannot be compiled, and whatever the
    compiler raises.
    """
    if isinstance(step.runs, Library):
        assert step.runs.problem is not None
        return ahead.compile_resources(step.runs.problem(n), config, device)
    pointers = [Pointer(getattr(torch, step.dtype))] * (3 if step.op == "matmul" else 2)
    with compiling_for(device):
        given = arguments(step.runs, pointers, n, config)
        kernel = step.runs.jitted.warmup(*given, grid=(1,), **OPTIONS, **config.to_triton().all_kwargs())
    check_fits(kernel, device)
    return resources(kernel)


def _called(library: Library, given: Matrices) -> None:
    """Make a call in mode "cached", whose config the reading shows, whatever mode is in force."""
    with mode("cached"):
        library.call(*given)


def run_interpreted(step: Step, given: Matrices) -> None:
    """Run a step on matrices in host memory, in Triton's interpreter."""
    if isinstance(step.runs, Library):
        _called(step.runs, given)
        return
    kernel, n, config = step.runs, given[0].shape[0], step.runs.configs[0]
    grid = kernel.grid(n, config, _INTERPRETED_PROCESSORS)
    interpret(kernel.jitted, grid, arguments(kernel, given, n, config), dict(config.kwargs))


def run_compiled(step: Step, given: Matrices, config: Config | None, processors: int) -> None:
    """Run a step on the current GPU; one of our kernels with this config."""
    if isinstance(step.runs, Library):
        _called(step.runs, given)
        return
    assert config is not None
    kernel, n = step.runs, given[0].shape[0]
    options = {**OPTIONS, **config.to_triton().all_kwargs()}
    kernel.jitted[kernel.grid(n, config, processors)](*arguments(kernel, given, n, config), **options)
