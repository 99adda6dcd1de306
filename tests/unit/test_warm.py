"""`tritile.warm`: which kernels are compiled ahead of calls, told before any is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

import tritile
from tests.unit.test_plan import BLOCKS, _double, meta
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, PermuteProblem, QuantizedProblem
from tritile.errors import InvalidValueError, NotTunedError, TuningError, UnsupportedError
from tritile.families.common.operands import copied
from tritile.lab import warm as asked
from tritile.planning import gpu_tables, plans
from tritile.tune.calibrate.draw import drawn
from tritile.tune.deploy import rows
from tritile.tune.deploy.fill import Filled, Found

H200 = target_device("nvidia-h200")


@pytest.fixture
def filled(monkeypatch):
    """Take the place of compiling: the entries of each request, and what is found."""
    requests, found = [], Found(kernels={"A", "B"})

    def fill(entries, device, folder, whole):
        assert (device, whole) == (H200, True)
        requests.append(entries)
        return Filled(found, 1, 0)

    monkeypatch.setattr(asked, "fill", fill)
    return requests, found


def product(m, n, k):
    return (
        torch.empty(m, k, dtype=torch.bfloat16, device="meta"),
        torch.empty(n, k, dtype=torch.bfloat16, device="meta").mT,
    )


def kernels(entries):
    return {(config, rows._compiled(problem, config, H200)) for problem, config in entries}


def planned(problems):
    return [(each, plans.plan_for(each, H200, "cached").config) for each in problems]


def test_calls_of_any_size_find_what_was_compiled_for_one(filled):
    requests, _ = filled
    assert tritile.warm(tritile.matmul, *product(300, 4096, 1024), device="nvidia-h200") == 2
    sizes = drawn("halves-nt", 60, "warm")
    sizes += [replace(each, m=m) for each in sizes[:10] for m in (1, 2, 8)]
    tuned = [
        entry.problem for entry in gpu_tables.shipped(H200)[0].entries if entry.problem.kind == sizes[0].kind
    ]
    assert tuned
    assert kernels(planned(sizes + tuned)) <= kernels(requests[0])
    assert len(requests[0]) == len(kernels(requests[0])) < 1500


def test_a_class_without_a_portfolio_compiles_the_plan(filled):
    requests, _ = filled
    problem = MatmulProblem(1, 384, 512, 256, "float64", "float64")
    tritile.warm(problem, device=H200)
    assert requests == [planned([problem])]


def test_mode_off_compiles_what_is_predicted(filled):
    requests, _ = filled
    with tritile.mode("off"):
        tritile.warm(tritile.matmul, *product(300, 4096, 1024), device=H200)
    ((problem, config),) = requests[0]
    assert config == plans.plan_for(problem, H200, "off").config


def test_rows_compile_what_their_plans_pick(filled):
    requests, _ = filled
    tritile.warm(tritile.matmul, *product(300, 328, 192), device=H200, rows=(m for m in (1, 17, 640, 641)))
    problem = tritile.plan(tritile.matmul, *product(300, 328, 192), device=H200).problem
    picked = planned([replace(problem, m=m) for m in (1, 17, 640, 641)])
    assert kernels(requests[0]) == kernels(picked)
    assert {each.m for each, _ in requests[0]} <= {1, 17, 640, 641}


@pytest.mark.parametrize(("n", "k"), [(131, 133), (131, 136), (128, 256)])
@pytest.mark.parametrize("first", [1, 40])
def test_the_problem_of_some_rows_is_that_of_their_call(n, k, first):
    problem = tritile.plan(tritile.matmul, *product(first, n, k), device=H200).problem
    for m in (1, 2, 40):
        wanted = tritile.plan(tritile.matmul, *product(m, n, k), device=H200).problem
        assert rows._with_rows(problem, m) == wanted


def layer(m, n, k, **rest):
    x, weight = product(m, n, k)
    return (x, weight.mT, torch.empty(n, dtype=torch.bfloat16, device="meta")), rest


def test_a_linear_layer_is_planned_as_it_is_called():
    arguments, words = layer(300, 328, 192, activation="gelu")
    problem = tritile.plan(tritile.linear, *arguments, **words, device=H200).problem
    assert (problem.sizes, problem.b_layout) == ((1, 300, 328, 192), "column")
    assert problem.epilogue == "bias=row gelu"
    assert tritile.plan(tritile.linear, *arguments[:2], device=H200).problem == replace(problem, epilogue="")
    wide = tritile.plan(tritile.linear, arguments[0].view(3, 100, 192), *arguments[1:], device=H200)
    assert wide.problem == replace(problem, epilogue="bias=row")


@pytest.mark.parametrize("first", [2, 40])
def test_rows_of_a_linear_layer_are_those_of_its_calls(filled, first):
    def of(m):
        return layer(m, 131, 136, residual=torch.empty(m, 131, dtype=torch.bfloat16, device="meta"))

    (arguments, words), numbers = of(first), (1, 2, 40)
    tritile.warm(tritile.linear, *arguments, **words, device=H200, rows=numbers)
    calls = [of(m) for m in numbers]
    problems = [tritile.plan(tritile.linear, *given, **rest, device=H200).problem for given, rest in calls]
    assert problems[0].epilogue == "bias=row residual=row"
    assert kernels(filled[0][0]) == kernels(planned(problems))


def test_what_is_warmed_of_a_layer_with_a_residual_is_what_one_row_calls_too():
    def of(m):
        rest = {"residual": torch.empty(m, 4096, dtype=torch.bfloat16, device="meta")}
        return tritile.plan(tritile.linear, *layer(m, 4096, 4096)[0], **rest, device=H200).problem

    compiled = kernels(list(rows.of_class(of(300), H200)))
    for m in (1, 2, 8, 300):
        assert kernels(planned([of(m)])) <= compiled
    with pytest.raises(InvalidValueError, match="two rows or more"):
        rows.of_class(of(1), H200)
    with pytest.raises(InvalidValueError, match="two rows or more"):
        list(rows.of_rows(of(1), (1, 2), H200))
    assert list(rows.of_rows(of(1), (1,), H200))


def test_a_linear_layer_of_a_packed_weight_is_planned():
    x, bias = torch.empty(2, 5, 128, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    weight = tritile.quantize(torch.ones(64, 128, dtype=torch.bfloat16), bits=4, group_size=64)
    problem = tritile.plan(tritile.linear, x, weight, bias, device=H200).problem
    assert problem == QuantizedProblem(10, 64, 128, "bfloat16", 4, 64, bias=True)
    with pytest.raises(UnsupportedError, match="does not combine with activation"):
        tritile.plan(tritile.linear, x, weight, bias, activation="gelu", device=H200)


def test_columns_begin_as_their_number_of_rows_tells():
    a, b = torch.empty(64, 40, dtype=torch.bfloat16, device="meta").mT, product(1, 64, 64)[1]
    problem = tritile.plan(tritile.matmul, a, b, device=H200).problem
    assert (problem.a_layout, problem.a_align) == ("column", 16)
    odd = torch.empty(64, 41, dtype=torch.bfloat16, device="meta").mT
    assert rows._with_rows(problem, 41) == tritile.plan(tritile.matmul, odd, b, device=H200).problem


def test_batch_invariant_calls_are_planned_as_such(filled):
    requests, _ = filled
    with tritile.batch_invariant():
        tritile.warm(tritile.matmul, *product(300, 4096, 1024), device=H200, rows=[1, 300])
    assert {problem.invariant for problem, _ in requests[0]} == {True}


@pytest.mark.parametrize("numbers", [[], [0], [True], [2.0], 5, "12", [-3, 4]])
def test_rows_that_are_none_are_refused(filled, numbers):
    with pytest.raises(InvalidValueError, match=r"rows=.*whole numbers, 1 and more"):
        tritile.warm(tritile.matmul, *product(4, 64, 64), device=H200, rows=numbers)
    assert filled[0] == []


@pytest.mark.parametrize(
    ("arguments", "words", "wanted"),
    [
        ((tritile.transpose, torch.empty(8, 16)), {"device": H200, "rows": [4]}, "product of two matrices"),
        ((tritile.matmul, torch.empty(8, 8), torch.empty(8, 8)), {}, "tensors in host memory"),
        ((torch.addmm, torch.empty(8, 8)), {"device": H200}, "wanted tritile.matmul"),
        ((tritile.addmm, torch.empty(8, 8)), {"device": H200}, "addmm: missing a required argument: 'mat1'"),
        ((MatmulProblem(1, 8, 8, 8, "float16", "float16"),), {"device": "gpu"}, "device is 'gpu'"),
    ],
)
def test_other_input_is_refused(filled, arguments, words, wanted):
    with pytest.raises(InvalidValueError, match=wanted):
        tritile.warm(*arguments, **words)
    assert filled[0] == []


def test_what_is_done_in_place_is_refused(filled):
    x = torch.empty(8, 8)
    with pytest.raises(InvalidValueError, match="leave out= away"):
        tritile.warm(tritile.transpose, x, out=x, device=H200)


def test_strict_refuses_what_was_not_measured(filled):
    with tritile.mode("strict"), pytest.raises(NotTunedError):
        tritile.warm(MatmulProblem(1, 8, 8, 8, "float64", "float64"), device=H200)


def test_refusals_are_told(filled):
    filled[1].refused["4x4 with a config"] = "too large"
    with pytest.raises(TuningError, match="2 kernels are there; refused: 4x4 with a config: too large"):
        tritile.warm(tritile.matmul, *product(4, 64, 64), device=H200, rows=[4])


def test_other_gpus_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UnsupportedError, match="NVIDIA GPUs only"):
        tritile.warm(PermuteProblem.turned(1, 64, 64, 2), device="gfx942")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["halves-nn", "halves-nt"])
def test_what_is_compiled_of_a_class_is_all_that_its_sizes_launch(name):
    """Include calls whose operands are copied first."""
    first, *rest = drawn(name, 600, "compiled ahead")
    copies = [problem for problem in rest if any(copied(problem))]
    assert set(map(copied, copies)) == {(True, False), (False, True), (True, True)}
    compiled = kernels(list(rows.of_class(first, H200)))
    for problem in rest[:60] + copies:
        assert kernels(planned([problem])) <= compiled, problem.label


def test_a_decorated_kernel_is_compiled_with_its_planned_config(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    zeroed = []
    configs = [triton.Config(BLOCKS[1].kwargs, pre_hook=lambda named: zeroed.append(named["out"].dtype))]
    kernel = tritile.autotune(configs, ["n"])(_double)
    assert tritile.warm(kernel, meta(40), meta(40), n=40, device=H200) == 1
    (compiled,) = Path(tmp_path / "cache").rglob("_double.ttir")
    assert "tensor<32x" in compiled.read_text()
    assert zeroed == [meta(40).dtype]
    refused = tritile.autotune([triton.Config({"BLOCK": 33})], ["n"])(_double)
    with pytest.raises(TuningError, match=r"warm: _double n=40, BLOCK: 33.*power of 2"):
        tritile.warm(refused, meta(40), meta(40), 40, device=H200)
    with pytest.raises(UnsupportedError, match="NVIDIA GPUs only"):
        tritile.warm(kernel, meta(40), meta(40), 40, device="gfx942")
    for words, wanted in (({"rows": [1], "device": H200}, "rows= is for operations"), ({}, "host memory")):
        with pytest.raises(InvalidValueError, match=wanted):
            tritile.warm(kernel, torch.zeros(40), torch.zeros(40), 40, **words)
