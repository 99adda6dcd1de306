"""Check that README.md and docs/figures.md say what the committed lines say."""

import json
from pathlib import Path

import pytest

import benchmark_drawn
import benchmark_kinds as kinds
import figures
from tritile.lab.results import of_cases, stored

README = Path(kinds.HERE).parent / "README.md"


def test_every_committed_line_is_a_result():
    wrong = []
    assert stored([kinds.RESULTS], wrong.append)
    assert not wrong


def test_the_readme_has_the_table_that_the_command_prints():
    assert figures.readme_table() in README.read_text()


def test_sizes_that_are_not_in_the_table_count_as_untuned():
    found = {at: kind[0] for kind, _, at in kinds.by_table()}
    assert found["64x4096x4096"] == "invariance, tuned"
    assert found["65x4096x4096"] == "invariance, untuned"


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        ("even sizes", (8192, 8192), "float32"),
        ("even sizes", (4, 4096, 4096), "bfloat16"),
        ("odd sizes", (8191, 8192), "float32"),
        ("1-byte elements", (8192, 8193), "uint8"),
        ("thin shapes and rank 4 to 6", (128, 1048576), "float64"),
        ("thin shapes and rank 4 to 6", (64, 64, 64, 129), "float64"),
        ("small", (4096, 4096), "bfloat16"),
    ],
)
def test_permutations_count_where_they_belong(kind, shape, dtype):
    dims = [*reversed(range(len(shape)))]
    line = {"op": "permute", "suite": "permute", "dtype": dtype, "shape": [*shape], "dims": dims}
    assert kinds.permutation_kind(line) == kind


def test_the_page_of_benchmarks_is_what_the_command_writes():
    """Leave out the largest store of trials, whose predictions take as long as all else."""
    large = max(figures.STORES, key=lambda path: path.stat().st_size)
    written = figures.page(stores=[path for path in figures.STORES if path != large])
    lines = figures.PAGE.read_text().splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith(f"| {large.name} |")) == written


ENV = {"gpu": "NVIDIA X", "torch": "2.11", "triton": "3.6", "tritile": "0123456789ab"}


def written(folder, suite, lines):
    """Return the section of a suite, where one GPU has these lines."""
    (folder / "nvidia-x").mkdir()
    (folder / "nvidia-x" / f"{suite}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {name: benchmark_drawn.of_gpus(folder, name) for name in benchmark_drawn.TOLD}
    text = found.pop(suite)
    assert set(found.values()) == {"`nvidia-x`: no lines yet."}
    return text


def drawn(seed, n, ratio):
    sizes = {"op": "matmul", "dtype": "bfloat16", "layout": "NN", "m": 1, "n": n, "k": 64}
    return sizes | {"ratio_torch": ratio, "env": ENV | {"seed": seed}}


def test_the_last_three_draws_are_told_together_and_one_by_one(tmp_path):
    lines = [drawn("first", 8, 9.0), drawn("second", 8, 1.0), drawn("third", 8, 7.0), drawn("third", 8, 2.0)]
    lines += [drawn("fourth", 8, 4.0) | {"ratio_inductor": 0.5}, drawn("fourth", 12, 3.0)]
    text = written(tmp_path, "unseen", lines)
    assert "**NVIDIA X**, torch 2.11, triton 3.6, tritile at 0123456\n" in text
    for row in (
        "| aligned products | last 3 together | 3 | 2.00 | 1.00 | 0 | 1.00 | 1x8x64 |",
        "| aligned products | third | 1 | 2.00 | 2.00 | 0 | 2.00 | 1x8x64 |",
        "| some, beside max-autotune | fourth | 1 | 0.50 | 0.50 | 1 | 0.50 | 1x8x64 |",
        "| ragged products | fourth | 1 | 3.00 | 3.00 | 0 | 3.00 | 1x12x64 |",
    ):
        assert row in text
    assert "first |" not in text


def test_every_kind_that_loses_is_told_with_what_to_use_instead():
    """Gather the kinds from the other tables of the page, and look for each in this one."""
    lines = of_cases(stored([kinds.RESULTS], print))
    shown = kinds.rows(lines, kinds.by_table())
    here = [row[1:] for row in kinds.losses(kinds.HERE / "results") if row[0] == "nvidia-h200"]
    losing = [row for row in here if not row[0].startswith(("one weight", "models"))]
    assert {row[:3] for row in losing} >= {row[:3] for row in shown if float(row[4]) < 0.995}
    assert all(float(row[4]) < 1 for row in here)
    for row in losing:
        (other,) = (cells for cells in shown if cells[:3] == row[:3])
        assert (row[3], *row[5:8]) == (other[3], *other[5:])
    assert kinds.OTHERWISE not in {row[-1] for row in here}  # kinds that lose have advice of their own


def test_losses_of_one_weight_and_of_models_are_told(tmp_path):
    line = {
        "mode": "cached",
        "size": 64,
        "process": "from nothing",
        "rows": [3, 5],
        "ratio_torch": [0.5, 0.9],
    }
    model = {"process": "first", "mode": "eager", "what": "train", "model": "gpt2", "ratio": 0.25}
    (tmp_path / "nvidia-x").mkdir()
    for name, found in (("rows", line | {"op": "rows"}), ("models", model | {"op": "models"})):
        (tmp_path / "nvidia-x" / f"{name}.jsonl").write_text(json.dumps(found) + "\n")
    models, weight = kinds.losses(tmp_path)
    assert models[:9] == (
        "nvidia-x", "models, first process", "eager", "train", "1", "0.250", "1", "0.25", "gpt2",
    )  # fmt: skip
    assert weight[:9] == (
        "nvidia-x", "one weight, any rows", "bfloat16", "NT", "2", "0.671", "2", "0.50", "3x64x64",
    )  # fmt: skip
    assert "mode `tune`" in models[-1]
    assert kinds.advice(("new", "float16", "NN")) == kinds.OTHERWISE
