"""Time tritile against torch and other baselines: `tritile.bench`, and the suites of `tritile bench`.

All backends of a case run in one process, in turns, in CUDA graphs, on operands that are not in the L2 cache.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tritile.core import device as devices
from tritile.core import of_torch
from tritile.core.call import Call
from tritile.core.device import Device
from tritile.core.markup import Tabular
from tritile.core.problem import KernelProblem, Problem, Tiled
from tritile.core.settings import uses_aten
from tritile.errors import UnsupportedError, brief
from tritile.families import launching
from tritile.lab import baselines, drawn
from tritile.lab.results import HOST, Log, Measurement, Result, append, host_result, result
from tritile.lab.tune import gpu_for, problem_of
from tritile.ops.fused import addmm, baddbmm, linear
from tritile.ops.matmul import matmul
from tritile.ops.permute import permute, transpose
from tritile.ops.scaled import scaled_matmul
from tritile.planning import aten, plans
from tritile.tune.arguments import check_grid, check_keywords, identity
from tritile.tune.autotuner import Autotuner
from tritile.tune.decorated import REFERENCE, elsewhere
from tritile.tune.measure import timing
from tritile.tune.subject import answers, operands, torch_calls
from tritile.tune.subject.answers import torch_fp32
from tritile.tune.suites import Case

Act = Callable[[], object]


def _graphs(
    problem: Tiled, calls: list[Call], ways: Mapping[str, baselines.Way], log: Log
) -> dict[str, tuple[timing.Graph, float]]:
    """Capture the ways that run and answer rightly, with the errors of their answers; log the others."""
    graphs = {}
    for name, way in ways.items():
        try:
            error = answers.check(baselines.into_out(way), calls[0], every=False)
            graphs[name] = baselines.graph_of(way, calls), error
        except Exception as error:  # a baseline that fails costs its own numbers alone
            log(f"{problem.label}: not measured against {name}: {brief(error)}")
    return graphs


def measured(what: Case | Tiled, inductor: bool = False, log: Log = warnings.warn) -> Measurement:
    """Time tritile, torch and, if `inductor`, torch.compile's search, with the config of a call.

    torch's time is that of the fastest of its ways (`baselines.torch_ways`). A baseline that fails or answers
    wrongly is left out and logged. Raises UnsupportedError if there is no GPU, and what the call would raise.
    """
    device = devices.current_gpu()
    if device is None:
        raise UnsupportedError("bench: there is no GPU here to measure")
    problem, load = (what.problem, what.load) if isinstance(what, Case) else (what, "skewed")
    chosen = plans.plan_for(problem, device, "cached", uses_aten())
    own = plans.plan_for(problem, device, "cached")
    assert chosen is not None and own is not None  # noqa: PT018
    calls = [operands.shared(call, load) for call in operands.copies_of(problem, device)]
    ours = operands.run_of(launching.prepare(calls[0], own.config))
    error = answers.check(ours, calls[0])
    graphs: dict[str, timing.Graph | timing.Eager] = {"triton": timing.Graph(ours, calls)}
    with torch_fp32("tf32" if getattr(problem, "precision", "") == "tf32" else "ieee"):
        (plainest, way), *others = baselines.torch_ways(calls[0]).items()  # the plainest has to run
        operands.poison(calls[0])
        baselines.into_out(way)(calls[0])
        torch.cuda.synchronize()
        ways = {plainest: (baselines.graph_of(way, calls), answers.error_of(calls[0]))}
        ways |= _graphs(problem, calls, dict(others), log)
        if chosen.config == aten.CONFIG:
            run = torch_calls.run_of(problem)
            assert run is not None  # what torch may make, it makes in one call
            graphs["aten"] = timing.Graph(run, calls)
        searched = inductor and problem.op != "linear_quantized"
        more = _graphs(problem, calls, {"inductor": baselines.inductor(calls[0])} if searched else {}, log)
    graphs |= {name: graph for name, (graph, _) in (ways | more).items()}
    if problem.op == "permute":
        # Some copies in a graph go to a slower copy engine; a short eager copy waits for its launch.
        copy = baselines.device_copy
        graphs |= {"copy": timing.Graph(copy, calls), "eager copy": timing.Eager(copy, calls)}
    samples = timing.interleaved(list(graphs.values()), budget_ms=50.0 * len(graphs))
    timings = {side: timing.timing_of(times) for side, times in zip(graphs, samples, strict=True)}
    us = {side: found.us for side, found in timings.items()}
    fastest = min(ways, key=us.__getitem__)
    backend = "aten" if "aten" in graphs else "triton"
    return Measurement(
        tritile_us=us[backend],
        triton_us=us["triton"],
        torch_us=us[fastest],
        inductor_us=us.get("inductor"),
        spread=timings[backend].spread,
        spreads={"torch": timings[fastest].spread} | {name: timings[name].spread for name in more},
        samples=len(samples[0]),
        launches=len(calls),
        error=error,
        torch_error=ways[fastest][1],
        copy_gbps=problem.bytes / min(us["copy"], us["eager copy"]) / 1e3 if "copy" in us else None,
        config=chosen.config,
        source=chosen.source,
        torch_call=fastest,
        torch_calls={way: us[way] for way in ways} if len(ways) > 1 else {},
    )


def _host_calls() -> list[tuple[str, Act, Act]]:
    """Return small calls, whose results are new tensors or go to one: the name, tritile's and torch's."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    a, b, out = (torch.randn(256, 256, **options) for _ in range(3))
    bias, batch = torch.randn(256, **options), torch.randn(4, 256, 256, **options)
    dims, into = (2, 0, 1), torch.empty_like(batch.permute(2, 0, 1)).contiguous()
    found: list[tuple[str, Act, Act]] = [
        ("matmul(a, b)", lambda: matmul(a, b), lambda: torch.matmul(a, b)),
        ("linear(x, w, bias)", lambda: linear(a, b, bias), lambda: F.linear(a, b, bias)),
        ("addmm(c, a, b)", lambda: addmm(bias, a, b), lambda: torch.addmm(bias, a, b)),
        ("baddbmm(c, a, b)", lambda: baddbmm(batch, batch, batch),
         lambda: torch.baddbmm(batch, batch, batch)),
        ("matmul(a, b, out=)", lambda: matmul(a, b, out=out), lambda: torch.matmul(a, b, out=out)),
        ("addmm(c, a, b, out=)", lambda: addmm(bias, a, b, out=out),
         lambda: torch.addmm(bias, a, b, out=out)),
        ("linear(x, w, bias, out=)", lambda: linear(a, b, bias, out=out),
         lambda: torch.addmm(bias, a, b.t(), out=out)),
        ("transpose(x)", lambda: transpose(a), lambda: a.mT.contiguous()),
        ("transpose(x, out=)", lambda: transpose(a, out=out), lambda: out.copy_(a.mT)),
        ("permute(x, dims)", lambda: permute(batch, dims), lambda: batch.permute(dims).contiguous()),
        ("permute(x, dims, out=)", lambda: permute(batch, dims, out=into),
         lambda: into.copy_(batch.permute(dims))),
    ]  # fmt: skip
    if torch.cuda.get_device_capability() >= (8, 9):
        x, one = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda", dtype=torch.float32)
        by_torch = partial(of_torch.scaled_mm, x, x.t(), one, one, out_dtype=torch.bfloat16)
        found.append(("scaled_matmul(a, b, s, s)", partial(scaled_matmul, x, x.t(), one, one), by_torch))
    return found


