"""`tritile.bench` and suites of tuning/bench.py, without a GPU: whom tritile is measured against, that
a side that fails costs only itself, and what is reported of times that stand-ins measure."""

import contextlib
import json

import pytest
import torch

import bench as script
import tritile
from benchmark_results import read, result
from tests.unit.test_plan import BLOCKS, H200, _double, meta
from tritile.choose import waves
from tritile.core import torch_private
from tritile.core.call import call_for
from tritile.core.config import Config
from tritile.core.problem import MatmulProblem
from tritile.errors import InvalidValueError, TuningError, UnsupportedError
from tritile.lab import baselines, bench
from tritile.lab.baselines import PACKED_WEIGHT as PACKED
from tritile.lab.baselines import WIDE_WEIGHT as WIDE
from tritile.lab.bench import BenchResult
from tritile.tune.subject import answers, operands, torch_calls
from tritile.tune.suites import Case, parse_shape
from tritile.tuner.autotuner import Autotuner
from tritile.tuner.measure import timing

ENV = dict.fromkeys(("gpu", "torch", "triton", "driver", "tritile", "time"), "x")


class Graph:
    """Stands for a graph: runs over all calls, once, and takes as long as is next of `times`."""

    times = iter(())

    def __init__(self, run, calls):
        for call in calls:
            run(call)
        self.launches, self.us = len(calls), next(Graph.times, 0.0)

    def time_us(self):
        return self.us


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    monkeypatch.setattr(timing, "Graph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def uncompiled(monkeypatch):
    """Have torch.compile return the function; keep the options that it is called with."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    return asked


def of(dtype, epilogue="", op="matmul", **fields):
    shape = {"m": 32, "n": 24, "k": 16} | fields
    return Case("given", op, dtype, shape.pop("layout", "NT"), epilogue=epilogue, **shape)


def drawn(dtype, elements):
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.randn(elements).to(kind)
    return torch.randint(torch.iinfo(kind).min, torch.iinfo(kind).max, (elements,), dtype=kind)


def calls_of(case):
    return [call_for(case.problem, drawn) for _ in range(2)]


def error_of(baseline, call):
    return answers.check(baselines.into_out(baseline), call, every=False)


# torch's baselines.


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (of("bfloat16"), ["matmul"]),
        (of("int8"), ["_int_mm"]),
        (of("float8_e4m3fn"), ["_scaled_mm, use_fast_accum=False"]),
        (of("float8_e4m3fn", precision="fast"), ["_scaled_mm, use_fast_accum=True"]),
        (of("float8_e4m3fn", "scale_a=one scale_b=one"), ["_scaled_mm, use_fast_accum=False"]),
        (of("bfloat16", "bias=row gelu"), ["matmul", "torch.compile"]),
        (of("bfloat16", "bias=row relu"), ["matmul", "_addmm_activation", "torch.compile"]),
        (of("bfloat16", "bias=row residual=full relu"), ["matmul", "torch.compile"]),
        (of("bfloat16", "bias=row relu", batch=2), ["matmul", "torch.compile"]),
        (of("int8", "scale_a=column scale_b=row"), ["_int_mm", "torch.compile"]),
        (of("bfloat16", "gated silu"), ["two products", "one product", "torch.compile, one product"]),
        (parse_shape("8x16x16x16", op="grouped"), ["_grouped_mm"]),
        (parse_shape("9x7", op="permute"), ["copy_"]),
        (of("bfloat16", op="linear_quantized", layout="int4/32", k=128), [WIDE, PACKED]),
        (of("bfloat16", op="linear_quantized", layout="int4/32 zeros", k=256), [WIDE, PACKED]),
        (of("float16", op="linear_quantized", layout="int4/32", k=128), [WIDE]),
        (of("bfloat16", op="linear_quantized", layout="int8/32", k=128), [WIDE]),
        (of("bfloat16", op="linear_quantized", layout="int4/32", k=144), [WIDE]),
        (of("bfloat16", op="linear_quantized", layout="int4/32", k=128, n=20), [WIDE]),
    ],
)
def test_torch_baselines_that_take_case(case, names):
    assert list(baselines.torch_baselines(calls_of(case)[0])) == names


@pytest.mark.parametrize("epilogue", ["", "scale_a=one scale_b=one"])
@pytest.mark.parametrize("precision", ["ieee", "fast"])
def test_torch_sums_fp8_as_tritile(epilogue, precision, monkeypatch):
    asked = []

    def scaled_mm(a, b, *_, out_dtype, use_fast_accum, out=None):
        asked.append(use_fast_accum)
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch_private, "scaled_mm", scaled_mm)
    call = calls_of(of("float8_e4m3fn", epilogue, precision=precision))[0]
    (baseline,) = baselines.torch_baselines(call).values()
    baselines.into_out(baseline)(call)
    assert asked == [precision == "fast"]


@pytest.mark.parametrize(
    "case",
    [
        of("float32"),
        of("float32", "bias=row relu"),
        of("float32", "bias=row", batch=3),
        of("float32", "bias=full residual=full weighted gelu_tanh", batch=3),
        of("float32", "bias=column relu", m=9, n=7, k=5),
        of("float64", "scale_a=column scale_b=row bias=row silu"),
        of("float32", "scale_a=one scale_b=one residual=row", batch=3),
        of("bfloat16", "bias=row gelu_tanh"),
        of("int8", "scale_a=column scale_b=row silu"),
        of("float32", "bias=row gated gelu"),
        of("float32", "bias_up=row gated", m=9, n=7, k=5),
        of("float32", "bias=row bias_up=row gated relu"),
    ],
)
def test_baselines_are_right(case, uncompiled, monkeypatch):
    monkeypatch.setattr(torch_private, "int_mm", lambda a, b: a.int() @ b.int())
    calls = calls_of(case)
    for call in calls:
        for baseline in baselines.torch_baselines(call).values():
            for each in calls:
                assert error_of(baseline, each) < 4e-3
    assert uncompiled == [{"dynamic": False, "fullgraph": True}] * 2 * bool(case.epilogue)


def test_compiler_gets_gated_weights_once(uncompiled):
    case = of("float32", "gated silu")
    call = calls_of(case)[0]
    baseline = script.by_inductor(call)["inductor"]
    assert error_of(baseline, call) < 1e-5
    assert uncompiled == [{"mode": script.SEARCHING, "dynamic": False, "fullgraph": True}]
    weight = baseline.inputs(call)["weight"]
    assert weight.shape == (2 * case.n, case.k)
    assert baseline.inputs(call)["weight"] is weight  # made once, ahead of a capture


@pytest.mark.parametrize("layout", ["int4/32", "int4/64 zeros", "int4/128 zeros"])
@pytest.mark.parametrize("bias", ["", "bias=row"])
def test_torch_packing_same_weight(layout, bias, monkeypatch):
    """Stand in for torch's kernel with what it computes: (number - 8) * scale + offset."""

    def int4_packed(pairs, inner_k_tiles):
        assert (pairs.dtype, inner_k_tiles, pairs.is_contiguous()) == (torch.uint8, 8, True)
        return torch.stack((pairs >> 4, pairs & 15), -1).flatten(1)

    def int4_mm(x, numbers, group_size, scales):
        assert (scales.dtype, scales.is_contiguous()) == (torch.bfloat16, True)
        scale, offset = scales.double().repeat_interleave(group_size, 0).unbind(-1)
        return (x.double() @ ((numbers.t() - 8.0) * scale + offset)).to(x.dtype)

    monkeypatch.setattr(torch_private, "int4_packed", int4_packed)
    monkeypatch.setattr(torch_private, "int4_mm", int4_mm)
    call, other = calls_of(of("bfloat16", bias, op="linear_quantized", layout=layout, k=384))
    for baseline in baselines.torch_baselines(call).values():
        assert error_of(baseline, call) < 4e-3
    monkeypatch.setattr(torch_private, "int4_packed", lambda pairs, _: int4_packed(pairs, 8).flip(1))
    with pytest.raises(TuningError, match="wrong answer"):
        error_of(baselines.by_packed_weight(other), other)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize(
    ("shape", "dims"), [((5, 6, 4), (1, 0, 2)), ((3, 7), (1, 0)), ((2, 3, 4, 5), (3, 1, 0, 2))], ids=str
)
def test_torchs_permutation_moves_the_same_bits(dtype, shape, dims):
    """Compare on random bytes, as the measurement draws them, for words of any width."""

    def make(kind, elements):
        size = getattr(torch, kind).itemsize
        return torch.randint(0, 256, (elements * size,), dtype=torch.uint8).view(getattr(torch, kind))

    call = call_for(Case("given", "permute", dtype, shape=shape, dims=dims).problem, make)
    before = call.x.tensor.clone()
    torch_calls.copy(call)
    answers.check_permuted(call)
    assert torch.equal(call.x.tensor, before)
    call.out.tensor[0] += 1
    with pytest.raises(TuningError, match="elements differ"):
        answers.check_permuted(call)


@pytest.mark.parametrize(("elements", "copied"), [(32, 32), (1000, 992), (31, 31)])
def test_copy_moves_even_words(elements, copied):
    case = Case("given", "permute", "uint8", shape=(elements,), dims=(0,))
    call = call_for(case.problem, lambda dtype, count: torch.ones(count, dtype=getattr(torch, dtype)))
    call.out.tensor.zero_()
    baselines.device_copy(call)
    assert int(call.out.tensor.view(torch.uint8).sum()) == int(call.x.tensor.view(torch.uint8)[:copied].sum())


# A suite.


def right(call):
    (a, b), _ = torch_calls.in_one_batch(call)
    return a @ b


def failing(call):
    raise RuntimeError("no such backend\nat line 7")


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (failing, "RuntimeError: no such backend"),
        (lambda call: torch.zeros(9, 7), "wrong answer"),
        (lambda call: torch_calls.in_one_batch(call)[1], "wrong answer"),  # nothing was written
        (lambda call: torch.zeros(2, 2), "RuntimeError"),
    ],
    ids=["raises", "zeros", "nothing", "another shape"],
)
def test_failing_peer_costs_itself(peer, said):
    case, told = parse_shape("9x7x5", dtype="float16"), []
    found = bench._graphs(case.problem, calls_of(case), {"inductor": peer, "other": right}, told.append)
    assert list(found) == ["other"]
    assert told[0].startswith(f"{case.problem.label}: not measured against inductor: ")
    assert said in told[0]
    assert "\n" not in told[0]


