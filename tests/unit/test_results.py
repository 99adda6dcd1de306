"""Results: what a line holds, that files survive being cut off, what they sum up to, and reports of them.

tests/browser opens the page of a report.
"""

import json
import math
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

import report
from bench import print_results, print_summary
from benchmark_results import (
    append,
    case_of,
    host_result,
    of_cases,
    read,
    result,
    summary,
)
from tests.commands import run
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.errors import InvalidValueError
from tritile.lab.bench import BenchResult
from tritile.lab.environment import environment
from tritile.tune.suites import parse_shape

ENV = {
    "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "driver": "1.2", "tritile": "abc",
    "time": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
H200 = target_device("nvidia-h200")
CONFIG = Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=8)
HOST = host_result("matmul(a, b)", 8.0, 10.0, ENV)


def line(text="64x64x64", ratio=2.0, us=100.0, measured=(), env=(), **case):
    """Return the result of a case; `ratio` is torch's time by tritile's."""
    rest = {
        "spread": 0.01, "error": 1e-3, "torch_error": 2e-3, "copy_gbps": None,
        "config": CONFIG, "source": "exact",
    }  # fmt: skip
    posed = parse_shape(text, **({"suite": "square"} | case))
    found = BenchResult(posed.problem, H200, us, us * ratio, **(rest | dict(measured)))
    return result(posed, found, ENV | dict(env))


def transposed(ratio=1.5, copy_gbps=2500.0):
    exact = {"copy_gbps": copy_gbps, "error": 0.0, "torch_error": 0.0}
    return line("1000x2000", ratio, 8.0, exact, op="permute", dtype="float32", suite="transpose")


def printed(lines, show=print_results):
    console = Console(file=StringIO(), width=250)
    show(lines, console)
    return console.file.getvalue()


def test_product_and_permutation_lines():
    found = line(
        "8x1000x500x200", us=10.0, measured={"others_us": {"inductor": 5.0}}, layout="NT", suite="given"
    )
    said = {
        "op": "matmul", "suite": "given", "dtype": "bfloat16", "layout": "NT", "batch": 8, "m": 1000,
        "n": 500, "k": 200, "ratio_torch": 2.0, "ratio_inductor": 0.5, "config": CONFIG.to_dict(),
        "tflops": 160.0,  # 2 * 8 * 1000 * 500 * 200 operations in 10 us
    }  # fmt: skip
    assert found | said == found
    assert not {"shape", "dims", "gbps", "copy_gbps"} & set(found)
    found = transposed()
    none = dict.fromkeys(("layout", "precision", "inductor_us", "ratio_inductor"))
    said = {"shape": [1000, 2000], "dims": [1, 0], "copy_gbps": 2500.0} | none
    assert found | said | {"gbps": 2000.0} == found  # 2 * 8 MB in 8 us
    assert not {"m", "n", "k", "batch", "tflops"} & set(found)


def test_sides_come_back(tmp_path):
    sides = {
        "torch_call": "matmul", "torch_calls": {"matmul": 20.0, "torch.compile": 21.0},
        "spreads": {"torch": 0.0}, "samples": 40, "launches": 3,
    }  # fmt: skip
    new, path = line(measured=sides), tmp_path / "gpu" / "given.jsonl"
    old = line(measured={})
    assert sides.items() <= new.items()
    assert not sides.keys() & old.keys()
    lines = [old, new, transposed(), transposed(copy_gbps=None), HOST]
    for part in (lines[:1], [], lines[1:]):
        append(path, part)
    of_scripts = [{"op": op, "m": 1} for op in ("models", "rows", "searches")]  # which are passed over
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in of_scripts)
    assert read(path, pytest.fail) == lines
    assert case_of(lines[2]) == parse_shape("1000x2000", op="permute", dtype="float32", suite="transpose")
    fused = replace(parse_shape("64x64x64"), epilogue="bias=row relu")
    times = 1.0, 2.0, 0.0, 0.0, 0.0, None
    found = result(fused, BenchResult(fused.problem, H200, *times, CONFIG, "exact"), ENV)
    assert case_of(found) == fused


def test_truncated_last_line(tmp_path):
    path, messages = tmp_path / "square.jsonl", []
    lines = [line(f"{size}x64x64") for size in (64, 128, 256)]
    append(path, lines[:2])
    path.write_bytes(path.read_bytes()[:-40])
    append(path, lines[2:])
    assert read(path, messages.append) == [lines[0], lines[2]]
    assert "1 of 4 lines skipped; line 2: " in messages[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "conv"}, {"op": ["matmul"]}, {"m": 0}, {"m": "64"}, {"m": True}, {"dtype": "half"},
        {"layout": None}, {"precision": ["x"]}, {"torch_us": None}, {"ratio_torch": -1}, {"tflops": None},
        {"tritile_us": math.nan}, {"tritile_us": 10**400}, {"inductor_us": 3.0}, {"inductor_us": 0.0},
        {"copy_gbps": -1.0}, {"config": {"kwargs": 1}},
        {"env": {}}, {"env": None}, {"plan_source": ""}, {"plan_source": 7}, HOST | {"env": {}},
        {"spread": "?"}, {"error": math.inf}, HOST | {"call": ""}, HOST | {"torch_us": None},
    ],
    ids=str,
)  # fmt: skip
def test_foreign_lines_skipped(tmp_path, changes):
    path, messages = tmp_path / "square.jsonl", []
    path.write_text(json.dumps(line() | changes) + "\n" + json.dumps(line()) + "\n")
    assert read(path, messages.append) == [line()]
    assert len(messages) == 1
    with pytest.raises(InvalidValueError):
        append(path, [line() | changes])


