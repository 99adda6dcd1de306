"""README.md and docs/benchmarks.md say what the committed lines say; figures of the scripts of tuning/."""

import argparse
import json
import subprocess
import sys

import pytest

import benchmark_drawn
import benchmark_kinds as kinds
import figures
import models
import plots
from benchmark_results import of_cases, stored


def test_every_committed_line_is_a_result():
    wrong = []
    assert stored([kinds.RESULTS], wrong.append)
    assert not wrong


def test_readme_and_benchmarks_are_written():
    """Of the stores of trials take the smallest: predictions of the others take as long as all else."""
    assert figures.README.read_text() == figures.readme()
    small, *others = sorted(figures.STORES, key=lambda path: path.stat().st_size)
    left_out = tuple(f"| {path.name} |" for path in others)
    lines = figures.PAGE.read_text().splitlines(keepends=True)
    assert "".join(line for line in lines if not line.startswith(left_out)) == figures.page(stores=[small])


def test_first_page_is_written():
    assert figures.INDEX.read_text() == figures.index()


def test_answers_of_gpus(tmp_path):
    wanted = "all | op == 'matmul'\nnone | op == 'grouped'"
    for name in ("nvidia-h100-80gb-hbm3", "nvidia-h200"):
        (tmp_path / name).symlink_to(kinds.RESULTS.parent / name)
    rows = list(kinds.answers(tmp_path, wanted))
    assert [row[:2] for row in rows] == [("all", "H200"), ("all", "H100"), ("none", "H200")]
    assert [kinds.answer(mean) for mean in (0.94, 0.96, 1.04, 1.06)] == [
        "no", "about as fast", "about as fast", "yes"
    ]  # fmt: skip


def test_picture_of_rates_is_drawn():
    assert plots.PICTURE.read_text() == plots.picture()


def test_dots_and_medians_of_octaves():
    more = {"suite": "unseen", "precision": "ieee", "m": 64}
    lines = [drawn("one", 8, 2.0, tflops=rate, **more) for rate in (8.0, 2.0, 4.0)]
    lines += [drawn("one", 9, 0.5, tflops=6.0, **more), {"op": "permute"}]
    found = {(one.who, one.kind): one for one in plots.untuned(lines)}
    size = pytest.approx(32.0)
    assert found["tritile", "aligned"].line == [(size, 4.0)]
    assert found["torch", "aligned"].dots == [(size, 4.0), (size, 1.0), (size, 2.0)]
    assert found["torch", "ragged"].dots == [(pytest.approx(33.28, 0.01), 12.0)]
    assert found["torch", "ragged"].line == []


def test_labels_apart_and_inside():
    ends = [(90.0, 12.0), (100.0, 14.0), (95.0, 200.0), (97.0, 198.0), (5.0, 100.0)]
    found = plots.labels(ends, 10, 200, 100)
    assert found == [(106, 16), (106, 32), (106, 200), (106, 184), (5, 122)]


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
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


def test_losing_kinds_are_listed():
    """Gather the kinds from the other tables of the page, and look for each in this one."""
    shown = kinds.rows(of_cases(stored([kinds.RESULTS], print)))
    here = [(*row[2:], row[1]) for row in kinds.losses(kinds.HERE / "results") if row[0] == "nvidia-h200"]
    losing = {row[:3]: row for row in here if not row[0].startswith(("one weight", "models"))}
    assert losing.keys() >= {row[:3] for row in shown if min(map(float, row[4:6])) < 0.995}
    assert all(min(map(float, row[4:6])) < 1 for row in here)
    others = {row[:3]: row for row in shown}
    for kind, row in losing.items():
        assert (row[3], *row[6:9]) == (others[kind][3], *others[kind][6:])
    assert kinds.OTHERWISE not in {row[-1] for row in here}  # kinds that lose have advice of their own
    assert kinds.advice(("new", "float16", "NN")) == kinds.OTHERWISE


def drawn(seed, n=8, ratio=1.0, how="by size", **more):
    env = {"gpu": "NVIDIA X", "torch": "2.11", "triton": "3.6", "tritile": "0123456789ab", "seed": seed}
    sizes = {"op": "matmul", "dtype": "bfloat16", "layout": "NN", "m": 1, "n": n, "k": 64}
    times = {"torch_us": ratio, "tritile_us": 1.0, "triton_us": 2.0}
    return sizes | times | {"ratio_torch": ratio, "env": env | {"drawn": how}} | more


