"""Kernels under tritile.autotune inside torch.compile: which config the tracer is given.

The tracers are torch's own: Dynamo, make_fx and that of an operator. What they made of a kernel is read from
the graph. Inductor's own code runs with a driver that records launches.
"""

import copy
import functools
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

import tritile
from tests.unit.test_autotune import Bench, configs, softmax, tuned
from tests.unit.test_like_triton import of_blocks
from tritile.core.config import Config
from tritile.core.device import HOST
from tritile.core.versions import parsed
from tritile.errors import DeviceError, UntunedWarning
from tritile.planning.store import store_of
from tritile.planning.trial import Trial
from tritile.tune.traced import indices_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::tritile.errors.HostWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]
ROWS = 4
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


@pytest.fixture
def traces():
    return Traces()


def softmax_of(kernel, n=None, extra=()):
    """Return a function that calls a kernel with the softmax's arguments."""

    def call(x, used, *more):
        out = torch.empty_like(x)
        kernel[(x.shape[0],)](x, out, used, n(*more) if n else x.shape[1], *extra)
        return out

    return call


def compiled(kernel, traces, extra=(), **options):
    function = torch.compile(softmax_of(kernel, extra=extra), backend=traces, fullgraph=True, **options)
    return lambda n, dtype=torch.float32: function(
        torch.zeros(ROWS, n, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    )


def of_space(*blocks):
    return tritile.autotune(tritile.Space({"BLOCK": blocks}), ["N"], do_bench=Bench())(softmax)


def remember(kernel, args, fastest):
    """Put a time of each config into the store, as a measurement of this call does."""
    problem = kernel.problem(args, {})
    listed = kernel.space.opening(9) if kernel.space else [Config.from_triton(c) for c in kernel.configs]
    for config in listed:
        us = 1.0 + abs(config["BLOCK"] - fastest)
        store_of(HOST).add(kernel.digest, Trial(problem, config, us))


def measured(known, kernel=None, extra=(), **more):
    """Return a kernel, by default the softmax, of which is remembered what is fastest at these sizes."""
    kernel = kernel or tuned(Bench(), **more)
    for n, fastest in known.items():
        x = torch.zeros(ROWS, n)
        remember(kernel, (x, x, torch.zeros(1, dtype=torch.int32), n, *extra), fastest)
    return kernel


def untuned(call):
    """Call, and return what is said of problems that were never measured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if w.category is UntunedWarning]


def above_n(configs, named_args, **kwargs):
    yield from (config for config in configs if config.kwargs["BLOCK"] > named_args["N"])


def dividing(configs, named_args, **kwargs):
    return [config for config in configs if named_args["N"] % config.kwargs["BLOCK"] == 0]


def pruned(early, **more):
    return {"prune_configs_by": {"early_config_prune": early, **more}}


# How a kernel is decorated, what is fastest at which remembered sizes, the sizes of calls in a mode, and the
# BLOCKs that each compile was given.
TRACED = {
    "remembered": ({}, {40: 256, 50: 128, 60: 64}, "cached", (40, 50, 60, 50, 40), [[256], [128], [64]]),
    "neighbours": ({}, {8: 256, 60: 128}, "cached", (9, 55), [[256], [128]]),
    "left to torch, which times": ({}, {8: 256, 60: 128}, "tune", (57,), [[64, 128, 256]]),
    "off": ({}, {50: 128}, "off", (50,), [[64]]),
    "strict": ({}, {50: 128}, "strict", (50,), [[128]]),
    "remembered, and left by the pruning": (pruned(above_n), {50: 64}, "tune", (50,), [[64]]),
    "a forbidden neighbour": (pruned(dividing), {256: 256}, "cached", (256, 192), [[256], [64]]),
    "pruned": (pruned(above_n), {}, "off", (100,), [[128]]),
    "pruned and modelled": (
        pruned(above_n, perf_model=lambda BLOCK, **rest: -BLOCK, top_k=0.5), {}, "off", (100,), [[256]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACED)
def test_the_tracer_is_given_what_runs_outside_of_it(name, traces):
    how, known, mode, sizes, blocks = TRACED[name]
    call = compiled(measured(known, **how), traces, dynamic=False)
    with tritile.mode(mode):
        said = untuned(lambda: [call(n) for n in sizes])
    assert traces.blocks == blocks
    assert not (said and mode == "cached")


def test_what_is_not_remembered_is_refused_where_strict_and_else_said_once(traces):
    call = compiled(measured({50: 128}, mode="strict"), traces, dynamic=False)
    refused = "NotTunedError: mode is strict and nothing measured is remembered"
    with pytest.raises(RuntimeError, match=refused):
        call(60)  # in torch's own clothes
    call = compiled(measured({}, mode="cached"), traces, dynamic=False)
    (said,) = untuned(lambda: [call(50, torch.float16) for _ in range(2)])
    assert "softmax N=50" in said
    assert "outside of torch.compile" in said
    assert traces.blocks == [[64]]


def test_where_sizes_may_change_all_that_is_remembered_of_any_size_is_left_to_torch(traces):
    call = compiled(measured({64: 64, 256: 256}), traces, dynamic=True)
    with tritile.mode("cached"):
        for n in (100, 70, 3000, 1):
            call(n)
    assert traces.blocks[:1] == [[64, 256]]
    assert all(blocks in ([64], [64, 256]) for blocks in traces.blocks[1:])  # of the size 1 torch knows
    assert len(traces.blocks) <= 2


def test_a_size_within_declared_bounds_is_not_narrowed(traces):
    call = torch.compile(softmax_of(measured({64: 64})), backend=traces, fullgraph=True)
    for n in (2, 100, 3000):
        x = torch.zeros(ROWS, n)
        torch._dynamo.mark_dynamic(x, 1, min=2, max=4096)
        call(x, torch.zeros(1, dtype=torch.int32))
    assert traces.blocks == [[64]]


def test_a_size_that_only_the_gpu_knows(traces):
    call = softmax_of(measured({50: 128}), n=torch.Tensor.item)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        arguments = torch.zeros(ROWS, 50), torch.zeros(1, dtype=torch.int32), torch.tensor(50)
        torch.compile(call, backend=traces, fullgraph=True)(*arguments)
    assert traces.blocks == [[128]]


@triton.jit
def keyed(x_ptr, out_ptr, used_ptr, N, EXTRA, BLOCK: tl.constexpr):
    tl.store(used_ptr, BLOCK)


@pytest.mark.parametrize("value", [2.5, torch.ones(3), None, torch.float16], ids=str)
def test_keys_that_are_no_sizes(value, traces):
    kernel = measured({50: 256}, extra=(value,), kernel=tuned(Bench(), kernel=keyed, key=("N", "EXTRA")))
    compiled(kernel, traces, extra=(value,), dynamic=False)(50)
    assert traces.blocks == [[256]]


def test_what_torch_hides_or_only_another_machine_has_is_left_to_torch(monkeypatch):
    """Tensor descriptors are hidden from a pruning."""
    kernel, cpu = measured({50: 128}), torch.device("cpu")
    tensors = (("out_ptr", torch.float32, cpu), ("used_ptr", torch.int32, cpu))
    with pytest.warns(UntunedWarning, match="hides from its pruning"):
        assert indices_of(kernel, tensors, {"N": 50}, (), ("x_ptr", "BLOCK")) is None
    whole = (("x_ptr", torch.float32, cpu), *tensors)
    assert indices_of(kernel, whole, {"N": 50}, (), ("BLOCK",)) == (1,)

    def no_gpu(index):
        raise DeviceError("no GPU 0")

    monkeypatch.setattr("tritile.core.device.gpu", no_gpu)
    on_gpu = (("x_ptr", torch.float32, torch.device("cuda", 0)),)
    assert indices_of(kernel, on_gpu, {"N": 50}, ()) is None


def test_a_spaces_remembered_config_is_among_those_the_tracer_sees(traces):
    kernel = measured({40: 256, 50: 128}, kernel=of_space(64, 128, 256))
    for one in (kernel, of_space(64, 128, 256)):  # as a new process has it
        call = compiled(one, traces, dynamic=False)
        for n in (40, 50, 40):
            call(n)
    assert traces.blocks == [[256], [128]] * 2
    measured({50: 256}, kernel=of_space(64, 128, 256))
    compiled(of_space(64, 128), traces)(50)  # one without the best of another takes the next
    assert traces.blocks[4:] == [[128]]


def test_a_copy_has_configs_of_its_own(traces):
    kernel = measured({50: 64})
    other = copy.copy(kernel)
    other.configs, other.mode = configs(128, 256), "off"
    compiled(other, traces)(50)
    compiled(kernel, traces)(50)
    assert traces.blocks == [[128], [64]]


# --- As torch traces Triton's: what it makes of `triton.autotune`'s, it makes of tritile's ---

BLOCKS = (16, 32, 64)
SIZE = 64


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
def biased(x, out, bias, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + (0 if bias is None else tl.load(bias)), mask=at < n)


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


def of(fn=plain, key=("n",), blocks=BLOCKS, above=lambda kernel: kernel, **rest):
    """Return a function that decorates a kernel with the `autotune` it takes."""
    return lambda autotune: above(autotune(of_blocks(*blocks), list(key), **rest)(fn))


below = triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
above = triton.heuristics({"EVEN": lambda named: named["n"] % 2 == 0})
TWO = {"perf_model": lambda BLOCK, **rest: -BLOCK, "top_k": 2}
# What decorates a kernel, how it is called, the BLOCKs that torch sees of Triton's.
USES = {
    "plain": (of(), launch, BLOCKS),
    "by name": (of(), by_name, BLOCKS),
    "one config": (of(blocks=(16,)), launch, (16,)),
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
    "none": (of(biased), without_bias, BLOCKS),
}


def calling(kernel, call):
    def called(x: torch.Tensor) -> torch.Tensor:
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


@pytest.fixture
def on_gpu(gpu):
    gpu.get_benchmarker = lambda: lambda call, quantiles=None: (call(), [1.0] * 3)[1]
    return gpu


@pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("use", USES)
def test_uses_that_torch_traces(autotune, use, way, on_gpu):
    """Of Triton's kernels torch sees all configs; of tritile's the remembered one, here the last."""
    decorate, call, blocks = USES[use]
    kernel, x = decorate(autotune), torch.zeros(SIZE)
    if autotune is tritile.autotune:
        tuner = kernel.fn if use == "heuristics above" else kernel
        remember(tuner, (x, x, None, SIZE) if use == "none" else (x, x, SIZE), blocks[-1])
        blocks = blocks if use == "heuristics below" and BEFORE_2_13 else blocks[-1:]
    if use == "heuristics above" and way is not by_dynamo:  # torch wraps what is under Triton's autotuner
        with pytest.raises(RuntimeError, match="wrap_triton only works"):
            way(kernel, call)
        return
    (found,) = way(kernel, call)
    assert (found.blocks, found.grids) == (list(blocks), len(blocks))
    assert {"x", "out", "n"} <= found.args


@pytest.mark.parametrize("what", ["restore_value", "reset_to_zero"])
@pytest.mark.parametrize(
    "way",
    [*WAYS, functools.partial(by_dynamo, dynamic=True)],
    ids=["dynamo", "make_fx", "operator", "dynamic"],
)
@pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")
def test_torch_times_no_configs_without_restoring_tensors(autotune, way, what, on_gpu):
    kernel = of(**{what: ["out"]})(autotune)
    if autotune is tritile.autotune and way not in WAYS:  # where sizes may change, all that is remembered
        for n, fastest in ((SIZE, 32), (2 * SIZE, 64)):
            remember(kernel, (torch.zeros(n), torch.zeros(n), n), fastest)
    (found,) = way(kernel, launch)
    assert len(found.blocks) == 1 or ["out"] in found.restored


@pytest.fixture
def with_heuristics():
    kernel = of(below(halved))(tritile.autotune)
    remember(kernel, (torch.zeros(SIZE), torch.zeros(SIZE), SIZE), 32)
    return kernel


@pytest.mark.skipif(BEFORE_2_13, reason="a later torch's tracer")
def test_heuristics_count_for_the_config_that_is_remembered(with_heuristics):
    (found,) = by_dynamo(with_heuristics, launch)
    (config,) = found.configs
    assert (config["BLOCK"], config["EVEN"]) == (32, True)


def test_where_the_tracer_cannot_follow_heuristics_it_is_said_once(with_heuristics, monkeypatch):
    monkeypatch.setattr("tritile.tune.traced.parsed", lambda version: (2, 11))
    found = []
    (said,) = untuned(lambda: [found.extend(by_dynamo(with_heuristics, launch)) for _ in range(2)])
    assert "heuristics" in said
    assert [each.blocks for each in found] == [list(BLOCKS)] * 2


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


@pytest.mark.skipif(BEFORE_2_13, reason="a later torch's Inductor")
@pytest.mark.filterwarnings("ignore::tritile.errors.UntunedWarning")
@pytest.mark.parametrize("use", ["plain", "constant by name", "heuristics above", "pruned", "restored"])
def test_inductors_code_launches(autotune, on_gpu, inductor, use):
    decorate, call, blocks = USES[use]
    compiled = torch.compile(calling(decorate(autotune), call), fullgraph=True, dynamic=False)
    for _ in range(2):
        compiled(torch.zeros(SIZE))
    first, again = on_gpu.launches[-2:]
    assert first.args["BLOCK"] == again.args["BLOCK"] == blocks[0]
    assert first.args["n"] == SIZE
    assert first.grid[0] == triton.cdiv(SIZE, blocks[0])