def test_failing_case_goes_on(tmp_path, monkeypatch):
    def measured(case, others, log):
        assert others is script.by_inductor
        if case.m == 8:
            raise ValueError("no")
        sides = {"others_us": {"inductor": 3.0}}
        times, config = (1.0, 2.0, 0.0, 0.0, 0.0, None), Config.of(BLOCK_M=64)
        return BenchResult(case.problem, H200, *times, config, "exact", **sides)

    monkeypatch.setattr(script, "measured", measured)
    told, done = [], []
    cases = [parse_shape("8x8x8"), parse_shape("16x8x8")]
    run = script.Run(tmp_path, told.append, done.append)
    run.cases(cases, ENV, True)
    assert run.failed == 1
    assert told == ["8x8x8 NN bfloat16: ValueError: no"]
    assert done == [case.problem.label for case in cases]
    assert read(tmp_path / "given.jsonl", pytest.fail) == run.lines
    assert [line["ratio_inductor"] for line in run.lines] == [3.0]


def test_host_costs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "_host_calls", lambda: [("matmul(a, b)", None, None)])
    monkeypatch.setattr(script, "host_us", lambda *calls: [8.0, 10.0])
    lines = script.Run(tmp_path, print, print).host(ENV)
    assert read(tmp_path / "host.jsonl", pytest.fail) == lines
    assert json.loads((tmp_path / "host.jsonl").read_text())["ratio_torch"] == 1.25
    assert script.Run(None, print, print).host(ENV) == lines