def host_us(*calls: Act, batches: int = 200, size: int = 20) -> list[float]:
    """Return the microseconds that each call keeps the host busy: medians of batches, by turns.

    The GPU is waited for before each batch, so that no launch waits for room in the queue.
    """
    for call in calls:
        for _ in range(20):
            call()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(batches):
        for call, times in zip(calls, found, strict=True):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(size):
                call()
            times.append((time.perf_counter() - started) / size * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(times) for times in found]


@dataclass
class Run:
    """A benchmark: its results, and how many cases failed.

    Each result is appended at once to its suite's file in `folder`, if given. `log` gets what went wrong,
    `done` the name of each finished case.
    """

    folder: Path | None
    log: Log
    done: Log
    lines: list[Result] = field(default_factory=list)
    failed: int = 0

    def cases(self, cases: Iterable[Case], env: Mapping[str, str], inductor: bool = False) -> None:
        """Measure every case. Raises OSError if a file cannot be written."""
        for case in cases:
            try:
                self.lines.append(result(case, measured(case, inductor, self.log), env))
                if self.folder is not None:
                    append(self.folder / f"{case.suite}.jsonl", self.lines[-1:])
            except OSError:
                raise
            except Exception as error:  # a case that raises, in torch too, costs itself alone
                self.failed += 1
                self.log(f"{case.problem.label}: {brief(error)}")
            torch.cuda.empty_cache()  # torch does not give one case's graph memory to another
            self.done(case.problem.label)

    def drawn(self, cases: Sequence[Case], device: Device, env: Mapping[str, str], inductor: bool) -> None:
        """Measure drawn cases with nothing remembered and every kernel compiled before.

        With `inductor`, the first `SEARCHED` aligned products are compared with torch.compile's max-autotune.
        """
        first = drawn.aligned(cases)[: drawn.SEARCHED] if inductor else []
        with drawn.nothing_remembered():
            drawn.compile_all(cases, device)
            self.cases(first, env, True)
            self.cases([case for case in cases if case not in first], env, False)

    def host(self, env: Mapping[str, str]) -> list[Result]:
        """Time how long small calls keep the host busy."""
        lines = []
        for name, *sides in _host_calls():
            ours, theirs = host_us(*sides)
            lines.append(host_result(name, ours, theirs, env))
        if self.folder is not None:
            append(self.folder / f"{HOST}.jsonl", lines)
        return lines


