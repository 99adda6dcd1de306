"""Decorated kernels as torch traces them: what it makes of `triton.autotune`'s, it makes of tritile's.

Kernels are traced by Dynamo, by make_fx and within an operator, and what came into the graph is read there.
Inductor's own code runs with a driver that records launches. Of tritile's kernels Dynamo sees one config
where it sees all of Triton's.
"""

import functools
import itertools

import pytest
import torch
import triton
import triton.language as tl
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton

import tritile
from tests.unit.test_like_triton import of_blocks
from tests.unit.test_traced import Traces, remember
from tritile.core.versions import parsed

pytestmark = [
    pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::tritile.errors.HostWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]
BLOCKS = (16, 32, 64)
SIZE = 64


@pytest.fixture(autouse=True)
def _traced(monkeypatch, gpu):
    """Have torch take Triton's kernels for such, which it does where there is a GPU; forget its graphs."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda **_: True)
    gpu.get_benchmarker = lambda: lambda call, quantiles=None: (call(), [1.0] * 3)[1]
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@triton.jit
def plain(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def scaled(x, out, n, BLOCK: tl.constexpr, SCALE: tl.constexpr = 2):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * SCALE, mask=at < n)


@triton.jit
def halved(x, out, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + at, tl.load(x + at, mask=at < n) * 0.5, mask=at < n)
    else:
        tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def optional(x, out, bias, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if bias is not None:
        value += tl.load(bias)
    tl.store(out + at, value, mask=at < n)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def launch(kernel, x, out, n):
    kernel[grid](x, out, n)


def by_name(kernel, x, out, n):
    kernel[grid](n=n, out=out, x=x)


def fixed_grid(kernel, x, out, n):
    kernel[(4,)](x, out, n)


def thrice(kernel, x, out, n):
    kernel[grid](x, out, n, SCALE=3)


def without_bias(kernel, x, out, n):
    kernel[grid](x, out, None, n)


def amid(configs, named, **kwargs):
    return [config for config in configs if 16 < config.kwargs["BLOCK"] <= named["n"]]


def even_blocks(named):
    return named["n"] % named["BLOCK"] == 0


def even_sizes(named):
    return named["n"] % 2 == 0


def of(fn=plain, key=("n",), configs=None, above=None, **rest):
    """Return a function that decorates a kernel with the `autotune` it takes."""

    def decorate(autotune):
        kernel = autotune(of_blocks(*BLOCKS) if configs is None else configs, list(key), **rest)(fn)
        return kernel if above is None else above(kernel)

    return decorate


below, above = triton.heuristics({"EVEN": even_blocks}), triton.heuristics({"EVEN": even_sizes})
TWO = {"perf_model": lambda BLOCK, **rest: -BLOCK, "top_k": 2}
# What decorates a kernel, how it is called, the BLOCKs that torch sees of Triton's.
USES = {
    "plain": (of(), launch, BLOCKS),
    "by name": (of(), by_name, BLOCKS),
    "one config": (of(configs=of_blocks(16)), launch, (16,)),
    "fixed grid": (of(), fixed_grid, BLOCKS),
    "default of a constant in the key": (of(scaled, key=("n", "SCALE")), launch, BLOCKS),
    "constant by name": (of(scaled), thrice, BLOCKS),
    "heuristics below": (of(below(halved)), launch, BLOCKS),
    "heuristics above": (of(halved, above=above), launch, BLOCKS),
    "pruned": (of(prune_configs_by={"early_config_prune": amid}), launch, (32, 64)),
    "modelled": (of(prune_configs_by=TWO), launch, (64, 32)),
    "pruned and modelled": (of(prune_configs_by=TWO | {"early_config_prune": amid}), launch, (32, 64)),
    "restored": (of(restore_value=["out"]), launch, BLOCKS),
    "reset": (of(reset_to_zero=["out"]), launch, BLOCKS),
    "none": (of(optional), without_bias, BLOCKS),
}


def calling(kernel, call):
    def called(x):
        out = torch.empty_like(x)
        call(kernel, x, out, x.shape[0])
        return out

    return called


class Wrapped:
    """A kernel that another tracer than Dynamo sees."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return wrap_triton(self.kernel)[grid]