def test_ratio_of_fastest_torch_way(monkeypatch, uncompiled):
    case = of("float32", "gated silu")
    monkeypatch.setattr(Graph, "times", iter((4.0, 9.0, 8.0, 5.0, 3.0)))  # ours, torch's three, max-autotune
    monkeypatch.setattr(bench.devices, "current_gpu", lambda: H200)
    monkeypatch.setattr(operands, "copies_of", lambda problem, device: calls_of(case))
    monkeypatch.setattr(bench.launching, "prepare", lambda call, config: None)
    ours = baselines.into_out(baselines.eager(calls_of(case)[0]))
    monkeypatch.setattr(operands, "run_of", lambda launch: ours)
    line = result(case, bench.measured(case, script.by_inductor), ENV)
    assert (line["torch_us"], line["ratio_torch"]) == (5.0, 1.25)
    assert line["torch_call"] == "torch.compile, one product"
    assert line["torch_calls"] == {"two products": 9.0, "one product": 8.0, "torch.compile, one product": 5.0}
    assert (line["inductor_us"], line["ratio_inductor"]) == (3.0, 0.75)
    assert (line["samples"], line["launches"]) == (40, 2)
    assert line["spreads"] == {"torch": 0.0, "inductor": 0.0}


# A call: `tritile.bench`.

