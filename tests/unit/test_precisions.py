"""The precision of products: which one where none is named, and what errors and plans say of it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tritile
from tritile.choose import pick
from tritile.choose.pick import error_words
from tritile.core.device import target_device
from tritile.core.problem import GroupedProblem, MatmulProblem
from tritile.families import numerics
from tritile.families.fp16x3.lowering import error_bound, suits_fp16x3
from tritile.nn.exchanged import PARTS_AHEAD
from tritile.ops.request import request_of

HOPPER = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 1024, 1024, 1024, "float32", "float32")  # in the H200's table
LARGE = (2048, 2048, 384)


def operands(m, n, k, dtype=torch.float32):
    return torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")


def precision_of(a, b, precision=None):
    return request_of("matmul", a, b, None, precision).checked(None)[2]


def of_layer(op="linear"):
    x, weight = torch.empty(3, 1024, 400, device="meta"), torch.empty(4096, 400, device="meta")
    more = (weight,) if op == "gated_linear" else (None, "gelu")
    return request_of(op, x, weight, *more).checked(None)[2]


@pytest.fixture
def unset(cuda_matmul):
    cuda_matmul.fp32_precision = "none"


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("sizes", [LARGE, (1717, 8026, 8404), (64, 64, 64)])
def test_parts_only_on_request(sizes, monkeypatch):
    a, b = operands(*sizes)
    found = tritile.plan("matmul", a, b, device=HOPPER)
    assert (precision_of(a, b), of_layer(), found.problem.precision) == ("ieee", "ieee", "ieee")
    with tritile.mode(fp32="fp16x3"):
        found = tritile.plan("matmul", a, b, device=HOPPER)
        assert (precision_of(a, b), of_layer(), found.problem.precision) == ("fp16x3", "fp16x3", "fp16x3")
        with tritile.mode(fp32="torch"):
            assert precision_of(a, b) == "ieee"
    assert tritile.mode(fp32="fp16x3")(precision_of)(a, b) == "fp16x3"
    monkeypatch.setenv("TRITILE_FP32", "fp16x3")
    assert (precision_of(a, b), of_layer()) == ("fp16x3", "fp16x3")
    assert tritile.mode(fp32="torch")(precision_of)(a, b) == "ieee"


@pytest.mark.parametrize("named", ["ieee", "tf32"])
def test_named_precision_first(cuda_matmul, named):
    """Before the mode, and that before torch's setting."""
    assert precision_of(*operands(*LARGE), named) == named
    cuda_matmul.fp32_precision = named
    assert precision_of(*operands(*LARGE)) == named
    with tritile.mode(fp32="fp16x3"):
        assert precision_of(*operands(*LARGE)) == "fp16x3"
        assert precision_of(*operands(*LARGE), "ieee") == "ieee"


@pytest.mark.usefixtures("unset")
def test_products_follow_torch_setting():
    with tritile.mode(fp32="fp16x3"):
        with tritile.batch_invariant():
            assert precision_of(*operands(*LARGE)) == "ieee"
        assert of_layer("gated_linear") == "ieee"
        for dtype in (torch.float16, torch.float64):
            assert precision_of(*operands(*LARGE, dtype)) == "ieee"


def test_a_problem_says_the_same():
    problem = MatmulProblem(1, *LARGE, "float32", "float32")
    halves = MatmulProblem(1, *LARGE, "float16", "float16")
    assert numerics.with_default_precision(problem) is problem
    with tritile.mode(fp32="fp16x3"):
        assert numerics.with_default_precision(problem).precision == "fp16x3"
        assert numerics.with_default_precision(numerics.as_invariant(problem)).precision == "ieee"
        assert numerics.with_default_precision(replace(problem, precision="tf32")).precision == "tf32"
        assert numerics.with_default_precision(halves) is halves


def test_error_words_are_bounds():
    assert error_words("fp16x3", 4096, 90) == f"error within {error_bound(4096):.0e} of |a| |b|"
    assert error_words("fp16x3", 4096, 80) == "error near fp32's", "the bound is Hopper's"
    assert error_words("tf32", 4096, 80) == "error about 1e-03 of |a| |b|"


def test_plan_says_precision():
    plan = pick.plan_for(PROBLEM, HOPPER)
    assert repr(plan).endswith("\n  means   ieee: plain fp32; error at most torch's fp32")
    assert "error at most torch" in plan._repr_html_()
    halves = replace(PROBLEM, dtype="bfloat16", out_dtype="bfloat16")
    assert "means" not in repr(pick.plan_for(halves, HOPPER))
    groups = GroupedProblem(4, 256, 256, 256, "float32", "float32", precision="tf32")
    assert repr(pick.plan_for(groups, HOPPER)).endswith("means   tf32: one product in TF32 on tensor cores")


ROOT = Path(tritile.__file__).parents[1]


def test_fp16x3_halves_torch_time():
    """By which `convert` exchanges layers in fp32."""
    found = []
    for file in (ROOT / "tuning/results").glob("*/fp32.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["precision"] == "fp16x3" and suits_fp16x3(line["m"], line["n"], line["k"]):
                found.append(line["torch_us"] / line["tritile_us"])
    assert len(found) >= 8
    assert min(found) > PARTS_AHEAD


def committed(name, **wanted):
    """Return the newest line of a committed file with these fields."""
    lines = (json.loads(line) for line in (ROOT / "tuning" / name).read_text().splitlines())
    return [line for line in lines if wanted.items() <= line.items()][-1]


@pytest.mark.parametrize("precision", ["fp16x3", "tf32"])
def test_figures_of_the_page_are_committed(precision):
    row = rf"^\| {precision} \| (.*) \| (.*) \| (.*) \| (.*) \|$"
    (shown,) = re.findall(row, (ROOT / "docs/fp32.md").read_text(), re.MULTILINE)
    wanted = {"dtype": "float32", "precision": precision}
    size = {"layout": "NN", "m": 4096, "n": 4096, "k": 4096}
    of = committed("results/nvidia-h200/fp32.jsonl", **wanted, **size)
    assert list(shown[:2]) == [f"{of[name]:.0f}" for name in ("tritile_us", "torch_us")]
    errors = [f"{of[name]:.1e}".replace("e-0", "e-") for name in ("error", "torch_error")]
    assert list(shown[2:]) == errors
