"""Whom tritile is measured against: what they are asked for, and that a bad one costs only itself."""

import json

import pytest
import torch

from tritile.core import of_torch
from tritile.core.config import Config
from tritile.core.views import posed
from tritile.errors import InvalidValueError, TuningError
from tritile.lab.report import baselines, bench, block_baselines, tutorial_baseline
from tritile.lab.report import run as benchmark
from tritile.lab.report.results import Measurement, read, result
from tritile.tune.measure import timing
from tritile.tune.subject import answers, torch_calls
from tritile.tune.suites import Case, parse_shape

ENV = dict.fromkeys(("gpu", "torch", "triton", "driver", "tritile", "time"), "x")


class Graph:
    """Stand for a graph: run over all calls, once."""

    def __init__(self, run, calls):
        for call in calls:
            run(call)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    monkeypatch.setattr(timing, "Graph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def calls_of(case):
    def make(dtype, elements):
        kind = getattr(torch, dtype)
        return torch.randn(elements).to(kind) if kind.is_floating_point else torch.ones(elements, dtype=kind)

    return [posed(case.problem, make) for _ in range(2)]


def graphs(case, names):
    told = []
    return bench._baseline_graphs(case, calls_of(case), names, told.append), told


def right(call):
    a, b, out = torch_calls.matrices(call)
    return (a @ b).reshape(out.shape[-2:] if len(out) == 1 else out.shape)


@pytest.mark.parametrize("layout", ["NN", "TT"])
@pytest.mark.parametrize("shape", ["9x7x5", "3x9x7x5"])
def test_a_right_answer_is_measured(shape, layout, monkeypatch):
    case = parse_shape(shape, dtype="float32", layout=layout)
    monkeypatch.setitem(baselines.ON_REQUEST, "inductor", lambda call: right)
    found, told = graphs(case, ["inductor"])
    assert list(found) == ["inductor"]
    assert told == []


def failing(call):
    raise RuntimeError("no such backend\nat line 7")


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (failing, "RuntimeError: no such backend"),
        (lambda call: lambda call: failing(call), "RuntimeError: no such backend"),
        (lambda call: lambda call: torch.zeros(9, 7), "wrong answer"),
        (lambda call: lambda call: torch_calls.matrices(call)[2][0], "wrong answer"),  # nothing was written
        (lambda call: lambda call: torch.zeros(2, 2), "RuntimeError"),
    ],
)
def test_a_peer_that_fails_costs_itself_alone(peer, said, monkeypatch):
    case = parse_shape("9x7x5", dtype="float16")
    monkeypatch.setitem(baselines.ON_REQUEST, "inductor", peer)
    monkeypatch.setitem(baselines.ON_REQUEST, "tutorial", lambda call: right)
    found, (told,) = graphs(case, ["inductor", "tutorial"])
    assert list(found) == ["tutorial"]
    assert told.startswith("9x7x5 NN float16: not measured against inductor: ")
    assert said in told
    assert "\n" not in told


@pytest.mark.parametrize(
    "case",
    [
        parse_shape("9x7", op="permute"),
        parse_shape("16x16x16", dtype="int8"),
        parse_shape("16x16x16", dtype="float64"),
    ],
)
def test_what_a_peer_does_not_take_is_left_out_without_a_word(case):
    assert graphs(case, ["tutorial"]) == ({}, [])


def test_the_tutorial_writes_into_out(monkeypatch):
    def multiply(a, b, out, precision):
        assert precision == "tf32"
        out.copy_(a @ b)

    monkeypatch.setattr(tutorial_baseline, "tuned", lambda itemsize: multiply)
    for shape in ("9x7x5", "3x9x7x5"):
        case = parse_shape(shape, dtype="float32", layout="TN", precision="tf32")
        assert graphs(case, ["tutorial"])[1] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_inductor_searches_as_widely_as_it_can(dtype, monkeypatch):
    asked = {}

    def compiled(call, **options):
        asked.update(options)
        return call

    monkeypatch.setattr(torch, "compile", compiled)
    (call, _) = calls_of(parse_shape("32x16x16", dtype=dtype, layout="NT"))
    made = baselines.inductor(call)(call)
    assert asked == {"mode": "max-autotune-no-cudagraphs", "dynamic": False, "fullgraph": True}
    baselines.torch_matmul(call)
    assert torch.equal(made, torch_calls.matrices(call)[2][0])


def test_names_are_checked():
    assert baselines.check_names(["tutorial", "inductor", "tutorial"]) == ("tutorial", "inductor")
    with pytest.raises(InvalidValueError, match=r"'cutlass'.*inductor, tutorial"):
        baselines.check_names(["cutlass"])