PROBLEM = MatmulProblem(1, 64, 32, 48, "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    "what", [(PROBLEM,), ("matmul", meta(64, 48), meta(48, 32))], ids=["problem", "call"]
)
def test_a_call_is_timed_beside_torch(what, monkeypatch):
    config, asked = waves.pick(PROBLEM, H200), []
    found = BenchResult(PROBLEM, H200, 10.0, 15.0, 0.02, 1e-3, 2e-3, None, config, "exact", "matmul")
    monkeypatch.setattr(bench.devices, "current_index", lambda: 0)
    monkeypatch.setattr(bench.devices, "gpu", lambda index: H200)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(bench, "measured", lambda problem, log: asked.append(problem) or found)
    found = tritile.bench(*what)
    assert asked == [PROBLEM]
    assert (found.tritile_us, found.torch_us, found.ratio, found.spread) == (10.0, 15.0, 1.5, 0.02)
    assert (found.config, found.source) == (config, "exact")
    assert "15.0 us, 1.50 times as long: matmul" in repr(found)
    assert "64x32x48 NN bfloat16 on NVIDIA H200" in found._repr_html_()


def test_decorated_timed_in_own_process(monkeypatch):
    asked = []

    class Shop:
        def begin(self, subject):
            asked.append(subject.label)

        def race(self, subject, configs):
            return [[5.0, 6.0, 7.0], [8.0, 9.0, 10.0]][: len(configs)]

        def end(self, subject):
            asked.append("end")

    monkeypatch.setattr(bench, "gpu_for", lambda *given: (H200, 0))
    monkeypatch.setattr(Autotuner, "device_of", lambda *given: H200)
    monkeypatch.setattr(bench, "shipped", lambda call: contextlib.nullcontext((Shop(), call.problem)))
    kernel = tritile.autotune(BLOCKS, ["n"])(_double)
    found = tritile.bench(kernel, meta(40), meta(40), 40, grid=(3,))
    assert (found.tritile_us, found.torch_us, found.ratio, found.config) == (6.0, None, None, BLOCKS[0])
    assert asked == ["_double n=40", "end"]
    assert "not timed, because the kernel has no reference=" in repr(found)
    referred = tritile.autotune(BLOCKS, ["n"], reference=lambda x: {"out": 2 * x})(_double)
    found = tritile.bench(referred, meta(40), meta(40), 40, grid=(3,))
    assert (found.tritile_us, found.torch_us, found.ratio) == (6.0, 9.0, 1.5)
    assert "9.0 us, 1.50 times as long: the kernel's reference" in repr(found)
    with pytest.raises(InvalidValueError, match="grid="):
        tritile.bench(kernel, meta(40), meta(40), 40)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured():
    with pytest.raises(UnsupportedError, match="bench: there is no GPU here"):
        tritile.bench("matmul", torch.zeros(3, 4), torch.zeros(4, 5))
    with pytest.raises(InvalidValueError, match="bench: what is 'glue'"):
        tritile.bench("glue")