def test_garbage_is_skipped(tmp_path):
    path, told = tmp_path / "square.jsonl", []
    lines = b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b'{"op": "matmul"}'
    path.write_bytes(b"\n\n".join(lines))
    assert read(path, told.append) == []
    assert "5 of 9 lines skipped" in told[0]


def test_last_result_counts():
    first, again, other = line(ratio=0.5), line(ratio=3.0), line("128x64x64")
    elsewhere = line(env={"gpu": "Other"})
    assert of_cases([first, HOST, other, again, elsewhere]) == [again, other, elsewhere]
    assert (HOST["suite"], HOST["ratio_torch"], summary([HOST])) == ("host", 1.25, [])


def test_summary():
    sizes = ("64x64x64", 0.1), ("64x64x64", 0.5), ("128x64x32", 4.0), ("256x64x64", 4.0)
    rows = summary([*(line(*each) for each in sizes), line(layout="NT"), transposed(1.25)])
    assert [(row.suite, row.dtype, row.layout, row.count) for row in rows] == [
        ("square", "bfloat16", "NN", 3),
        ("square", "bfloat16", "NT", 1),
        ("transpose", "float32", "", 1),
    ]
    assert rows[0].geomean == pytest.approx(2.0)  # the cube root of 0.5 * 4 * 4
    assert (rows[0].worst, rows[0].worst_label, rows[0].behind) == (0.5, "64x64x64", 1)
    assert (rows[2].geomean, rows[2].worst_label, rows[2].behind) == (pytest.approx(1.25), "1000x2000", 0)


def test_times_summed_draws_left_out():
    """100 us of torch's in each: tritile's 50 and 200, and 125 drawn by time."""
    lines = [line("64x64x64", 2.0, 50.0), line("128x64x32", 0.5, 200.0)]
    lines.append(line("256x64x64", 0.8, 125.0, env={"drawn": "by time"}))
    (row,) = summary(lines)
    assert row.by_time == pytest.approx(300 / (50 + 200 + 125))
    assert (row.count, row.geomean, row.behind) == (3, pytest.approx(1.0), 2)
    (alone,) = summary(lines[2:])
    assert alone.geomean == pytest.approx(0.8)


def test_baseline_where_measured():
    by_inductor = {"others_us": {"inductor": 50.0}}
    lines = [
        line(measured=by_inductor),
        line(ratio=6.0, env={"time": "2027-01-01T00:00:00+00:00"}),
        line("8x8x8", 7.0),
    ]
    (row,) = summary(lines, "inductor")
    assert (row.count, row.worst, row.worst_label, row.behind) == (1, 0.5, "64x64x64", 1)
    (row,) = summary(lines)
    assert (row.worst, row.count) == (6.0, 2)


def test_results_are_printed_as_a_table():
    text = printed([line(ratio=0.5), transposed()])
    assert re.search(r"64x64x64 .*square .*NN .*bfloat16 .* 100\.00 .* 50\.00 .* 0\.500 .* TFLOP/s", text)
    assert re.search(r"1000x2000 .*transpose .*float32 .* 2000 GB/s \(80% of copy\)", text)
    assert "no results" in printed([HOST])
    alike = printed([line(), line("128x64x32")])
    assert alike.splitlines()[0].strip().endswith("square, bfloat16, NN")
    for show in (print_results, print_summary):
        assert "a[/b]" in printed([line(suite="a[/b]")], show)  # no markup


def test_environment():
    env = environment(H200)
    assert env["gpu"] == "NVIDIA H200"
    assert env["tritile"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", env["time"])
    assert set(env) == set(ENV)


REPORTED = [
    line("64x64x64", measured={"others_us": {"inductor": 150.0}}),
    line("128x64x64", 0.5),
    line("128x64x64", 0.25),  # later: it counts
    transposed(4.0),
    line("64x64x64", 9.0, env={"gpu": "another"}),
]


def test_report_rows_are_last_results():
    rows = report.rows_of(REPORTED, "NVIDIA H200")
    names = ("problem", "baseline", "ratio", "band", "layout")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("64x64x64", "torch", 2.0, "square", "NN"),
        ("64x64x64", "inductor", 1.5, "square / inductor", "NN"),
        ("128x64x64", "torch", 0.25, "square", "NN"),
        ("1000x2000", "torch", 4.0, "transpose", "none"),
    ]
    assert rows[1]["baseline_us"] == 150.0


def test_command_writes_page_and_picture(tmp_path):
    append(tmp_path / "gpu" / "square.jsonl", REPORTED)
    with (tmp_path / "gpu" / "square.jsonl").open("a") as file:
        file.write(json.dumps(REPORTED[0] | {"tritile_us": -1}) + "\n")
    done = run("report.py", tmp_path, "--target", "h200", "--output", tmp_path / "report.html")
    assert done.exit_code == 0, done.output
    assert "1 of 7 lines skipped; line 6: tritile_us = -1" in done.stderr
    assert "1 results of another are left out" in done.output
    text = (tmp_path / "report.html").read_text()
    assert "<h1>tritile on NVIDIA H200</h1>" in text
    assert "torch 2.11.0, triton 3.6.0" in text
    losses = re.findall(r"<td>(\d\.\d{3})</td><td>100.00</td><td>25.00</td><td>(\w+)", text)
    assert losses == [("0.250", "128x64x64")]
    done = run("report.py", tmp_path, "--target", "h200", "--output", tmp_path / "speedups.svg")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "speedups.svg").read_text().startswith("<svg")


def test_words_from_files_are_escaped():
    evil = [each | {"suite": "<script>alert(1)</script>"} for each in REPORTED]
    text = report.page(report.rows_of(evil, "NVIDIA H200"), "<script>", "<b>")
    assert "<script>alert" not in text
    assert "<h1>tritile on &lt;script&gt;</h1>" in text
