"""Run the kernel of a step: compiled ahead for any GPU, interpreted, or launched on the current one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.pointer import Pointer
from tritile.core.settings import mode
from tritile.errors import TuningError, brief
from tritile.lab.ladder.steps import ITEMSIZE, Dtype, Kernel, Library, Op, Step, Values
from tritile.planning import plans
from tritile.runtime import ahead
from tritile.runtime.compiles import OPTIONS
from tritile.runtime.interpreter import interpret
from tritile.runtime.offline import Resources, check_fits, compiling_for, resources

Matrices = tuple[torch.Tensor, ...]  # the last is written
_INTERPRETED_PROCESSORS: Final = 3  # few, so that one makes several tiles
_ROUNDING: Final = {"float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}  # half a step, of elements near 1
_CHECKED_ROWS: Final = 256


@dataclass(frozen=True)
class Reading:
    """Hold what is known of a step on n x n matrices; a field is None where it was not measured.

    `config` is what the step ran with. `asked` is how many bytes its kernel asks of global memory, by a
    formula. `read` and `written` are bytes counted in the interpreter, `touched` the bytes of the 32-byte
    sectors they lie in. `us` is the median time of a launch in microseconds, `spread` that of its samples,
    `error` the relative error of its answer. `registers` and `spills` (bytes) are per thread, `shared`
    (bytes) per program. `note` gives the reason for missing fields. `failed` marks a step that should have
    run and did not, or that answered wrongly.
    """

    op: Op
    name: str
    new: str
    dtype: Dtype
    yardstick: bool
    config: str | None = None
    asked: int | None = None
    read: int | None = None
    written: int | None = None
    touched: int | None = None
    us: float | None = None
    spread: float | None = None
    error: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    note: str | None = None
    failed: bool = False

    @property
    def bytes_counted(self) -> int | None:
        """Return the bytes read and written, as counted."""
        return None if self.read is None or self.written is None else self.read + self.written

    def noted(self, note: str, failed: bool = False) -> "Reading":
        """Return the reading with one more note, as failed if so asked."""
        notes = self.note.split("; ") if self.note else []
        return replace(self, note="; ".join(dict.fromkeys([*notes, note])), failed=self.failed or failed)


def matrices(op: str, n: int, dtype: str, where: str, seed: int = 0) -> Matrices:
    """Return random n x n matrices, the same for the same seed, and one full of NaN for the answer."""
    generator, kind = torch.Generator(where).manual_seed(seed), getattr(torch, dtype)
    count = 2 if op == "matmul" else 1
    given = [torch.randn(n, n, device=where, dtype=kind, generator=generator) for _ in range(count)]
    return (*given, torch.full_like(given[0], math.nan))


def allowed_error(dtype: str, n: int) -> float:
    """Return the largest `error_of` of a right product: rounding of the answer, and of n sums in fp32.

    A running sum errs by about sqrt(n) roundings of its own, twice as much in the adders of tensor cores.
    """
    return _ROUNDING[dtype] + 4e-7 * math.sqrt(n)


def error_of(op: str, given: Matrices) -> float:
    """Return the relative error of the last matrix: |out - a b| / |a b| in float64 over up to 256 rows.

    A transpose has to be exact. Raises TuningError for a wrong answer.
    """
    *operands, out = given
    n = out.shape[0]
    if op == "transpose":
        if not torch.equal(operands[0].t(), out):
            raise TuningError("wrong answer: elements differ")
        return 0.0
    rows = torch.linspace(0, n - 1, min(n, _CHECKED_ROWS), device=out.device).round().long()
    wanted = operands[0][rows].double() @ operands[1].double()
    error = float((out[rows].double() - wanted).norm() / wanted.norm())
    whole = math.isfinite(float(out.sum(dtype=torch.float32)))
    allowed = allowed_error(str(out.dtype).removeprefix("torch."), n)
    if not (whole and error <= allowed):
        raise TuningError(f"wrong answer: relative error {error:.3g}, above {allowed:.3g}, or not a number")
    return error


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
        return reading.noted(unfit)
    try:
        found = resources_of(step, n, config, device)
    except Exception as error:  # a compiler may raise anything
        return reading.noted(brief(error))
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
        return _called(step.runs, given)
    kernel, n, config = step.runs, given[0].shape[0], step.runs.configs[0]
    grid = kernel.grid(n, config, _INTERPRETED_PROCESSORS)
    interpret(kernel.jitted, grid, arguments(kernel, given, n, config), dict(config.kwargs))


def run_compiled(step: Step, given: Matrices, config: Config | None, processors: int) -> None:
    """Run a step on the current GPU; one of our kernels with this config."""
    if isinstance(step.runs, Library):
        return _called(step.runs, given)
    assert config is not None
    kernel, n = step.runs, given[0].shape[0]
    options = {**OPTIONS, **config.to_triton().all_kwargs()}
    kernel.jitted[kernel.grid(n, config, processors)](*arguments(kernel, given, n, config), **options)
