"""Baselines of tritile: torch's calls and, on request, torch.compile's search.

A way to make a call's answer writes it into the call's output, or returns it.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from tritile.core import of_torch
from tritile.core.problem import FP8_DTYPES, Tiled
from tritile.core.views import UNFUSED, Call, GroupedCall, MatmulCall, PermuteCall
from tritile.lab.report import torch_ways as ways
from tritile.tune.measure import timing
from tritile.tune.subject import torch_calls
from tritile.tune.suites import Case

Way = Callable[[Any], torch.Tensor | None]
COMPILED: Final = "torch.compile"
SEARCHING: Final = "max-autotune-no-cudagraphs"  # every side is captured in a graph by the measurement
EVEN: Final = 32  # bytes: two words of a copy


def compiled(way: ways.Product, **options: Any) -> ways.Product:
    """Return what torch.compile makes of a way. The first call compiles."""

    @functools.cache
    def made() -> Callable[..., torch.Tensor]:
        torch.compiler.reset()  # kernels compiled for other cases count towards a limit
        return torch.compile(lambda **given: way.make(**given), dynamic=False, fullgraph=True, **options)

    return ways.Product(way.inputs, lambda **given: made()(**given))


def _of_matmul(call: MatmulCall) -> dict[str, Way]:
    if call.up is not None:
        one = ways.merged(call)
        by_compiler = {f"{COMPILED}, one product": compiled(one)}
        return {"two products": ways.fused(call), "one product": one, **by_compiler}
    fp8, bare = call.dtype in FP8_DTYPES, call.fused == UNFUSED and call.scales is None
    if call.scales is not None:
        name = ways.block_way(call)
    elif fp8:  # sums are kept where tritile keeps them
        name = f"_scaled_mm, use_fast_accum={call.precision == 'fast'}"
    else:
        name = "_int_mm" if call.dtype == "int8" else "matmul"
    found: dict[str, Way] = {name: torch_calls.multiply if bare else ways.fused(call)}
    if bare or call.scales is not None or fp8:
        return found
    one_call = ways.in_one_call(call)
    if one_call is not None:
        found["_addmm_activation"] = one_call
    return {**found, COMPILED: compiled(ways.fused(call))}


def torch_ways(what: Case | Tiled, call: Call) -> dict[str, Way]:
    """Return torch's ways to make a call's answer by name, the plainest first.

    The fastest of them is what tritile is compared with.
    """
    if isinstance(call, MatmulCall):
        return _of_matmul(call)
    if isinstance(call, PermuteCall):
        if isinstance(what, Case):
            return {"copy_": torch_calls.permute(what.dtype, what.shape, what.dims)}
        return {"copy_": torch_calls.copy}
    if isinstance(call, GroupedCall):
        fp8 = f"_scaled_grouped_mm, use_fast_accum={call.precision == 'fast'}"
        return {fp8 if call.dtype in FP8_DTYPES else "_grouped_mm": ways.in_general(call)}
    return dict(ways.of_weights(call))


def into_out(way: Way) -> Callable[[Call], None]:
    """Return a function that leaves the way's answer in the call's output."""

    def run(call: Call) -> None:
        answer = way(call)
        if answer is not None:
            ways.result(call).copy_(answer)

    return run


def graph_of(way: Way, calls: list[Any]) -> timing.Graph:
    """Capture a way over all calls. It runs on each of them first, which prepares their operands.

    What it returns is kept, so that each launch of the graph writes to cold memory.
    """
    for call in calls:
        way(call)
    made: list[torch.Tensor | None] = []
    return timing.Graph(lambda call: made.append(way(call)), calls)


def device_copy(call: PermuteCall) -> None:
    """Copy as many bytes in their order: the speed limit of a permutation.

    Copies of an odd number of 16-byte words are slower: up to 31 bytes are left out.
    """
    x, out = call.x.view(torch.uint8), call.out.view(torch.uint8)
    count = min(x.numel(), out.numel())
    count = count // EVEN * EVEN or count
    out[:count].copy_(x[:count])


def inductor(call: Call) -> Way:
    """Return a call by torch.compile in its max-autotune mode: products by kernels of cuBLAS and Triton.

    torch makes no CUDA graph of its own. The operands are those of torch's eager side. A gated product has
    both weights side by side. Products with packed weights are not taken.
    """
    of_torch.print_no_candidates()
    return compiled(ways.in_general(call), mode=SEARCHING)
