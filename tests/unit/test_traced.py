"""Kernels under tritile.autotune inside torch.compile: which config the tracer is given.

The tracer is torch's own. What it made of a kernel is read from the graph; nothing is compiled or launched.
"""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx.experimental.proxy_tensor import make_fx

import tritile
from tests.unit.test_autotune import Bench, configs, softmax, tuned
from tritile.core.config import Config
from tritile.core.device import HOST
from tritile.core.versions import parsed
from tritile.errors import DeviceError, UntunedWarning
from tritile.planning.store import store_of
from tritile.planning.trial import Trial
from tritile.tune.traced import indices_of

ROWS = 4


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


def compiled(kernel, traces, **options):
    def call(x, used):
        out = torch.empty_like(x)
        kernel[(x.shape[0],)](x, out, used, x.shape[1])
        return out

    function = torch.compile(call, backend=traces, fullgraph=True, **options)
    return lambda n, dtype=torch.float32: function(
        torch.zeros(ROWS, n, dtype=dtype), torch.zeros(1, dtype=torch.int32)
    )


def of_space(bench, *blocks):
    space = tritile.Space({"BLOCK": blocks})
    return tritile.autotune(space, ["N"], do_bench=bench)(softmax)


def remember(kernel, args, fastest):
    """Put a time of each config into the store, as a measurement of this call does."""
    problem = kernel.problem(args, {})
    listed = kernel.space.opening(9) if kernel.space else [Config.from_triton(c) for c in kernel.configs]
    for config in listed:
        us = 1.0 + abs(config["BLOCK"] - fastest)
        store_of(HOST).add(kernel.digest, Trial(problem, config, us))


def measured(bench, *sizes, kernel=None, **more):
    kernel = kernel or tuned(bench, **more)
    for n, fastest in sizes:
        x = torch.zeros(ROWS, n)
        remember(kernel, (x, x, bench.used, n), fastest)
    return kernel


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
    "remembered, and left by the pruning": (pruned(above_n), {50: 64}, "tune", (50,), [[64]]),
    "a forbidden neighbour": (pruned(dividing), {256: 256}, "cached", (256, 192), [[256], [64]]),
    "pruned": (pruned(above_n), {}, "off", (100,), [[128]]),
    "pruned and modelled": (
        pruned(above_n, perf_model=lambda BLOCK, **rest: -BLOCK, top_k=0.5), {}, "off", (100,), [[256]]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACED)
def test_the_tracer_is_given_what_runs_outside_of_it(name):
    how, known, mode, sizes, blocks = TRACED[name]
    kernel, traces = measured(Bench(), *known.items(), **how), Traces()
    call = compiled(kernel, traces, dynamic=False)
    with tritile.mode(mode), warnings.catch_warnings():
        if known:
            warnings.simplefilter("error" if mode == "cached" else "ignore", UntunedWarning)
        for n in sizes:
            call(n)
    assert traces.blocks == blocks


def test_where_sizes_may_change_all_that_is_remembered_of_any_size_is_left_to_torch():
    kernel, traces = measured(Bench(), (64, 64), (256, 256)), Traces()
    call = compiled(kernel, traces, dynamic=True)
    with tritile.mode("cached"):
        for n in (100, 70, 3000, 1):
            call(n)
    assert traces.blocks[:1] == [[64, 256]]
    assert all(blocks in ([64], [64, 256]) for blocks in traces.blocks[1:])  # of the size 1 torch knows
    assert len(traces.blocks) <= 2


def test_a_size_within_declared_bounds_is_not_narrowed():
    kernel, traces = measured(Bench(), (64, 64)), Traces()

    def call(x, used):
        torch._dynamo.mark_dynamic(x, 1, min=2, max=4096)
        return call.function(x, used)

    def inside(x, used):
        out = torch.empty_like(x)
        kernel[(x.shape[0],)](x, out, used, x.shape[1])
        return out

    call.function = torch.compile(inside, backend=traces, fullgraph=True)
    for n in (2, 100, 3000):
        call(torch.zeros(ROWS, n), torch.zeros(1, dtype=torch.int32))
    assert traces.blocks == [[64]]


def test_a_size_that_only_the_gpu_knows():
    kernel, traces = measured(Bench(), (50, 128)), Traces()

    @torch.compile(backend=traces, fullgraph=True)
    def call(x, used, n):
        out = torch.empty_like(x)
        kernel[(ROWS,)](x, out, used, n.item())
        return out

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call(torch.zeros(ROWS, 50), torch.zeros(1, dtype=torch.int32), torch.tensor(50))
    assert traces.blocks == [[128]]


@pytest.mark.parametrize("value", [2.5, torch.ones(3), None, torch.float16], ids=str)
def test_keys_that_are_no_sizes(value):
    bench, traces = Bench(), Traces()
    kernel = tuned(bench, kernel=keyed, key=("N", "EXTRA"))
    x, used = torch.zeros(ROWS, 50), torch.zeros(1, dtype=torch.int32)
    remember(kernel, (x, x, bench.used, 50, value), 256)

    @torch.compile(backend=traces, fullgraph=True, dynamic=False)
    def call(x, used, value):
        out = torch.empty_like(x)
        kernel[(ROWS,)](x, out, used, x.shape[1], value)
        return out

    call(x, used, value)
    assert traces.blocks == [[256]]


@triton.jit
def keyed(x_ptr, out_ptr, used_ptr, N, EXTRA, BLOCK: tl.constexpr):
    tl.store(used_ptr, BLOCK)


