"""Time tritile against torch: `tritile.bench`, and what `tritile bench` and benchmarks of suites measure.

All backends of a case run in one process, in turns, in CUDA graphs, on operands that are not in the L2 cache.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

from tritile.choose import aten, pick
from tritile.core import device as devices
from tritile.core.call import Call
from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.markup import Tabular
from tritile.core.permutation import PermuteProblem
from tritile.core.problem import KernelProblem, Problem, Tiled
from tritile.core.settings import uses_aten
from tritile.errors import UnsupportedError, brief
from tritile.families import launching
from tritile.lab import baselines
from tritile.lab.tune import gpu_for, problem_of
from tritile.tune.subject import answers, operands, torch_calls
from tritile.tune.subject.answers import torch_fp32
from tritile.tune.suites import Case
from tritile.tuner.adoption import tuner_for
from tritile.tuner.arguments import check_grid, check_keywords, identity
from tritile.tuner.autotuner import Autotuner
from tritile.tuner.decorated import REFERENCE, shipped
from tritile.tuner.measure import timing

Log = Callable[[str], None]
Baselines = Mapping[str, baselines.Baseline]


@dataclass(frozen=True, repr=False)
class BenchResult(Tabular):
    """How long a call takes, compared with torch. It prints as a table.

    Attributes:
        problem: what is computed.
        device: the GPU.
        tritile_us: median microseconds on the GPU, measured in turns with torch, on operands that are not in
            the L2 cache.
        torch_us: the same for torch's fastest baseline, which `torch_call` names. For a decorated
            kernel, that of its reference, or None without one.
        spread: spread of tritile's times, as a share of their median.
        config: the config that ran.
        source: where the config comes from, as in `tritile.plan`.
        error: norm of the result's error relative to a float64 reference; None for a decorated kernel.
        torch_error: the same for torch's result.
        copy_gbps: the rate of a plain copy of as many bytes as a permutation moves, read and written.
        torch_calls: microseconds of each of torch's baselines, if there are several. `others_us` has
            further ones, and `triton_us` tritile's own kernel if a call runs torch's.
    """

    problem: Problem
    device: Device
    tritile_us: float
    torch_us: float | None
    spread: float
    error: float | None
    torch_error: float | None
    copy_gbps: float | None
    config: Config | triton.Config
    source: str
    torch_call: str = ""
    torch_calls: Mapping[str, float] = field(default_factory=dict)
    others_us: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    samples: int | None = None
    launches: int | None = None
    triton_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """torch's time divided by tritile's: above 1, tritile is faster; None if torch was not timed."""
        return None if self.torch_us is None else self.torch_us / self.tritile_us

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON; a config is as `Config.to_dict` has it, or its text."""
        config = self.config.to_dict() if isinstance(self.config, Config) else str(self.config)
        names = {"problem": self.problem.label, "device": self.device.name, "config": config}
        return vars(self) | names | {"ratio": self.ratio}

    @property
    def _rows(self) -> tuple[tuple[str, str], ...]:
        found = [("tritile", f"{self.tritile_us:.1f} us, spread {self.spread:.1%}")]
        if self.torch_us is not None:
            found.append(
                ("torch", f"{self.torch_us:.1f} us, {self.ratio:.2f} times as long: {self.torch_call}")
            )
        elif isinstance(self.problem, KernelProblem):
            found.append(("torch", "not timed, because the kernel has no reference="))
        if self.error is not None and self.torch_error is not None:
            found.append(("error", f"{self.error:.2g}, torch's {self.torch_error:.2g}"))
        if isinstance(self.problem, PermuteProblem):
            gbps = self.problem.bytes / self.tritile_us / 1e3
            share = f", {gbps / self.copy_gbps:.0%} of a copy's" if self.copy_gbps else ""
            found.append(("rate", f"{gbps:.0f} GB/s{share}"))
        elif not isinstance(self.problem, KernelProblem):
            found.append(("rate", f"{self.problem.flops / self.tritile_us / 1e6:.1f} TFLOP/s"))
        return (*found, ("config", str(self.config)), ("source", self.source))

    @property
    def _title(self) -> str:
        return f"{self.problem.label.strip()} on {self.device.name}"


def _graphs(
    problem: Tiled, calls: list[Call], others: Baselines, log: Log
) -> dict[str, tuple[timing.Graph, float]]:
    """Capture the baselines that run and are right, with the errors of their results; log the others."""
    graphs = {}
    for name, baseline in others.items():
        try:
            error = answers.check(baselines.into_out(baseline), calls[0], every=False)
            graphs[name] = baselines.graph_of(baseline, calls), error
        except Exception as error:  # a baseline that fails costs only its own numbers
            log(f"{problem.label}: not measured against {name}: {brief(error)}")
    return graphs