def by_dynamo(kernel, call, **options):
    traces = Traces()
    torch.compile(calling(kernel, call), backend=traces, fullgraph=True, **options)(torch.zeros(SIZE))
    return traces.found


def by_make_fx(kernel, call):
    traces = Traces()
    graph = make_fx(calling(Wrapped(kernel), call), tracing_mode="fake")(torch.zeros(SIZE))
    traces.note(graph)
    graph(torch.zeros(SIZE))
    return traces.found


_numbers = itertools.count()


def in_an_operator(kernel, call):
    def called(x: torch.Tensor) -> torch.Tensor:
        return calling(Wrapped(kernel), call)(x)

    traces = Traces(run=True)
    operator = torch.library.triton_op(f"tritile_tests::traced_{next(_numbers)}", called, mutates_args=())
    operator(torch.zeros(SIZE))
    backend = aot_autograd(fw_compiler=traces)
    torch.compile(lambda x: operator(x), backend=backend, fullgraph=True)(torch.zeros(SIZE))
    return traces.found


WAYS = [by_dynamo, by_make_fx, in_an_operator]
UNWRAPPED = "heuristics above"  # torch wraps kernels under Triton's autotuner, not under its heuristics


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("use", USES)
def test_uses_that_torch_traces(autotune, use, way):
    decorate, call, blocks = USES[use]
    kernel = decorate(autotune)
    if use.startswith(UNWRAPPED) and way in (by_make_fx, in_an_operator):
        with pytest.raises(RuntimeError, match="wrap_triton only works"):
            way(kernel, call)
        return
    (found,) = way(kernel, call)
    assert found.grids == len(found.blocks)
    assert {"x", "out", "n"} <= found.args
    if autotune is triton.autotune:
        assert found.blocks == list(blocks)
    else:
        assert found.blocks
        assert set(found.blocks) <= set(blocks)


@pytest.mark.parametrize("what", ["restore_value", "reset_to_zero"])
@pytest.mark.parametrize(
    "way",
    [*WAYS, functools.partial(by_dynamo, dynamic=True)],
    ids=["dynamo", "make_fx", "operator", "dynamic"],
)
def test_torch_times_no_configs_without_restoring_tensors(autotune, way, what):
    kernel = of(**{what: ["out"]})(autotune)
    if autotune is tritile.autotune and way not in WAYS:  # where sizes may change, all that is remembered
        for n, fastest in ((SIZE, 32), (2 * SIZE, 64)):
            remember(kernel, (torch.zeros(n), torch.zeros(n), n), fastest)
    (found,) = way(kernel, launch)
    assert len(found.blocks) == 1 or ["out"] in found.restored


@pytest.fixture
def inductor(monkeypatch, tmp_path):
    """Have Inductor compile kernels on host tensors for the stand-in."""
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(triton_heuristics, "GPUTarget", lambda *_: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton_heuristics.CachingAutotuner, "bench", lambda *args, **rest: 1.0)
    monkeypatch.setattr(triton_helpers, "set_driver_to_cpu", lambda: None)
    with torch._inductor.config.patch(compile_threads=1, force_disable_caches=True):
        yield


LAUNCHED = ["plain", "constant by name", "heuristics above", "pruned", "restored"]


@pytest.mark.skipif(parsed(torch.__version__) < (2, 13), reason="a later torch's Inductor")
@pytest.mark.parametrize("use", LAUNCHED)
def test_inductors_code_launches(autotune, gpu, inductor, use):
    decorate, call, blocks = USES[use]
    compiled = torch.compile(calling(decorate(autotune), call), fullgraph=True, dynamic=False)
    for _ in range(2):
        compiled(torch.zeros(SIZE))
    first, again = gpu.launches[-2:]
    assert first.args["BLOCK"] == again.args["BLOCK"] == blocks[0]
    assert first.args["n"] == SIZE
    assert first.grid[0] == triton.cdiv(SIZE, blocks[0])
