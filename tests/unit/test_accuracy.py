"""How far products are from exact: that the figures are what they say."""

import json

import pytest
import torch

from tests.commands import run
from tritile.lab.report import accuracy as measured

UNIT = 2.0**-24


def found(dtype, precision, name, **changes):
    return measured.accuracy(dtype, precision, name, changes.get("n", 32), changes.get("k", 40), "cpu")


@pytest.mark.parametrize(("dtype", "precision", "name", "k"), measured.cases(("float32", "complex64"), (40,)))
def test_products_in_fp32_err_little(dtype, precision, name, k):
    one = found(dtype, precision, name)
    assert one.differing == 0
    if name in measured.FINITE:
        assert one.worst is not None
        inputs = 2.0**-10 + 2.0**-22 if precision == "tf32" else 0.0  # each rounded to 11 bits
        assert one.worst < (one.bound or 2 * (k + 3) * UNIT + inputs)
        assert one.torch_worst is not None
        assert one.torch_worst < 2 * (k + 3) * UNIT


@pytest.mark.parametrize("name", measured.FINITE)
def test_64_bits_are_told_from_53(name):
    one = found("float64", "ieee", name)
    assert one.worst is not None
    assert 0 < one.worst < 43 * 2.0**-53


def test_whole_numbers_are_exact():
    one = found("int8", "", "normal")
    assert (one.error, one.worst, one.torch_error) == (0, 0, 0)


@pytest.mark.parametrize("name", ["NaN", "infinite"])
def test_what_is_no_number_is_counted_where_torch_has_another(name, monkeypatch):
    monkeypatch.setattr(measured, "_ours", lambda a, b, precision: (a @ b).nan_to_num(0, 1, 1))
    one = found("float32", "ieee", name)
    assert one.differing >= 32
    assert one.error is None


def test_an_error_is_found_and_of_the_size_that_it_has(monkeypatch):
    def off(a, b, precision):
        out = a @ b
        out[3, 4] += 0.25 * (a[3].abs() @ b[:, 4].abs())
        return out

    monkeypatch.setattr(measured, "_ours", off)
    assert found("float32", "ieee", "normal").worst == pytest.approx(0.25, rel=1e-5)


def test_graded_data_span_much_and_their_terms_little():
    a, b = measured.FINITE["graded"](torch.ones(4, 60), torch.ones(60, 4))
    assert float(a.max() / a.min()) > 2.0**58
    assert torch.equal(a * b.mT, torch.ones(4, 60))


def test_the_command_tells_and_appends(tmp_path):
    path = tmp_path / "deep" / "accuracy.jsonl"
    asked = ["accuracy", "--dtype", "float16", "--n", "32", "--k", "16", "--k", "17", "--output", path]
    for _ in range(2):
        told = run(*asked)
        assert told.exit_code == 0, told.output
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["data"], line["k"]) for line in lines[:4]] == [
        ("normal", 16), ("normal", 17), ("uniform", 16), ("uniform", 17)
    ]  # fmt: skip
    assert len(lines) == 8


def test_the_command_folds_no_word_that_80_columns_hold(monkeypatch, recwarn):
    shown = [
        ("complex128", "ieee", "log-normal"),
        ("float32", "fp16x3", "badly ranged"),
        ("float64", "ieee", "denormal"),
    ]
    monkeypatch.setattr(measured, "cases", lambda dtypes, depths: [(*each, 16) for each in shown])
    told = run("accuracy", "--n", "32", "--k", "16", env={"COLUMNS": "80"})
    assert "complex128" in told.output
    assert "log-normal" in told.output
    assert recwarn.list == []  # the title says that a CPU computed
