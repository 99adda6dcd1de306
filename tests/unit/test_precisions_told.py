"""What errors and plans say of a product's precision."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tritile
from tritile.core.device import target_device
from tritile.core.precision import error_words, explained, meaning
from tritile.core.problem import PRECISIONS_OF, GroupedProblem, MatmulProblem, error_bound
from tritile.errors import InvalidValueError
from tritile.ops import asked, products, run
from tritile.planning import plans, torch_times

HOPPER = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 1024, 1024, 1024, "float32", "float32")  # in the H200's table


def test_every_precision_has_a_meaning_of_its_own():
    for dtype, names in PRECISIONS_OF.items():
        assert len({meaning(name, dtype) for name in names}) == len(names)
        assert explained(names, dtype).count(": ") == len(names)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: tritile.matmul(x, x, precision="tf16"),
        lambda x: tritile.gated_linear(x, x, x, precision="tf16"),
        lambda x: tritile.grouped_matmul(x[None], x[None], precision="tf16"),
    ],
)
def test_an_unknown_precision_is_told_what_there_is(call):
    with pytest.raises(
        InvalidValueError, match=r"'tf16': wanted one of ieee, .* \(ieee: plain fp32; .*tf32: one"
    ):
        call(torch.ones(16, 16))


def test_errors_in_words_are_those_of_the_bounds():
    assert error_words("fp16x3", 4096, 90) == f"error within {error_bound(4096):.0e} of |a| |b|"
    assert error_words("fp16x3", 4096, 80) == "error near fp32's", "the bound is Hopper's"
    assert error_words("tf32", 4096, 80) == "error about 1e-03 of |a| |b|"


def test_a_plan_says_what_its_precision_means():
    plan = plans.plan_for(PROBLEM, HOPPER)
    assert repr(plan).endswith("\n  means   ieee: plain fp32; error at most torch's fp32")
    assert "error at most torch" in plan._repr_html_()
    halves = replace(PROBLEM, dtype="bfloat16", out_dtype="bfloat16")
    assert "means" not in repr(plans.plan_for(halves, HOPPER))
    groups = GroupedProblem("m", 4, 256, 256, 256, "float32", "float32", precision="tf32")
    assert repr(plans.plan_for(groups, HOPPER)).endswith("means   tf32: one product in TF32 on tensor cores")


@pytest.fixture
def launched(monkeypatch):
    """Have calls on host tensors go as on an H200, but for the launch; return the warnings of a call."""
    monkeypatch.setattr(run, "_warned", set())
    monkeypatch.setattr(run.devices, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(asked, "on_host", lambda tensor: False)
    monkeypatch.setattr(run.launch, "prepare", lambda call, config: lambda *tensors: None)
    monkeypatch.setattr(asked, "remember", lambda *given: None)
    monkeypatch.setattr(products, "default_precision", lambda: "none")

    def told(m, n, k, **words):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tritile.matmul(torch.empty(m, k), torch.empty(k, n), **words)
        return [each for each in caught if each.category is tritile.errors.PrecisionWarning]

    return told


def test_a_default_that_is_slower_than_torch_is_told_of_once(launched):
    assert launched(1024, 1024, 1024, precision="ieee") == []
    assert launched(512, 512, 512) == []
    (told,) = launched(1024, 1024, 1024)
    assert "1024x1024x1024" in str(told.message)
    assert told.filename == __file__
    assert launched(1024, 1024, 1024) == []


def test_a_precision_that_torch_is_set_to_is_no_default(launched, monkeypatch):
    monkeypatch.setattr(products, "default_precision", lambda: "ieee")
    assert launched(1024, 1024, 1024) == []


def test_what_was_measured_of_a_product_says_whether_torch_is_faster(monkeypatch):
    small = replace(PROBLEM, m=600, n=600, k=600)
    assert torch_times.slower_than_torch(PROBLEM, HOPPER)
    assert not torch_times.slower_than_torch(PROBLEM, target_device("sm_80")), "nobody measured there"
    for tritile_us, torch_us, slower in ((100, 70, True), (100, 90, False), (30, 15, False)):
        times = torch_times.Times(tritile_us, torch_us)
        monkeypatch.setattr(torch_times, "measured", lambda *given, times=times: times)
        for device in (HOPPER, target_device("sm_80")):
            assert [torch_times.slower_than_torch(each, device) for each in (PROBLEM, small)] == [slower] * 2
    assert not torch_times.slower_than_torch(replace(PROBLEM, invariant=True), HOPPER)


def test_on_hopper_torch_was_faster_at_every_large_size_that_was_measured():
    """The rule for sizes that were not measured."""
    found = []
    for file in (ROOT / "tuning/results/nvidia-h200").glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            plain = {"op": "matmul", "dtype": "float32", "precision": "ieee"}.items() <= line.items()
            if plain and line["torch_us"]:
                sizes = (line[name] for name in ("batch", "m", "n", "k"))
                large = torch_times.slower_than_torch(MatmulProblem(*sizes, "float32", "float32"), HOPPER)
                found += [line["torch_us"] / line["tritile_us"]] * large
    assert len(found) > 20
    assert max(found) < 0.81


ROOT = Path(tritile.__file__).parents[1]


def committed(name, **wanted):
    """Return the newest line of a committed file with these fields."""
    lines = (json.loads(line) for line in (ROOT / "tuning" / name).read_text().splitlines())
    return [line for line in lines if wanted.items() <= line.items()][-1]


@pytest.mark.parametrize("precision", PRECISIONS_OF["float32"])
def test_figures_of_the_page_are_committed(precision):
    row = rf"^\| {precision} \| (.*) \| (.*) \| (.*) \| (.*) \|$"
    (shown,) = re.findall(row, (ROOT / "docs/fp32.md").read_text(), re.MULTILINE)
    wanted = {"dtype": "float32", "precision": precision}
    if precision == "tf32x3":
        assert set(shown) == {"not measured"}
        return
    suite = "square" if precision == "ieee" else "fp32"
    size = {"layout": "NN", "m": 4096, "n": 4096, "k": 4096}
    of = committed(f"results/nvidia-h200/{suite}.jsonl", **wanted, **size)
    assert list(shown[:2]) == [f"{of[name]:.0f}" for name in ("tritile_us", "torch_us")]
    errors = [f"{of[name]:.1e}".replace("e-0", "e-") for name in ("error", "torch_error")]
    assert list(shown[2:]) == errors
