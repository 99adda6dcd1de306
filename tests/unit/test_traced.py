"""Kernels under tritile.autotune inside torch.compile: which config the tracer is given.

The tracers are torch's own: Dynamo, make_fx and that of an operator. What they made of a kernel is read from
the graph. Inductor's own code runs with a driver that records launches.
"""

import copy
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import wrap_triton
from triton.runtime.autotuner import Heuristics

import tritile
from tests.unit.test_like_triton import of_blocks
from tritile.core.config import Config
from tritile.core.device import HOST
from tritile.core.versions import parsed
from tritile.errors import DeviceError, UntunedWarning
from tritile.tuner import adoption
from tritile.tuner.autotuner import Autotuner
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import store_of
from tritile.tuner.traced import indices_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning"),
    pytest.mark.filterwarnings("ignore::tritile.errors.HostWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]
BLOCKS = (16, 32, 64)
SIZE = 64
BEFORE_2_13 = parsed(torch.__version__) < (2, 13)


@pytest.fixture(autouse=True)
def _traced(monkeypatch):
    """Have torch take Triton's kernels for such, which it does where there is a GPU; forget its graphs."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda **_: True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Traces:
    """A backend that notes what kernels came into a graph; `run` has the graph executed, too."""

    def __init__(self, run=False):
        self.run, self.found = run, []

    def note(self, graph):
        for node in graph.graph.nodes:
            if "kernel_idx" in node.kwargs:
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
                self.found.append(
                    SimpleNamespace(
                        configs=[config.all_kwargs() for config in kernel.configs],
                        blocks=[config.kwargs["BLOCK"] for config in kernel.configs],
                        restored=(kernel.restore_value, kernel.reset_to_zero),
                        args={*node.kwargs["kwargs"], *constants},
                        grids=len(node.kwargs["grid"]),
                    )
                )

    def __call__(self, graph, inputs):
        self.note(graph)
        return graph if self.run else lambda *args: (torch.empty(0),)

    @property
    def blocks(self):
        """Of each kernel, in the order in which calls were compiled."""
        return [each.blocks for each in self.found]


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
    tl.store(out + at, tl.load(x + at, mask=at < n) * (0.5 if EVEN else 1.0), mask=at < n)


@triton.jit
def biased(x, out, n, bias, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + (0 if bias is None else bias), mask=at < n)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def launch(kernel, x, out, n):
    kernel[grid](x, out, n)


def of(fn=plain, key=("n",), configs=None, above=lambda kernel: kernel, **rest):
    """Return a function that decorates a kernel with the `autotune` it takes."""
    configs = configs or of_blocks(*BLOCKS)
    return lambda autotune: above(autotune(configs, list(key), **rest)(fn))


def remember(kernel, n, fastest, *more):
    """Put a time of each config into the store, as a measurement of this call does."""
    problem = kernel.problem((torch.zeros(n), torch.zeros(n), n, *more), {})
    listed = kernel.space.opening(9) if kernel.space else [Config.from_triton(c) for c in kernel.configs]
    for config in listed:
        us = 1.0 + abs(config["BLOCK"] - fastest)
        store_of(HOST).add(kernel.digest, Trial(problem, config, us))


def tuner_of(kernel):
    """Return tritile's tuner of a kernel; None where Triton tunes it."""
    kernel = kernel.fn if isinstance(kernel, Heuristics) else kernel
    return kernel if isinstance(kernel, Autotuner) else adoption.tuner_of(kernel)


def measured(known, more=(), **how):
    """Return a kernel of which is remembered what is fastest at these sizes, and which measures nothing."""
    kernel = of(**how, do_bench=lambda *_: pytest.fail("it was measured"))(tritile.autotune)
    for n, fastest in known.items():
        remember(kernel, n, fastest, *more)
    return kernel


def calling(kernel, call=launch):
    def called(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        call(kernel, x, out, x.shape[0])
        return out

    return called


@pytest.fixture
def traces():
    return Traces()


@pytest.fixture
def compiled(traces):
    """Return a function of a size that calls a kernel inside torch.compile."""

    def compiled(kernel, call=launch, dynamic=False):
        function = torch.compile(calling(kernel, call), backend=traces, fullgraph=True, dynamic=dynamic)
        return lambda n, dtype=torch.float32: function(torch.zeros(n, dtype=dtype))

    return compiled


def untuned(call, *sizes):
    """Call with sizes, and return what is said of problems that were never measured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in sizes:
            call(n)
    return [str(w.message) for w in caught if w.category is UntunedWarning]


def above_n(configs, named_args, **kwargs):
    yield from (config for config in configs if config.kwargs["BLOCK"] > named_args["n"])


def dividing(configs, named_args, **kwargs):
    return [config for config in configs if named_args["n"] % config.kwargs["BLOCK"] == 0]


ABOVE_N, DIVIDING = {"early_config_prune": above_n}, {"early_config_prune": dividing}
LARGEST = {"perf_model": lambda BLOCK, **rest: -BLOCK, "top_k": 2}
# How a kernel is pruned, what is fastest at which remembered sizes, the sizes of calls in a mode, and the
# BLOCKs that each compile was given.
TRACED = {
    "remembered": ({}, {10: 64, 12: 32, 15: 16}, "cached", (10, 12, 15, 12, 10), [[64], [32], [16]]),
    "neighbours": ({}, {8: 64, 60: 32}, "cached", (9, 55), [[64], [32]]),
    "left to torch, which times": ({}, {8: 64, 60: 32}, "tune", (57,), [[16, 32, 64]]),
    "off": ({}, {12: 32}, "off", (12,), [[16]]),
    "strict": ({}, {12: 32}, "strict", (12,), [[32]]),
    "remembered, and left by the pruning": (ABOVE_N, {12: 16}, "tune", (12,), [[16]]),
    "a forbidden neighbour": (DIVIDING, {64: 64}, "cached", (64, 48), [[64], [16]]),
    "pruned": (ABOVE_N, {}, "off", (20,), [[32]]),
    "pruned and modelled": (ABOVE_N | LARGEST, {}, "off", (20,), [[64]]),
}


@pytest.mark.parametrize("name", TRACED)
def test_tracer_gets_outside_work(name, compiled, traces):
    how, known, mode, sizes, blocks = TRACED[name]
    with tritile.mode(mode):
        said = untuned(compiled(measured(known, prune_configs_by=how)), *sizes)
    assert traces.blocks == blocks
    assert not (said and mode == "cached")


def test_unremembered_refused_or_said_once(compiled, traces):
    refused = "NotTunedError: mode is strict and nothing measured is remembered"
    with pytest.raises(RuntimeError, match=refused):
        compiled(measured({12: 32}, mode="strict"))(60)  # in torch's own clothes
    call = compiled(measured({12: 32}, mode="cached"))
    (said,) = untuned(lambda n: call(n, torch.float16), 12, 12)
    assert "plain n=12" in said
    assert "outside of torch.compile" in said
    assert traces.blocks == [[16]]


def test_open_sizes_left_to_torch(compiled, traces):
    """All that is remembered at any size."""
    call = compiled(measured({64: 16, 256: 64}), dynamic=True)
    with tritile.mode("cached"):
        for n in (100, 70, 3000, 1):
            call(n)
    assert traces.blocks[:1] == [[16, 64]]
    assert all(blocks in ([16], [16, 64]) for blocks in traces.blocks[1:])  # of the size 1 torch knows
    assert len(traces.blocks) <= 2


def test_declared_bounds_not_narrowed(traces):
    call = torch.compile(calling(measured({64: 16})), backend=traces, fullgraph=True)
    for n in (2, 100, 3000):
        x = torch.zeros(n)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
        call(x)
    assert traces.blocks == [[16]]


def test_size_only_gpu_knows(compiled, traces):
    def call(kernel, x, out, n):
        kernel[(1,)](x, out, x.sum().to(torch.int32).item())

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled(measured({12: 32}), call)(12)
    assert traces.blocks == [[32]]


@pytest.mark.parametrize("value", [2.5, torch.ones(3), None, torch.float16], ids=str)
def test_keys_that_are_no_sizes(value, compiled, traces):
    kernel = measured({12: 64}, more=(value,), fn=biased, key=("n", "bias"))
    compiled(kernel, lambda kernel, x, out, n: kernel[grid](x, out, n, value))(12)
    assert traces.blocks == [[64]]


def test_hidden_code_left_to_torch(monkeypatch):
    """Tensor descriptors are hidden from a pruning."""
    kernel, cpu, gpu = measured({12: 32}), torch.device("cpu"), torch.device("cuda", 0)
    x, out = ("x", torch.float32, cpu), ("out", torch.float32, cpu)
    with pytest.warns(UntunedWarning, match="hides from its pruning"):
        assert indices_of(kernel, (out,), {"n": 12}, (), ("x", "BLOCK")) is None
    assert indices_of(kernel, (x, out), {"n": 12}, (), ("BLOCK",)) == (1,)

    def no_gpu(index):
        raise DeviceError("no GPU 0")

    monkeypatch.setattr("tritile.core.device.gpu", no_gpu)
    assert indices_of(kernel, (("x", torch.float32, gpu),), {"n": 12}, ()) is None


def test_remembered_space_config_traced(compiled, traces):
    space = tritile.Space({"BLOCK": BLOCKS})
    for known in ({10: 64, 12: 32}, {}):  # the second as a new process has it
        call = compiled(measured(known, configs=space))
        for n in (10, 12, 10):
            call(n)
    assert traces.blocks == [[64], [32]] * 2
    compiled(measured({}, configs=tritile.Space({"BLOCK": (16, 32)})))(10)
    assert traces.blocks[4:] == [[32]]  # without the best of another, the next


def test_copy_has_own_configs(compiled, traces):
    kernel = measured({12: 16})
    other = copy.copy(kernel)
    other.configs, other.mode = of_blocks(32, 64), "off"
    compiled(other)(12)
    compiled(kernel)(12)
    assert traces.blocks == [[32], [16]]


# --- As torch traces Triton's: what it makes of `triton.autotune`'s, it makes of tritile's ---


def by_name(kernel, x, out, n):
    kernel[(4,)](n=n, out=out, x=x)


def thrice(kernel, x, out, n):
    kernel[grid](x, out, n, SCALE=3)


def without_bias(kernel, x, out, n):
    kernel[grid](x, out, n, None)


def amid(configs, named, **kwargs):
    return [config for config in configs if 16 < config.kwargs["BLOCK"] <= named["n"]]


below = triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
above = triton.heuristics({"EVEN": lambda named: named["n"] % 2 == 0})
AMID = {"early_config_prune": amid}
# What decorates a kernel, how it is called, the BLOCKs that torch sees of Triton's.
USES = {
    "plain": (of(), launch, BLOCKS),
    "by name, and a fixed grid": (of(), by_name, BLOCKS),
    "one config": (of(configs=of_blocks(16)), launch, (16,)),
    "default of a constant in the key": (of(scaled, key=("n", "SCALE")), launch, BLOCKS),
    "constant by name": (of(scaled), thrice, BLOCKS),
    "none": (of(biased), without_bias, BLOCKS),
    "heuristics below": (of(below(halved)), launch, BLOCKS),
    "heuristics above": (of(halved, above=above), launch, BLOCKS),
    "pruned": (of(prune_configs_by=AMID), launch, (32, 64)),
    "modelled": (of(prune_configs_by=LARGEST), launch, (64, 32)),
    "pruned and modelled": (of(prune_configs_by=LARGEST | AMID), launch, (32, 64)),
    "restored": (of(restore_value=["out"]), launch, BLOCKS),
    "reset": (of(reset_to_zero=["out"]), launch, BLOCKS),
}


class Wrapped:
    """A kernel that another tracer than Dynamo sees."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return wrap_triton(self.kernel)[grid]


def by_dynamo(kernel, call, dynamic=None):
    traces = Traces()
    function = torch.compile(calling(kernel, call), backend=traces, fullgraph=True, dynamic=dynamic)
    function(torch.zeros(SIZE))
    return traces.found


def by_dynamo_of_any_size(kernel, call):
    return by_dynamo(kernel, call, dynamic=True)


def by_make_fx(kernel, call):
    traces = Traces()
    graph = make_fx(calling(Wrapped(kernel), call), tracing_mode="fake")(torch.zeros(SIZE))
    assert [node.name for node in graph.graph.nodes if node.name.startswith("empty")] == ["empty_like"]
    traces.note(graph)
    graph(torch.zeros(SIZE))
    return traces.found


_numbers = itertools.count()


def in_an_operator(kernel, call):
    traces, name = Traces(run=True), f"tritile_tests::traced_{next(_numbers)}"
    operator = torch.library.triton_op(name, calling(Wrapped(kernel), call), mutates_args=())
    operator(torch.zeros(SIZE))
    backend = aot_autograd(fw_compiler=traces)
    torch.compile(lambda x: operator(x), backend=backend, fullgraph=True)(torch.zeros(SIZE))
    return traces.found


WAYS = [by_dynamo, by_make_fx, in_an_operator]
# Every use by every way under tritile's decorator, and by Dynamo under all three.
TRACED_USES = [
    (who, use, way)
    for who in ("triton", "tritile", "adopted")
    for use in USES
    for way in WAYS
    if who == "tritile" or way is by_dynamo or use == "plain"
]


@pytest.fixture
def on_gpu(gpu):
    gpu.get_benchmarker = lambda: lambda call, quantiles=None: (call(), [1.0] * 3)[1]
    return gpu


@pytest.mark.parametrize(("autotune", "use", "way"), TRACED_USES, indirect=["autotune"])
def test_uses_that_torch_traces(autotune, use, way, on_gpu):
    """Of Triton's kernels torch sees all configs; of tritile's the remembered one, here the last."""
    decorate, call, blocks = USES[use]
    kernel = decorate(autotune)
    if len(blocks) > 1 and tuner_of(kernel) is not None:
        remember(tuner_of(kernel), SIZE, blocks[-1])
        blocks = blocks if use == "heuristics below" and BEFORE_2_13 else blocks[-1:]
    if use == "heuristics above" and way is not by_dynamo:  # torch wraps what is under Triton's autotuner
        with pytest.raises(RuntimeError, match="wrap_triton only works"):
            way(kernel, call)
        return
    (found,) = way(kernel, call)
    assert (found.blocks, found.grids) == (list(blocks), len(blocks))
    assert {"x", "out", "n"} <= found.args
    if use == "heuristics below" and not BEFORE_2_13:  # which are asked of the config that is remembered
        assert all(config["EVEN"] for config in found.configs)


@pytest.mark.parametrize("what", ["restore_value", "reset_to_zero"])
@pytest.mark.parametrize("way", [*WAYS, by_dynamo_of_any_size])
def test_torch_restores_before_timing(autotune, way, what, on_gpu):
    kernel = of(**{what: ["out"]})(autotune)
    if tuner_of(kernel) is not None and way not in WAYS:  # where sizes may change, all that is remembered
        remember(tuner_of(kernel), SIZE, 32)
        remember(tuner_of(kernel), 2 * SIZE, 64)
    (found,) = way(kernel, launch)
    assert len(found.blocks) == 1 or ["out"] in found.restored


def test_untraceable_heuristics_said_once(compiled, traces, monkeypatch):
    monkeypatch.setattr("tritile.tuner.traced.parsed", lambda version: (2, 11))
    (said,) = untuned(compiled(measured({SIZE: 32}, fn=below(halved))), SIZE, 2 * SIZE)
    assert "heuristics" in said
    assert traces.blocks == [list(BLOCKS)] * 2


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


@pytest.mark.slow
@pytest.mark.skipif(BEFORE_2_13, reason="a later torch's Inductor")
@pytest.mark.parametrize(
    ("autotune", "use"),
    [
        *(("tritile", use) for use in ("constant by name", "pruned", "restored")),
        *((who, use) for who in ("triton", "tritile", "adopted") for use in ("plain", "heuristics above")),
    ],
    indirect=["autotune"],
)
def test_inductors_code_launches(autotune, on_gpu, inductor, use):
    decorate, call, blocks = USES[use]
    compiled = torch.compile(calling(decorate(autotune), call), fullgraph=True, dynamic=False)
    for _ in range(2):
        compiled(torch.zeros(SIZE))
    first, again = on_gpu.launches[-2:]
    assert first.args["BLOCK"] == again.args["BLOCK"] == blocks[0]
    assert first.args["n"] == SIZE
    assert first.grid[0] == triton.cdiv(SIZE, blocks[0])
