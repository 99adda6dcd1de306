"""Timing and checking launches on the GPU.

A launch is timed in a CUDA graph that runs it over as many copies of its operands as exceed the L2
cache three times, so that each run finds a cold cache and no time passes between launches.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritile.device import Device
from tritile.errors import TuningError
from tritile.problem import ITEMSIZE, MatmulProblem, PermuteProblem
from tritile.views import Call, MatmulCall, PermuteCall, View, posed

_MAX_COPIES = 400
_CHECKED_ROWS = 256
Run = Callable[[Call], None]


@dataclass(frozen=True)
class Timing:
    """Median microseconds of one launch, and the distance of the 20th and 80th percentiles over it."""

    us: float
    spread: float


def timing_of(samples: Sequence[float]) -> Timing:
    """The Timing of several measured times, in microseconds."""
    ordered = sorted(samples)
    low, high = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
    median = statistics.median(ordered)
    return Timing(median, (high - low) / median)


def random_elements(dtype: str, elements: int) -> torch.Tensor:
    """Fresh random data: normal for floating types, the whole range for whole numbers."""
    kind = getattr(torch, dtype)
    if kind.is_floating_point and ITEMSIZE.get(dtype) != 1:
        return torch.randn(elements, dtype=kind, device="cuda")
    if kind.is_floating_point:
        return torch.randn(elements, device="cuda", dtype=torch.bfloat16).to(kind)
    info = torch.iinfo(kind)
    low, high = max(info.min, -(2**62)), min(info.max, 2**62)
    return torch.randint(low, high, (elements,), dtype=kind, device="cuda")


def copies_of(problem: MatmulProblem | PermuteProblem, device: Device) -> list[Call]:
    """Calls that pose `problem` on random operands of their own, together over three times the L2 cache."""
    count = min(_MAX_COPIES, max(1, math.ceil(3 * device.l2_bytes / problem.bytes)))
    pools: list[tuple[torch.Tensor, int]] = []

    def take(turn: int) -> Callable[[str, int], torch.Tensor]:
        place = iter(range(8))

        def make(dtype: str, elements: int) -> torch.Tensor:
            operand = next(place)
            padded = -(-elements // 256) * 256
            if turn == 0:
                pools.append((random_elements(dtype, padded * count), padded))
            pool, step = pools[operand]
            return pool[turn * step : turn * step + elements]

        return make

    return [posed(problem, take(turn)) for turn in range(count)]


def matrix(view: View, batch: int) -> torch.Tensor:
    """The view as a (batch, rows, columns) tensor, for elements of up to 8 bytes."""
    strides = (*(view.batch_strides or (0,)), *view.strides)
    return view.tensor.as_strided((batch, *view.shape), strides)


def _replayed_us(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(1e3 * start.elapsed_time(end))


class Graph:
    """A CUDA graph that runs something over several calls, one after the other."""

    def __init__(self, run: Run, calls: Sequence[Call]) -> None:
        self.launches = len(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(calls[0])  # loads modules and workspaces, which a capture may not
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                run(call)

    def time_us(self) -> float:
        """Microseconds of one launch, the mean over one replay."""
        return _replayed_us(self._graph.replay) / self.launches


class Eager:
    """The same without a graph: launches one after the other, as a program would make them."""

    def __init__(self, run: Run, calls: Sequence[Call]) -> None:
        self.launches = len(calls)
        self._run, self._calls = run, calls

    def time_us(self) -> float:
        """Microseconds of one launch, the mean over all calls."""
        return _replayed_us(lambda: [self._run(call) for call in self._calls]) / self.launches


def screen_us(graph: Graph) -> Timing:
    """A quick look: a few replays, fewer of long ones."""
    first = graph.time_us()
    repeats = 2 if first * graph.launches > 20_000 else 4
    return timing_of([graph.time_us() for _ in range(repeats)])


def interleaved(
    graphs: Sequence[Graph | Eager], budget_ms: float = 60.0, most: int = 40
) -> list[list[float]]:
    """Microseconds of each graph's launch, A B A B ..., so that clocks and heat touch all alike."""
    once_ms = sum(graph.time_us() * graph.launches for graph in graphs) / 1e3
    rounds = max(5, min(most, int(budget_ms / max(once_ms, 1e-3))))
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, times in zip(graphs, samples, strict=True):
            times.append(graph.time_us())
    return samples


def poison(call: Call) -> None:
    """Overwrite the output's memory with NaN, or -1 for whole numbers, so that gaps show."""
    out = call.tensors[-1]
    out.fill_(float("nan") if out.is_floating_point() else -1)


def _sampled(rows: int) -> torch.Tensor:
    return torch.linspace(0, rows - 1, min(rows, _CHECKED_ROWS), device="cuda").round().long()


def matmul_error(call: MatmulCall) -> float:
    """|out - a b| / |a b| over up to 256 rows, by a float64 product; infinite where out has a NaN."""
    batch = call.problem.batch
    a, b, out = (matrix(view, batch) for view in (call.a, call.b, call.out))
    if out.is_floating_point() and not bool(torch.isfinite(out.sum(dtype=torch.float32))):
        return math.inf
    rows, worst, norm = _sampled(call.a.shape[0]), 0.0, 0.0
    for i in range(0, batch, max(1, batch // 8)):
        wanted = a[i][rows].double() @ b[i].double()
        worst += float((out[i][rows].double() - wanted).square().sum())
        norm += float(wanted.square().sum())
    return math.sqrt(worst / norm) if norm else float(worst > 0)


def allowed_error(call: MatmulCall) -> float:
    """How large `matmul_error` may be: rounding of the result, and of K terms summed in fp32.

    Rounding to the output type errs by half its epsilon at the most; a running sum of K fp32 products
    by about sqrt(K) of its own, twice that for the truncating adders of tensor cores. TF32 keeps 11
    bits of each input, cut and not rounded.
    """
    rounding = {"float64": 1e-16, "float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3, "int32": 0.0}
    k = call.a.shape[1]
    summing = {"float64": 1e-16, "int8": 0.0}.get(call.dtype, 1e-7) * math.sqrt(k) * 4
    inputs = 2e-3 if call.precision == "tf32" and call.dtype == "float32" else 0.0
    return rounding[call.out_dtype] + summing + inputs


def check(run: Run, call: Call) -> float:
    """Run on a poisoned output and return the relative error. Raises TuningError for a wrong answer."""
    poison(call)
    run(call)
    torch.cuda.synchronize()
    if isinstance(call, MatmulCall):
        error, allowed = matmul_error(call), allowed_error(call)
        if not error <= allowed:
            raise TuningError(f"wrong answer: relative error {error:.3g}, above {allowed:.3g}")
        return error
    check_permuted(call)
    return 0.0


def check_permuted(call: PermuteCall) -> None:
    """Raises TuningError where out is not x, bit for bit."""
    x, out = permuted(call)
    if not torch.equal(x, out):
        raise TuningError("wrong answer: elements differ")


def permuted(call: PermuteCall) -> tuple[torch.Tensor, torch.Tensor]:
    """x and out over the same index space, in words; the last dimension counts those of an element."""
    problem = call.problem
    lanes = 2 if problem.itemsize == 16 else 1
    x, out = (
        tensor.as_strided((*problem.shape, lanes), (*(lanes * step for step in strides), 1))
        for tensor, strides in ((call.x, problem.x_strides), (call.out, problem.out_strides))
    )
    return x, out


def run_of(launch: Any) -> Run:
    """What runs a prepared launch on any call that poses the same problem."""
    return lambda call: launch(*call.tensors)
