"""Time tritile and its baselines on one case: all in one process, by turns, on cold operands."""

import math
import time
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from tritile.core import device as devices
from tritile.core import of_torch
from tritile.core.problem.checks import THREE
from tritile.core.views import Call
from tritile.errors import UnsupportedError, brief
from tritile.lab.report import baselines
from tritile.lab.report.results import Measurement
from tritile.ops.fused import addmm, linear
from tritile.ops.matmul import matmul
from tritile.ops.permute import transpose
from tritile.ops.scaled import scaled_matmul
from tritile.planning import plans
from tritile.runtime import launch
from tritile.tune.measure import timing
from tritile.tune.subject import answers, operands
from tritile.tune.subject.elements import torch_fp32
from tritile.tune.suites import Case


def _torch_error(call: Call, run: timing.Run) -> float:
    operands.poison(call)
    run(call)
    torch.cuda.synchronize()
    return answers.error_of(call)


def _baseline_graphs(
    case: Case, calls: list[Call], names: Iterable[str], tell: Callable[[str], None]
) -> dict[str, timing.Graph]:
    """Capture the baselines that take the case and answer rightly; `tell` is told of those that fail."""
    graphs = {}
    for name in names:
        try:
            graph = baselines.baseline_graph(name, calls)
        except Exception as error:  # a baseline that fails costs its own numbers alone
            tell(f"{case.problem.label}: not measured against {name}: {brief(error)}")
            continue
        if graph is not None:
            graphs[name] = graph
    return graphs


def measured(
    case: Case, names: Iterable[str] = (), tell: Callable[[str], None] = warnings.warn
) -> Measurement:
    """Time tritile, torch and the named baselines on a case, with the config that a call would use.

    A baseline that fails or answers wrongly is left out, and `tell` is called with the reason.
    Raises UnsupportedError where there is no GPU, and what a call would raise.
    """
    device = devices.current_gpu()
    if device is None:
        raise UnsupportedError("bench: there is no GPU here to measure")
    problem = case.problem
    chosen = plans.plan_for(problem, device, "cached")
    assert chosen is not None
    calls = [operands.shared(call, case.load) for call in operands.copies_of(problem, device)]
    ours = operands.run_of(launch.prepare(calls[0], chosen.config))
    is_copy, theirs = case.op == "permute", baselines.torch_side(case)
    baselines.ready(calls)
    error = answers.check(ours, calls[0])
    sides: dict[str, timing.Graph | timing.Eager] = {"tritile": timing.Graph(ours, calls)}
    with torch_fp32("tf32" if case.precision.removesuffix(THREE) == "tf32" else "ieee"):
        torch_error = _torch_error(calls[0], theirs)
        for call in calls if baselines.torch_call(calls[0]) else ():
            theirs(call)  # the first run prepares the operands
        sides["torch"] = timing.Graph(baselines.torch_timed(case), calls)
        sides |= _baseline_graphs(case, calls, names, tell)
    if is_copy:
        # Some copies in a graph go to a slower copy engine; a short eager copy waits for its launch.
        copy = baselines.device_copy
        sides |= {"copy": timing.Graph(copy, calls), "eager copy": timing.Eager(copy, calls)}
    samples = timing.interleaved(list(sides.values()), budget_ms=50.0 * len(sides))
    timings = {side: timing.timing_of(times) for side, times in zip(sides, samples, strict=True)}
    us = {side: timing.us for side, timing in timings.items()}
    copy_gbps = problem.bytes / min(us["copy"], us["eager copy"]) / 1e3 if is_copy else None
    return Measurement(
        tritile_us=us["tritile"],
        torch_us=us["torch"],
        inductor_us=us.get("inductor"),
        tutorial_us=us.get("tutorial"),
        spread=timings["tritile"].spread,
        error=error,
        torch_error=torch_error,
        copy_gbps=copy_gbps,
        config=chosen.config,
        plan_source=chosen.source,
        torch_call=baselines.torch_call(calls[0]),
    )


def host_costs() -> list[tuple[str, float, float]]:
    """Time how long small calls keep the host busy: name, tritile's and torch's microseconds of each."""
    a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(256, device="cuda", dtype=torch.bfloat16)
    calls: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("matmul(a, b)", lambda: matmul(a, a), lambda: torch.matmul(a, a)),
        ("transpose(x)", lambda: transpose(a), lambda: a.mT.contiguous()),
        ("linear(x, w, bias)", lambda: linear(a, a, bias), lambda: F.linear(a, a, bias)),
        ("addmm(c, a, b)", lambda: addmm(bias, a, a), lambda: torch.addmm(bias, a, a)),
    ]
    if torch.cuda.get_device_capability() >= (8, 9):
        x, one = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        kind = torch.bfloat16
        calls.append(
            (
                "scaled_matmul(a, b, s, s)",
                lambda: scaled_matmul(x, x.t(), one, one),
                lambda: of_torch.scaled_mm(x, x.t(), one, one, out_dtype=kind),
            )
        )
    return [(name, host_us(ours), host_us(theirs)) for name, ours, theirs in calls]


def host_us(call: Callable[[], object], count: int = 2000) -> float:
    """Return the microseconds that one call keeps the host busy, the best of five times `count` / 5 calls."""
    for _ in range(20):
        call()
    best = math.inf
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count // 5):
            call()
        best = min(best, (time.perf_counter() - started) / (count // 5))
    torch.cuda.synchronize()
    return best * 1e6