def test_kernels_whose_arguments_torch_hides_are_left_to_it():
    """As it hides tensor descriptors from a pruning."""
    kernel = measured(Bench(), (50, 128))
    tensors = (
        ("out_ptr", torch.float32, torch.device("cpu")),
        ("used_ptr", torch.int32, torch.device("cpu")),
    )
    with pytest.warns(UntunedWarning, match="hides from its pruning"):
        assert indices_of(kernel, tensors, {"N": 50}, (), ("x_ptr", "BLOCK")) is None
    whole = (("x_ptr", torch.float32, torch.device("cpu")), *tensors)
    assert indices_of(kernel, whole, {"N": 50}, (), ("BLOCK",)) == (1,)


def test_nothing_is_measured_of_another_dtype_and_it_is_said_once():
    bench, traces = Bench(), Traces()
    call = compiled(measured(bench, (50, 128), mode="cached"), traces, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            call(50, torch.float16)
    (said,) = [str(w.message) for w in caught if w.category is UntunedWarning]
    assert "softmax N=50" in said
    assert "outside of torch.compile" in said
    assert traces.blocks == [[64]]
    assert bench.measured == []


def test_strict_refuses_what_is_not_remembered():
    bench = Bench()
    kernel, traces = measured(bench, (50, 128)), Traces()
    kernel.mode = "strict"
    call = compiled(kernel, traces, dynamic=False)
    call(50)
    with pytest.raises(
        RuntimeError, match="NotTunedError: mode is strict and nothing measured is remembered"
    ):
        call(60)  # in torch's own clothes
    assert traces.blocks == [[128]]


def test_a_spaces_remembered_config_is_among_those_the_tracer_sees():
    bench, traces = Bench(), Traces()
    kernel = measured(bench, (40, 256), (50, 128), kernel=of_space(bench, 64, 128, 256))
    for one in (kernel, of_space(bench, 64, 128, 256)):  # as a new process has it
        call = compiled(one, traces, dynamic=False)
        for n in (40, 50, 40):
            call(n)
    assert traces.blocks == [[256], [128]] * 2


@triton.jit
def scaled(x_ptr, out_ptr, used_ptr, N, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * N + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns) if EVEN else tl.load(x_ptr + columns, mask=tl.arange(0, BLOCK) < N)
    tl.store(out_ptr + columns, x, mask=tl.arange(0, BLOCK) < N)
    tl.store(used_ptr, BLOCK)


def with_heuristics():
    """A kernel with heuristics, tuned for N = 128, of which BLOCK = 128 is the fastest."""
    bench = Bench()
    heuristics = triton.heuristics({"EVEN": lambda given: given["N"] % given["BLOCK"] == 0})
    kernel = tuned(bench, kernel=heuristics(scaled))
    remember(kernel, (torch.zeros(ROWS, 128), torch.zeros(ROWS, 128), bench.used, 128), 128)
    return kernel


@pytest.mark.skipif(parsed(torch.__version__) < (2, 13), reason="a later torch's tracer")
def test_heuristics_count_for_the_config_that_is_remembered():
    traces = Traces()
    compiled(with_heuristics(), traces, dynamic=False)(128)
    (config,) = traces.found[0].configs
    assert (config["BLOCK"], config["EVEN"]) == (128, True)


def test_where_the_tracer_cannot_follow_heuristics_it_is_said_once(monkeypatch):
    monkeypatch.setattr("tritile.tune.traced.parsed", lambda version: (2, 11))
    kernel, traces = with_heuristics(), Traces()
    call = compiled(kernel, traces, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(128)
        call(256)
    (said,) = [str(w.message) for w in caught if w.category is UntunedWarning]
    assert "heuristics" in said
    assert traces.blocks == [[64, 128, 256]] * 2


def test_another_tracer_sees_the_remembered_config_too():
    kernel = measured(Bench(), (50, 128))
    seen = Traces()

    def call(x, used):
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernel)[(ROWS,)](x, out, used, x.shape[1])
        return out

    graph = make_fx(call, tracing_mode="fake")(torch.zeros(ROWS, 50), torch.zeros(1, dtype=torch.int32))
    seen.note(graph)
    assert seen.blocks == [[128]]
    assert [node.name for node in graph.graph.nodes if node.name.startswith("empty")] == ["empty_like"]


def test_a_copy_has_configs_of_its_own():
    kernel, traces = measured(Bench(), (50, 64)), Traces()
    other = copy.copy(kernel)
    other.configs, other.mode = configs(128, 256), "off"
    compiled(other, traces)(50)
    compiled(kernel, traces)(50)
    assert traces.blocks == [[128], [64]]


def test_a_space_without_the_best_of_another_takes_the_next():
    bench, traces = Bench(), Traces()
    for blocks in ((64, 128, 256), (64, 128)):
        kernel = measured(bench, (50, 256), kernel=of_space(bench, *blocks))
    compiled(kernel, traces)(50)
    assert traces.blocks == [[128]]


def test_a_gpu_that_is_not_here_is_left_to_torch(monkeypatch):
    kernel = measured(Bench(), (50, 64))
    monkeypatch.setattr(
        "tritile.core.device.gpu", lambda index: (_ for _ in ()).throw(DeviceError("no GPU 0"))
    )
    assert indices_of(kernel, (("x_ptr", torch.float32, torch.device("cuda", 0)),), {"N": 50}, ()) is None
