"""Time tritile and its baselines, in one process, by turns, on cold operands; keep each result at once."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tritile.core import device as devices
from tritile.core import of_torch
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.core.problem.checks import THREE
from tritile.core.views import Call
from tritile.errors import UnsupportedError, brief
from tritile.lab.report import baselines, drawn
from tritile.lab.report.results import HOST, Measurement, Result, Tell, append, host_result, result
from tritile.ops.fused import addmm, baddbmm, linear
from tritile.ops.matmul import matmul
from tritile.ops.permute import permute, transpose
from tritile.ops.scaled import scaled_matmul
from tritile.planning import plans
from tritile.runtime import launch
from tritile.tune.measure import timing
from tritile.tune.subject import answers, operands
from tritile.tune.subject.elements import torch_fp32
from tritile.tune.suites import Case

Graphs = dict[str, tuple[timing.Graph, float]]  # with the error of the first answer
Act = Callable[[], object]


def _graphs(problem: Tiled, calls: list[Call], ways: Mapping[str, baselines.Way], tell: Tell) -> Graphs:
    """Capture the ways that run and answer rightly; `tell` is told of the others."""
    graphs = {}
    for name, way in ways.items():
        try:
            error = answers.check(baselines.into_out(way), calls[0], every=False)
            graphs[name] = baselines.graph_of(way, calls), error
        except Exception as error:  # a baseline that fails costs its own numbers alone
            tell(f"{problem.label}: not measured against {name}: {brief(error)}")
    return graphs


def _torch_graphs(what: Case | Tiled, calls: list[Call], tell: Tell) -> Graphs:
    """Capture torch's ways. The plainest must run, and its error is told; the others must answer rightly."""
    (name, plainest), *others = baselines.torch_ways(what, calls[0]).items()
    operands.poison(calls[0])
    baselines.into_out(plainest)(calls[0])
    torch.cuda.synchronize()
    error = answers.error_of(calls[0])
    found = {name: (baselines.graph_of(plainest, calls), error)}
    return found | _graphs(_problem(what), calls, dict(others), tell)


def _problem(what: Case | Tiled) -> Tiled:
    return what.problem if isinstance(what, Case) else what


def measured(what: Case | Tiled, inductor: bool = False, tell: Tell = warnings.warn) -> Measurement:
    """Time tritile, torch and, if asked, torch.compile's search on a case or problem, with a call's config.

    Torch is the fastest of its ways (`baselines.torch_ways`). A baseline that fails or answers wrongly is
    left out, and `tell` is called with the reason. Raises UnsupportedError where there is no GPU, and what a
    call would raise.
    """
    device = devices.current_gpu()
    if device is None:
        raise UnsupportedError("bench: there is no GPU here to measure")
    problem = _problem(what)
    load = what.load if isinstance(what, Case) else "skewed"
    chosen = plans.plan_for(problem, device, "cached")
    assert chosen is not None
    calls = [operands.shared(call, load) for call in operands.copies_of(problem, device)]
    ours = operands.run_of(launch.prepare(calls[0], chosen.config))
    error = answers.check(ours, calls[0])
    graphs: dict[str, timing.Graph | timing.Eager] = {"tritile": timing.Graph(ours, calls)}
    with torch_fp32("tf32" if getattr(problem, "precision", "").removesuffix(THREE) == "tf32" else "ieee"):
        ways = _torch_graphs(what, calls, tell)
        taken = inductor and problem.op != "linear_quantized"
        more = _graphs(problem, calls, {"inductor": baselines.inductor(calls[0])} if taken else {}, tell)
    graphs |= {name: graph for name, (graph, _) in (ways | more).items()}
    if problem.op == "permute":
        # Some copies in a graph go to a slower copy engine; a short eager copy waits for its launch.
        copy = baselines.device_copy
        graphs |= {"copy": timing.Graph(copy, calls), "eager copy": timing.Eager(copy, calls)}
    samples = timing.interleaved(list(graphs.values()), budget_ms=50.0 * len(graphs))
    timings = {side: timing.timing_of(times) for side, times in zip(graphs, samples, strict=True)}
    us = {side: found.us for side, found in timings.items()}
    fastest = min(ways, key=us.__getitem__)
    return Measurement(
        tritile_us=us["tritile"],
        torch_us=us[fastest],
        inductor_us=us.get("inductor"),
        spread=timings["tritile"].spread,
        spreads={"torch": timings[fastest].spread} | {name: timings[name].spread for name in more},
        samples=len(samples[0]),
        launches=len(calls),
        error=error,
        torch_error=ways[fastest][1],
        copy_gbps=problem.bytes / min(us["copy"], us["eager copy"]) / 1e3 if "copy" in us else None,
        config=chosen.config,
        plan_source=chosen.source,
        torch_call=fastest,
        torch_calls={way: us[way] for way in ways} if len(ways) > 1 else {},
    )


def _host_calls() -> list[tuple[str, Act, Act]]:
    """Return small calls, whose results are new tensors or go to one: the name, tritile's and torch's."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    a, b, out = (torch.randn(256, 256, **options) for _ in range(3))
    bias, batch = torch.randn(256, **options), torch.randn(4, 256, 256, **options)
    dims, turned = (2, 0, 1), torch.empty_like(batch.permute(2, 0, 1)).contiguous()
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
        ("permute(x, dims, out=)", lambda: permute(batch, dims, out=turned),
         lambda: turned.copy_(batch.permute(dims))),
    ]  # fmt: skip
    if torch.cuda.get_device_capability() >= (8, 9):
        x, one = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
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
    """Run a benchmark, and hold its results and how many cases failed.

    If there is a folder, each result is appended at once to its suite's file there. `tell` is told what went
    wrong, `done` the name of each finished case.
    """

    folder: Path | None
    tell: Tell
    done: Tell
    lines: list[Result] = field(default_factory=list)
    failed: int = 0

    def cases(self, cases: Iterable[Case], env: Mapping[str, str], inductor: bool = False) -> None:
        """Measure every case. Raises OSError if a file cannot be written."""
        for case in cases:
            try:
                self.lines.append(result(case, measured(case, inductor, self.tell), env))
                if self.folder is not None:
                    append(self.folder / f"{case.suite}.jsonl", self.lines[-1:])
            except OSError:
                raise
            except Exception as error:  # a case that raises, in torch too, costs itself alone
                self.failed += 1
                self.tell(f"{case.problem.label}: {brief(error)}")
            torch.cuda.empty_cache()  # torch does not give one case's graph memory to another
            self.done(case.problem.label)

    def drawn(
        self, cases: Sequence[Case], searched: int, device: Device, env: Mapping[str, str], inductor: bool
    ) -> None:
        """Measure drawn cases with nothing remembered and every kernel compiled before.

        The first `searched` aligned products are compared with torch.compile's max-autotune in any case.
        """
        first = drawn.aligned(cases)[:searched]
        with drawn.nothing_remembered():
            drawn.compile_all(cases, device)
            self.cases(first, env, True)
            self.cases([case for case in cases if case not in first], env, inductor)


def run_host(env: Mapping[str, str], folder: Path | None) -> list[Result]:
    """Time how long small calls keep the host busy, and append that to host.jsonl in `folder`, if given."""
    lines = []
    for name, ours, theirs in _host_calls():
        our_us, their_us = host_us(ours, theirs)
        lines.append(host_result(name, our_us, their_us, env))
    if folder is not None:
        append(folder / f"{HOST}.jsonl", lines)
    return lines