def test_a_case_that_fails_does_not_end_the_benchmark(tmp_path, monkeypatch):
    def measured(case, names, tell):
        assert names == ("tutorial",)
        if case.m == 8:
            raise ValueError("no")
        return Measurement(1.0, 2.0, None, 0.0, 0.0, 0.0, None, Config.of(BLOCK_M=64), "exact", 3.0)

    monkeypatch.setattr(bench, "measured", measured)
    told, done = [], []
    cases = [parse_shape("8x8x8"), parse_shape("16x8x8")]
    lines, failed = benchmark.run_cases(cases, ("tutorial",), ENV, tmp_path, told.append, done.append)
    assert failed == 1
    assert told == ["8x8x8 NN bfloat16: ValueError: no"]
    assert done == [case.problem.label for case in cases]
    assert read(tmp_path / "given.jsonl") == lines
    assert [line["ratio_tutorial"] for line in lines] == [3.0]


def test_host_costs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "host_costs", lambda: [("matmul(a, b)", 8.0, 10.0)])
    lines = benchmark.run_host(ENV, tmp_path)
    assert read(tmp_path / "host.jsonl") == lines
    assert json.loads((tmp_path / "host.jsonl").read_text())["ratio_torch"] == 1.25
    assert benchmark.run_host(ENV, None) == lines