def measured(
    what: Case | Tiled, others: Callable[[Call], Baselines] | None = None, log: Log = warnings.warn
) -> BenchResult:
    """Time a call with the config that it would run, torch, and the baselines that `others` returns.

    torch's time is that of the fastest of `baselines.torch_baselines`. A baseline that fails or is wrong is
    left out and logged. Raises UnsupportedError if there is no GPU, and what the call would raise.
    """
    device = devices.current_gpu()
    if device is None:
        raise UnsupportedError("bench: there is no GPU here to measure")
    problem, load = (what.problem, what.load) if isinstance(what, Case) else (what, "skewed")
    chosen = pick.plan_for(problem, device, "cached", uses_aten())
    own = pick.plan_for(problem, device, "cached")
    assert chosen is not None and own is not None  # noqa: PT018
    calls = [operands.with_group_ends(call, load) for call in operands.copies_of(problem, device)]
    ours = operands.run_of(launching.prepare(calls[0], own.config))
    error = answers.check(ours, calls[0])
    graphs: dict[str, timing.Graph | timing.Eager] = {"triton": timing.Graph(ours, calls)}
    with torch_fp32("tf32" if getattr(problem, "precision", "") == "tf32" else "ieee"):
        # The plainest has to run.
        (plainest, baseline), *further = baselines.torch_baselines(calls[0]).items()
        operands.poison(calls[0])
        baselines.into_out(baseline)(calls[0])
        torch.cuda.synchronize()
        by_torch = {plainest: (baselines.graph_of(baseline, calls), answers.norm_error(calls[0]))}
        by_torch |= _graphs(problem, calls, dict(further), log)
        if chosen.config == aten.CONFIG:
            run = torch_calls.run_of(problem)
            assert run is not None  # what torch may make, it makes in one call
            graphs["aten"] = timing.Graph(run, calls)
        more = _graphs(problem, calls, others(calls[0]), log) if others else {}
    graphs |= {name: graph for name, (graph, _) in (by_torch | more).items()}
    if problem.op == "permute":
        # Some copies in a graph go to a slower copy engine; a short eager copy waits for its launch.
        copy = baselines.device_copy
        graphs |= {"copy": timing.Graph(copy, calls), "eager copy": timing.Eager(copy, calls)}
    samples = timing.interleaved(list(graphs.values()), budget_ms=50.0 * len(graphs))
    timings = {side: timing.timing_of(times) for side, times in zip(graphs, samples, strict=True)}
    us = {side: found.us for side, found in timings.items()}
    fastest = min(by_torch, key=us.__getitem__)
    backend = "aten" if "aten" in graphs else "triton"
    return BenchResult(
        problem,
        device,
        tritile_us=us[backend],
        triton_us=us["triton"],
        torch_us=us[fastest],
        spread=timings[backend].spread,
        spreads={"torch": timings[fastest].spread} | {name: timings[name].spread for name in more},
        samples=len(samples[0]),
        launches=len(calls),
        error=error,
        torch_error=by_torch[fastest][1],
        copy_gbps=problem.bytes / min(us["copy"], us["eager copy"]) / 1e3 if "copy" in us else None,
        config=chosen.config,
        source=chosen.source,
        torch_call=fastest,
        torch_calls={name: us[name] for name in by_torch} if len(by_torch) > 1 else {},
        others_us={name: us[name] for name in more},
    )


def _of_kernel(kernel: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BenchResult:
    """Time a decorated kernel with the config of a call, in a process of its own."""
    check_keywords(kernel.fn, kernel.space or kernel.configs, kwargs, ("grid",))
    device, _ = gpu_for("bench", (*args, *kwargs.values()))
    check_grid("bench", kwargs.get("grid"))
    plan = kernel.planned(args, kwargs, device)
    config = identity(plan.config)
    call = kernel.call(args, {"warmup": False} | kwargs, device)
    sides = [config] if kernel.reference is None else [config, REFERENCE]
    with shipped(replace(call, configs={config: plan.config})) as (runner, tunable):
        try:
            runner.begin(tunable)
            samples = runner.race(tunable, sides)
        finally:
            runner.end(tunable)
    own, *reference = map(timing.timing_of, samples)
    torch_us, name = (reference[0].us, "the kernel's reference") if reference else (None, "")
    return BenchResult(
        plan.problem, device, own.us, torch_us, own.spread, None, None, None, plan.config, plan.source, name
    )


def bench(what: Callable[..., Any] | str | Tiled | Autotuner, *args: Any, **kwargs: Any) -> BenchResult:
    """Time a call and torch's equivalent on the GPU, with the config that the call would run.

    Timing is that of `tritile bench`: in CUDA graphs, interleaved with each of torch's baselines, on random
    operands that are not in the L2 cache. The answer is checked. Nothing is tuned; `tritile.tune` does that.

    Args:
        what: an operation of tritile, or its name, followed by the arguments of the call, as in
            `tritile.plan`. Or a problem, without arguments. Or a kernel under `tritile.autotune` or Triton's,
            followed by its arguments and `grid=`; it is timed on copies of them, in turns with its
            `reference`.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        A `BenchResult`, which prints as a table.

    Raises:
        TritileError: the same errors as the call itself, for its arguments.
        UnsupportedError: there is no GPU here, a CUDA graph is being captured, or a decorated kernel cannot
            be sent to another process.
        TuningError: the answer is wrong, or the config does not run.
    """
    what = tuner_for(what)
    if isinstance(what, Autotuner):
        return _of_kernel(what, args, kwargs)
    problem = problem_of("bench", what, args, kwargs)
    _, gpu = gpu_for("bench", (*args, *kwargs.values()))
    with torch.cuda.device(gpu):
        return measured(problem, log=lambda text: warnings.warn(text, stacklevel=3))