def test_last_three_draws_shown(tmp_path):
    lines = [drawn("first", 8, 9.0), drawn("second", 8, 1.0), drawn("third", 8, 7.0), drawn("third", 8, 2.0)]
    lines += [drawn("fourth", 8, 4.0, inductor_us=0.5), drawn("fourth", 12, 3.0)]
    lines += [drawn("fourth", 40, 80.0, "by time", tritile_us=100.0)]
    (tmp_path / "nvidia-x").mkdir()
    (tmp_path / "nvidia-x" / "unseen.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert benchmark_drawn.of_gpus(tmp_path, "rows") == "`nvidia-x`: no lines yet."
    text = benchmark_drawn.of_gpus(tmp_path, "unseen")
    assert "**NVIDIA X**, torch 2.11, triton 3.6, tritile at 0123456\n" in text
    for row in (
        "| aligned products | last 3 together | 4 | 0.84 | 2.00 | 1.00 | 1 | 0.80 | 1x40x64 |",  # 87 / 103
        "| aligned products | third | 1 | 2.00 | 2.00 | 2.00 | 0 | 2.00 | 1x8x64 |",
        "| aligned products, tritile's own kernels | third | 1 | 1.00 | 1.00 | 1.00 | 0 | 1.00 | 1x8x64 |",
        "| aligned products, compared with max-autotune | fourth | 1 | 0.50 | 0.50 | 0.50 | 1 | 0.50 |",
        "| ragged products | fourth | 1 | 3.00 | 3.00 | 3.00 | 0 | 3.00 | 1x12x64 |",
    ):
        assert row in text
    assert "first |" not in text


def test_classes_of_roof_add_up():
    """One product by arithmetic, one by memory: 800 TFLOP/s, and 4240 GB/s of an H200's 4800."""
    large, thin = {"m": 4096, "n": 4096, "k": 4104}, {"m": 1, "n": 8192, "k": 8192}
    more = {"suite": "unseen", "precision": "ieee", "batch": 1}
    lines = [
        drawn("one", ratio=300.0, tritile_us=200.0, triton_us=400.0, **more | large),
        drawn("one", ratio=100.0, tritile_us=100.0, triton_us=50.0, **more | thin),
    ]
    assert list(benchmark_drawn.classes(lines, 4800.0)) == [
        ("compute-bound, over 100 us", "1", "75%", "0.57", "0.86", "0.43", "1.500", "0.750"),
        ("memory-bound, 10 to 100 us", "1", "25%", "0.32", "0.32", "0.63", "1.000", "2.000"),
        (benchmark_drawn.PITCHED, "1", "75%", "0.57", "0.86", "0.43", "1.500", "0.750"),
    ]


def test_permutation_compared_with_copy():
    line = {"op": "permute", "shape": [8, 8], "dims": [1, 0], "tritile_us": 10.0, "gbps": 300.0}
    lines = [line | {"dtype": "uint8", "copy_gbps": 600.0}, line | {"dtype": "bool", "copy_gbps": 150.0}]
    lines += [line | {"dtype": "int64", "copy_gbps": 300.0}]
    assert list(benchmark_drawn.permuted(lines)) == [
        ("1", "2", "1.25", "1.00", "0.50", "1", "0.50", "8x8"),
        ("8", "1", "1.00", "1.00", "1.00", "0", "1.00", "8x8"),
    ]


def test_interval_of_models():
    """It holds the ratio, is repeatable, and forgives a pair that was disturbed."""
    off = [1.00, 1.01, 0.99, 1.02, 0.98, 1.00, 1.01, 0.99, 1.00]
    found = models.compared(off, [1.0] * 9)
    assert 0.98 <= found["low"] < found["ratio"] == 1.0 < found["high"] <= 1.02
    assert models.compared(off, [1.0] * 9) == found
    assert models.compared([*off[:-1], 5.0], [1.0] * 9)["high"] < 1.03
    found = models.compared([3.0] * 9, [2.0] * 9)
    assert found == {"torch_ms": 3.0, "tritile_ms": 2.0, "ratio": 1.5, "low": 1.5, "high": 1.5}


def test_sides_take_turns(monkeypatch):
    monkeypatch.setattr(models, "SECONDS", 0.0)  # an iteration a time
    order = []
    found = models.measured({side: lambda side=side: order.append(side) for side in models.SIDES}, 3)
    first, second = models.SIDES
    turn, other = [first, first, second, second], [second, second, first, first]
    assert order == ["torch"] * 3 + turn + other + turn  # first: how long an iteration takes
    assert (found["turns"], found["iterations"]) == (3, 1)


@pytest.mark.parametrize(("status", "ended"), [(0, True), (1, False)])
def test_process_caches_and_lines(monkeypatch, status, ended):
    asked = argparse.Namespace(turns=9, what=["forward"], compiled=True, small=False, tune=True)
    seen = []

    def run(command, env, **rest):
        seen.append((command, env))
        return subprocess.CompletedProcess(command, status, stdout='told\n{"what": "forward"}\n')

    monkeypatch.setattr(models.subprocess, "run", run)
    wanted = {"op": "models", "model": "bert", "process": "later", "what": "forward"}
    assert models.lines_of("bert", "later", asked, "/caches") == ([wanted], ended)
    ((command, env),) = seen
    assert command[2:] == ["--one", "bert", "--turns", "9", "--what", "forward", "--compiled", "--tune"]
    caches = {"TRITON": "/caches/bert/TRITON", "TORCHINDUCTOR": "/caches/bert/TORCHINDUCTOR"}
    caches |= {"TRITILE": "/caches/TRITILE"}
    assert {name: env[f"{name}_CACHE_DIR"] for name in caches} == caches


def test_that_transformers_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", ["models.py", "--small"])
    with pytest.raises(SystemExit, match="needs transformers: pip install transformers"):
        models.main()
