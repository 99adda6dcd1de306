"""tritile against torch on one case: both sides in one process, interleaved, on cold operands."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tritile import device as devices
from tritile import ladder, launch
from tritile.errors import UnsupportedError
from tritile.ops.matmul import matmul
from tritile.ops.transpose import transpose
from tritile.problem import FP8_DTYPES
from tritile.report.results import Measurement
from tritile.tune import measure
from tritile.tune.suites import Case
from tritile.views import Call, MatmulCall, TransposeCall


def _batched(call: MatmulCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = [measure.matrix(view, call.problem.batch) for view in (call.a, call.b, call.out)]
    if call.problem.batch == 1:
        tensors = [tensor[0] for tensor in tensors]
    return tensors[0], tensors[1], tensors[2]


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


@contextlib.contextmanager
def _torch_precision(precision: str) -> Iterator[None]:
    """torch's own fp32 setting, at what the case asks for: TF32 for tf32, IEEE for the others."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def torch_matmul(call: Call) -> None:
    """What a torch user would call for this product, into the same output."""
    assert isinstance(call, MatmulCall)
    a, b, out = _batched(call)
    if call.dtype == "int8":
        torch._int_mm(a, b, out=out)
    elif call.dtype in FP8_DTYPES:
        one = _one(a.device)
        torch._scaled_mm(a, b, one, one, out_dtype=out.dtype, out=out)
    else:
        torch.matmul(a, b, out=out)


def _planes(call: TransposeCall, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    def plane(view: Any) -> torch.Tensor:
        tensor = view.tensor.view(kind)
        strides = (*(view.batch_strides or (0,)), *view.strides)
        return tensor.as_strided((call.problem.batch, *view.shape), strides)

    return plane(call.x), plane(call.out)


def torch_transpose(dtype: str) -> Callable[[Call], None]:
    """torch's own copy into the transposed order, of elements of this dtype."""
    kind = getattr(torch, dtype)

    def run(call: Call) -> None:
        assert isinstance(call, TransposeCall)
        x, out = _planes(call, kind)
        out.copy_(x)

    return run


def device_copy(call: Call) -> None:
    """A plain copy of the same bytes in their order: the speed limit of a transposition."""
    assert isinstance(call, TransposeCall)
    call.out.tensor.copy_(call.x.tensor)


def _peer_error(case: Case, call: Call, run: Callable[[Call], None]) -> float:
    measure.poison(call.out)
    run(call)
    torch.cuda.synchronize()
    return measure.matmul_error(call) if isinstance(call, MatmulCall) else 0.0


def measured(case: Case) -> Measurement:
    """Time tritile and torch on a case, with the config that a call would use.

    Raises UnsupportedError where there is no GPU, and what a call would raise.
    """
    device = devices.current_gpu()
    if device is None:
        raise UnsupportedError("bench: there is no GPU here to measure")
    problem = case.problem
    chosen = ladder.plan_for(problem, device, "cached")
    assert chosen is not None
    calls = measure.copies_of(problem, device)
    ours = measure.run_of(launch.prepare(calls[0], chosen.config))
    is_matmul = isinstance(calls[0], MatmulCall)
    theirs = torch_matmul if is_matmul else torch_transpose(case.dtype)
    error = measure.check(ours, calls[0])
    with _torch_precision(case.precision):
        torch_error = _peer_error(case, calls[0], theirs)
        peer = measure.Graph(theirs, calls)
    sides: list[measure.Graph | measure.Eager] = [measure.Graph(ours, calls), peer]
    if not is_matmul:
        sides += [measure.Graph(device_copy, calls), measure.Eager(device_copy, calls)]
    samples = measure.interleaved(sides, budget_ms=100.0)
    timings = [measure.timing_of(times) for times in samples]
    # CUDA gives some copies in a graph to a slower engine, and a short one alone waits for its launch.
    copy_gbps = None if is_matmul else problem.bytes / min(timing.us for timing in timings[2:]) / 1e3
    return Measurement(
        timings[0].us,
        timings[1].us,
        None,
        timings[0].spread,
        error,
        torch_error,
        copy_gbps,
        chosen.config,
        chosen.source,
    )


def host_costs() -> list[tuple[str, float, float]]:
    """Host microseconds of a small call: its name, tritile's, torch's."""
    a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    return [
        ("matmul(a, b)", host_us(lambda: matmul(a, a)), host_us(lambda: torch.matmul(a, a))),
        ("transpose(x)", host_us(lambda: transpose(a)), host_us(lambda: a.mT.contiguous())),
    ]


def host_us(call: Callable[[], object], count: int = 2000) -> float:
    """Microseconds of host time that one call takes, over `count` calls the GPU never holds up."""
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
