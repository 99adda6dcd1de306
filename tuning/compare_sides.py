"""Run both tuners on one kernel and problem: time tuning, its choice, and warm calls.

A side is "jit" (the bare kernel with its parameters given), "triton" or "tritile" (both with the same list
of configs), or "space" (tritile with the whole space).
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

import tritile
from authors import Subject
from tritile.core.config import Config
from tritile.tune.measure.timing import Graph, interleaved, timing_of

ALLOWED_ERROR = 2e-2  # |out - reference| / |reference|: twice the epsilon of bfloat16, and some
_FLUSHES = 3  # operands are rotated over this many times the L2 cache
Arguments = Mapping[str, Any]


def configs_for(side: str, subject: Subject) -> Any:
    """Return what a tuner chooses among: a list of configs, or a `tritile.Space`."""
    return tritile.Space(subject.parameters, subject.where) if side == "space" else subject.configs


def decorated(side: str, subject: Subject, configs: Any, **more: Any) -> Any:
    """Decorate the kernel with one of the tuners."""
    if side == "triton":
        return triton.autotune(configs, subject.key, **more)(subject.kernel)
    return tritile.autotune(configs, subject.key, reference=subject.reference, **more)(subject.kernel)


def bytes_of(given: Arguments) -> int:
    """Count the bytes of all tensors among the arguments."""
    return sum(v.numel() * v.element_size() for v in given.values() if isinstance(v, torch.Tensor))


def error_of(subject: Subject, given: Arguments) -> float:
    """Return the largest |out - reference| / |reference| of the outputs; infinite for a NaN."""
    errors = []
    for name, wanted in subject.reference(**given).items():
        error = (given[name].float() - wanted.float()).norm() / wanted.float().norm()
        errors.append(float(error.nan_to_num(nan=math.inf)))
    return max(errors)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tuned(
    side: str,
    subject: Subject,
    given: Arguments,
    clock: Callable[[], float] = time.perf_counter,
    **more: Any,
) -> dict[str, Any]:
    """Make the first call, which tunes, and return its seconds and choice.

    Returns {"seconds", "config", "error"}; `more` goes to the decorator. Raises RuntimeError where the
    tuned kernel's answer is wrong.
    """
    kernel = decorated(side, subject, configs_for(side, subject), **more)
    grid, values = subject.grid(**given), list(given.values())
    synchronize()
    start = clock()
    with tritile.mode("tune"):
        kernel[grid](*values)
    synchronize()
    seconds, error = clock() - start, error_of(subject, given)
    if not error <= ALLOWED_ERROR:
        raise RuntimeError(f"{side} chose {kernel.best_config}, whose relative error is {error:.3g}")
    return {
        "seconds": seconds,
        "config": Config.from_triton(kernel.best_config).to_dict(),
        "error": error,
    }


def rotated(given: Arguments, l2_bytes: int) -> list[dict[str, Any]]:
    """Return copies of a call, whose tensors together exceed three times the L2 cache."""
    count = max(1, math.ceil(_FLUSHES * l2_bytes / bytes_of(given)))
    clones = [
        {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
        for _ in range(count - 1)
    ]
    return [dict(given), *clones]


def timed(
    subject: Subject, given: Arguments, configs: Mapping[str, Config], l2_bytes: int
) -> dict[str, dict[str, float]]:
    """Time each side's config by turns, in CUDA graphs on cold operands: microseconds and spread."""
    calls = rotated(given, l2_bytes)

    def run_of(config: Config) -> Callable[[Any], None]:
        options = config.to_triton().all_kwargs()
        return lambda call: subject.kernel[subject.grid(**call)](*call.values(), **options)

    graphs = [Graph(run_of(config), calls) for config in configs.values()]
    samples = interleaved(graphs, budget_ms=150.0 * len(graphs))
    timings = [timing_of(times) for times in samples]
    return {
        side: {"us": timing.us, "spread": timing.spread}
        for side, timing in zip(configs, timings, strict=True)
    }


def warm_calls(subject: Subject, given: Arguments, **more: Any) -> dict[str, Callable[[], Any]]:
    """Return the same launch by the bare kernel and by both tuners, already tuned, as a program writes it."""
    configs, values = subject.configs[:2], list(given.values())
    grid = subject.grid(**given)
    calls: dict[str, Callable[[], Any]] = {}
    for side in ("triton", "tritile"):
        kernel = decorated(side, subject, configs, **more)
        with tritile.mode("tune"):
            kernel[grid](*values)
        calls[side] = lambda kernel=kernel: kernel[grid](*values)
    options = configs[0].kwargs | {"num_warps": configs[0].num_warps, "num_stages": configs[0].num_stages}
    return {"jit": lambda: subject.kernel[grid](*values, **options), **calls}


def host_us(
    calls: Mapping[str, Callable[[], Any]],
    launches: int = 100,
    rounds: int = 40,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median microseconds that the host spends on each call, by turns, `launches` at a time.

    The GPU must be faster than the host at these calls; each turn ends with a wait for it.
    """
    samples: dict[str, list[float]] = {side: [] for side in calls}
    for call in calls.values():
        call()
    for _, (side, call) in itertools.product(range(rounds), calls.items()):
        synchronize()
        start = clock()
        for _ in range(launches):
            call()
        samples[side].append(1e6 * (clock() - start) / launches)
    return {side: statistics.median(times) for side, times in samples.items()}