@dataclass(frozen=True, repr=False)
class BenchResult(Tabular, Measurement):
    """How long a call takes, compared with torch. It prints as a table.

    Attributes:
        problem: what is computed.
        device: the GPU.
        tritile_us: median microseconds on the GPU, measured in turns with torch, on operands that are not in
            the L2 cache.
        torch_us: the same for the fastest of torch's ways to the result, which `torch_call` names. For a
            decorated kernel, that of its reference, or None without one.
        spread: spread of tritile's times, as a share of their median.
        config: the config that ran.
        source: where the config comes from, as in `tritile.plan`.
        error: norm of the result's error relative to a float64 reference; None for a decorated kernel.
        torch_error: the same for torch's result.
    """

    problem: Problem = field(kw_only=True)
    device: Device = field(kw_only=True)

    @property
    def ratio(self) -> float | None:
        """torch's time divided by tritile's: above 1, tritile is faster; None if torch was not timed."""
        return None if self.torch_us is None else self.torch_us / self.tritile_us

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
        return (*found, ("config", str(self.config)), ("source", self.source))

    @property
    def _title(self) -> str:
        return f"{self.problem.label.strip()} on {self.device.name}"


def _of_kernel(kernel: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BenchResult:
    """Time a decorated kernel with the config of a call, in a process of its own."""
    check_keywords(kernel.fn, kernel.space or kernel.configs, kwargs, ("grid",))
    device, _ = gpu_for("bench", (*args, *kwargs.values()))
    check_grid("bench", kwargs.get("grid"))
    plan = kernel.planned(args, kwargs, device)
    config = identity(plan.config)
    call = kernel.call(args, {"warmup": False} | kwargs, device)
    with elsewhere(replace(call, configs={config: plan.config})) as (shop, subject):
        try:
            shop.begin(subject)
            samples = shop.race(subject, [config, *[REFERENCE] * (kernel.reference is not None)])
        finally:
            shop.end(subject)
    own, *referred = map(timing.timing_of, samples)
    torch_us, way = (referred[0].us, "the kernel's reference") if referred else (None, "")
    return BenchResult(
        own.us, torch_us, None, own.spread, None, None, None, plan.config, plan.source, way,
        problem=plan.problem, device=device,
    )  # fmt: skip


def bench(what: Callable[..., Any] | str | Tiled | Autotuner, *args: Any, **kwargs: Any) -> BenchResult:
    """Time a call and torch's equivalent on the GPU, with the config that the call would run.

    Timing is that of `tritile bench`: in CUDA graphs, in turns with each of torch's ways, on random operands
    that are not in the L2 cache. The answer is checked. Nothing is tuned; `tritile.tune` does that.

    Args:
        what: an operation of tritile, or its name, followed by the arguments of the call, as in
            `tritile.plan`. Or a problem, without arguments. Or a kernel decorated with `tritile.autotune`,
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
    if isinstance(what, Autotuner):
        return _of_kernel(what, args, kwargs)
    problem = problem_of("bench", what, args, kwargs)
    device, gpu = gpu_for("bench", (*args, *kwargs.values()))
    with torch.cuda.device(gpu):
        found = measured(problem, log=lambda text: warnings.warn(text, stacklevel=2))
    return BenchResult(**vars(found), problem=problem, device=device)