@pytest.mark.parametrize("dtype", ["bool", "uint8", "bfloat16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize(
    ("shape", "dims"), [((5, 6, 4), (1, 0, 2)), ((3, 7), (1, 0)), ((2, 3, 4, 5), (3, 1, 0, 2))], ids=str
)
def test_torchs_permutation_moves_the_same_bits(dtype, shape, dims):
    """Compare on random bytes, as the measurement draws them, for words of any width."""
    case = Case("given", "permute", dtype, shape=shape, dims=dims)

    def make(kind, elements):
        size = getattr(torch, kind).itemsize
        return torch.randint(0, 256, (elements * size,), dtype=torch.uint8).view(getattr(torch, kind))

    call = posed(case.problem, make)
    before = call.x.clone()
    torch_calls.permute(dtype, shape, dims)(call)
    answers.check_permuted(call)
    assert torch.equal(call.x, before)
    call.out[0] += 1
    with pytest.raises(TuningError, match="elements differ"):
        answers.check_permuted(call)


@pytest.mark.parametrize(
    ("dtype", "epilogue"),
    [
        ("float32", "bias=row"),
        ("float32", "bias=row gelu"),
        ("float32", "bias=full residual=full weighted gelu_tanh"),
        ("float32", "bias=column relu"),
        ("float32", "residual=full silu"),
        ("float64", "scale_a=column scale_b=row bias=row silu"),
        ("float32", "scale_a=one scale_b=one residual=row"),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_torch_does_what_is_fused(dtype, epilogue, batch):
    case = Case("given", "matmul", dtype, "NT", batch, 9, 7, 5, epilogue=epilogue)
    run = baselines.torch_side(case)
    for call in calls_of(case):
        assert answers.check(run, call) < 1e-5
        (*inputs,), out = baselines._as_a_user_has_them(call)
        made = baselines._product(call)(*inputs)
        torch.testing.assert_close(made, out, rtol=1e-5, atol=1e-5)


def test_torch_scales_whole_numbers(monkeypatch):
    monkeypatch.setattr(of_torch, "int_mm", lambda a, b: a.int() @ b.int())
    case = Case("given", "matmul", "int8", "NT", 1, 32, 24, 16, epilogue="scale_a=column scale_b=row silu")
    assert answers.check(baselines.torch_side(case), calls_of(case)[0], every=False) < 4e-3


def block_scaled(shared="1x128", dtype="float32", **fields):
    """Let float32 stand for fp8, which torch multiplies only on a GPU."""
    return Case("given", "matmul", dtype, "NT", 1, 150, 160, 300, block_scales=shared, **fields)


@pytest.mark.parametrize("shared", ["1x128", "1x1", "128x1", "128x128"])
@pytest.mark.parametrize("epilogue", ["", "bias=row silu"])
def test_answers_and_torch_apply_scales_of_blocks(shared, epilogue):
    case = block_scaled(shared, epilogue=epilogue)
    call = calls_of(case)[0]
    rows, columns = map(int, shared.split("x"))
    assert block_baselines.way_of(call) == baselines.torch_call(call) == block_baselines.WIDE
    with pytest.raises(TuningError, match="wrong answer"):  # bfloat16 is not enough for a float32 answer
        answers.check(baselines.torch_side(case), call)
    a, b, out = (tensor[0] for tensor in torch_calls.matrices(call))
    of_a, of_b = call.scales.a.view(-1, 3), call.scales.b.view(3, -1)
    assert of_a.shape[0] == -(-150 // rows)
    assert of_b.shape[1] == -(-160 // columns)
    at = torch.arange(300) // 128
    made = (a * of_a[torch.arange(150) // rows][:, at]) @ (b * of_b[at][:, torch.arange(160) // columns])
    if epilogue:
        made = torch.nn.functional.silu(made + call.fused.bias.tensor)
    out.copy_(made)
    answers.answer_error(call)
    out[7, 9] += 100.0
    with pytest.raises(TuningError, match="wrong answer"):
        answers.answer_error(call)


def test_torch_gets_scales_as_it_wants_them(monkeypatch):
    asked = []

    def scaled_mm(a, b, scale_a, scale_b, out_dtype, out=None):
        asked.append((scale_a, scale_b))
        return torch.zeros(150, 160, dtype=out_dtype)

    monkeypatch.setattr(of_torch, "scaled_mm", scaled_mm)
    monkeypatch.setattr(block_baselines, "_ways", {})
    case = block_scaled(dtype="float8_e4m3fn")
    call = calls_of(case)[0]
    assert baselines.torch_call(call) == block_baselines.OWN
    baselines.torch_side(case)(call)
    of_a, of_b = asked[-1]
    assert torch.equal(of_a, call.scales.a.view(150, 3))
    assert of_a.stride() == (1, 150)
    assert torch.equal(of_b, call.scales.b.view(3, 2))
    assert of_b.stride() == (1, 4)  # three blocks of K, in rows of four
    baselines.torch_side(case)(call)
    assert asked[-1][0] is of_a  # made once


def test_results_tell_scales_of_blocks_and_what_torch_was_asked(tmp_path):
    case = block_scaled(dtype="float8_e4m3fn")
    times = (1.0, 2.0, None, 0.0, 0.0, 0.0, None, Config.of(BLOCK_M=64), "exact")
    line = result(case, Measurement(*times, torch_call=block_baselines.WIDE), ENV)
    assert line["block_scales"] == "1x128"
    assert line["torch_call"] == block_baselines.WIDE
    assert "epilogue" not in line
    assert "torch_call" not in result(case, Measurement(*times), ENV)


@pytest.mark.parametrize(
    "epilogue", ["gated silu", "bias=row gated gelu", "bias_up=row gated", "bias=row bias_up=row gated relu"]
)
def test_torch_does_both_products_of_a_gated_unit(epilogue):
    case = Case("given", "matmul", "float32", "NT", 1, 9, 7, 5, epilogue=epilogue)
    run = baselines.torch_side(case)
    for call in calls_of(case):
        assert answers.check(run, call) < 1e-5
        inputs, out = baselines._as_a_user_has_them(call)
        torch.testing.assert_close(baselines._product(call)(*inputs), out, rtol=1e-5, atol=1e-5)
        call.up.tensor.add_(9.0)
        with pytest.raises(TuningError, match="wrong answer"):
            answers.answer_error(call)


@pytest.mark.parametrize("zeros", ["zero_a=one", "zero_b=row", "zero_a=column zero_b=one"])
def test_answers_take_zero_points_away(zeros, monkeypatch):
    case = Case("given", "matmul", "int8", "NT", 1, 9, 7, 5, epilogue=f"scale_a=column scale_b=row {zeros}")

    def make(dtype, elements):
        kind = getattr(torch, dtype)
        drawn = torch.randint(-100, 100, (elements,))
        return drawn.to(kind) / 64 if kind.is_floating_point else drawn.to(kind)

    call = posed(case.problem, make)
    a, b, out = (tensor[0] for tensor in torch_calls.matrices(call))
    of = call.fused
    wide_a, wide_b = a.double(), b.double()
    wide_a = wide_a if of.zero_a is None else wide_a - of.zero_a.tensor.view(-1, 1)
    wide_b = wide_b if of.zero_b is None else wide_b - of.zero_b.tensor.view(1, -1)
    out.copy_((wide_a @ wide_b) * of.scale_a.tensor.view(-1, 1) * of.scale_b.tensor)
    wanted = out.clone()
    monkeypatch.setattr(of_torch, "int_mm", lambda a, b: a.int() @ b.int())
    assert answers.check(baselines.torch_side(case), call) < 4e-3
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=0)
    (of.zero_b or of.zero_a).tensor.add_(3)
    with pytest.raises(TuningError, match="wrong answer"):
        answers.answer_error(call)
