"""`tritile.bench`: time one call beside torch."""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import triton

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.markup import Tabular
from tritile.core.problem import KernelProblem, Problem, Tiled
from tritile.lab.report.bench import host_us, measured
from tritile.lab.tune import gpu_for, problem_of
from tritile.ops.plan import function_of
from tritile.planning.trial import AS_TORCH
from tritile.tune.autotuner import Autotuner
from tritile.tune.declared import check_grid
from tritile.tune.decorated import KernelSubject
from tritile.tune.identity import identity
from tritile.tune.measure.shipping import pack
from tritile.tune.measure.timing import timing_of
from tritile.tune.measure.workshop import borrowed
from tritile.tune.measuring import call_of, room_of

_BRIEF_US: Final = 1000.0  # of a call whose time on the host is told: it is made hundreds of times
_BATCHES: Final = 20


@dataclass(frozen=True, repr=False)
class BenchResult(Tabular):
    """Tell how long a call takes, and torch's.

    - `tritile_us`, `torch_us`: microseconds on the GPU, medians, on cold operands, by turns; `torch_us` is of
      the fastest of torch's ways, which `torch_call` names; of a decorated kernel, its reference or None.
    - `spread`: that of tritile's times, over their median.
    - `config`, `source`: what ran, and which source gave it, as `tritile.plan` says.
    - `error`, `torch_error`: relative norms against a reference in float64; None of a decorated kernel.
    - `host_us`: microseconds that the call keeps the host busy; None where it was not timed.
    """

    problem: Problem
    device: Device
    tritile_us: float
    torch_us: float | None
    spread: float
    config: Config | triton.Config
    source: str
    torch_call: str = ""
    error: float | None = None
    torch_error: float | None = None
    host_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """Return torch's time by tritile's: above 1 tritile is faster; None where torch was not timed."""
        return None if self.torch_us is None else self.torch_us / self.tritile_us

    @property
    def _rows(self) -> tuple[tuple[str, str], ...]:
        found = [("tritile", f"{self.tritile_us:.1f} us, spread {self.spread:.1%}")]
        if self.torch_us is not None:
            found.append(
                ("torch", f"{self.torch_us:.1f} us, {self.ratio:.2f} times as long: {self.torch_call}")
            )
        elif isinstance(self.problem, KernelProblem):
            found.append(("torch", "not timed: the kernel has no reference="))
        if self.error is not None and self.torch_error is not None:
            found.append(("error", f"{self.error:.2g}, torch's {self.torch_error:.2g}"))
        found += [("config", str(self.config)), ("source", self.source)]
        if self.host_us is not None:
            found.append(("host", f"{self.host_us:.1f} us a call"))
        return tuple(found)

    @property
    def _title(self) -> str:
        return f"{self.problem.label.strip()} on {self.device.name}"


def _of_kernel(kernel: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BenchResult:
    """Time a decorated kernel with the config of a call, in a process of its own."""
    given = {"warmup": False} | kwargs
    device, _ = gpu_for("bench", (*args, *kwargs.values()))
    check_grid("bench", kwargs.get("grid"))
    plan = kernel.planned(args, kwargs, device)
    config = identity(plan.config)
    call = call_of(kernel, args, given, {config.key: plan.config})
    gpu, room = room_of(call)
    with tempfile.TemporaryDirectory(prefix="tritile-") as folder:
        subject = KernelSubject(plan.problem, device, kernel.digest)
        sent = replace(subject, shipment=pack(call, Path(folder), room))
        with borrowed(gpu) as shop:
            try:
                shop.begin(sent)
                samples = shop.race(sent, [config, *[AS_TORCH] * (kernel.reference is not None)])
            finally:
                shop.end(sent)
    timing, *referred = map(timing_of, samples)
    torch_us, way = (referred[0].us, "the kernel's reference") if referred else (None, "")
    return BenchResult(
        plan.problem, device, timing.us, torch_us, timing.spread, plan.config, plan.source, way
    )


def bench(
    what: Callable[..., Any] | str | Tiled | Autotuner,
    *args: Any,
    **kwargs: Any,
) -> BenchResult:
    """Time a call beside torch on the GPU, with the config that the call would run.

    It is timed as `tritile bench` does: in CUDA graphs, by turns with each of torch's ways, on random
    operands that leave L2 cold. The answer is checked. Nothing is tuned: see `tritile.tune`.

    Args:
        what: an operation of tritile, or its name, followed by the arguments of the call, as `tritile.plan`
            takes them; a problem alone; or a kernel that `tritile.autotune` decorates, followed by its
            arguments and `grid=`, which is timed on copies of its arguments, by turns with its `reference`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    The time on the host is told of calls with tensors on the GPU that take less than a millisecond there.

    Returns:
        A `BenchResult`, which prints as a table.

    Raises:
        TritileError: as the call itself raises it for its arguments.
        UnsupportedError: there is no GPU here, a CUDA graph is being captured, or a kernel cannot be sent to
            another process.
        TuningError: the answer is wrong, or the config does not run.
    """
    if isinstance(what, Autotuner):
        return _of_kernel(what, args, kwargs)
    problem = problem_of("bench", what, args, kwargs)
    values = (*args, *kwargs.values())
    device, gpu = gpu_for("bench", values)
    with torch.cuda.device(gpu):
        found = measured(problem, tell=lambda text: warnings.warn(text, stacklevel=2))
        here = any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)
        host = None
        if here and found.tritile_us < _BRIEF_US and not isinstance(what, Tiled):
            function = function_of("bench", what)
            (host,) = host_us(lambda: function(*args, **kwargs), batches=_BATCHES)
    return BenchResult(
        problem, device, found.tritile_us, found.torch_us, found.spread, found.config, found.plan_source,
        found.torch_call, found.error, found.torch_error, host,
    )  # fmt: skip
