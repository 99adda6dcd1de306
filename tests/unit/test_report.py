"""Reports: rows of results, the table of losses, and the chart as a picture. tests/browser opens the page."""

import json
import re

import pytest

from tests.commands import run
from tritile.core.config import Config
from tritile.errors import FileError
from tritile.lab import report
from tritile.lab.results import Measurement, append, result
from tritile.tune.suites import parse_shape

ENV = {
    "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "driver": "1.2", "tritile": "abc",
    "time": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
CONFIG = Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=8)


def line(shape, ratio, op="matmul", dtype="bfloat16", suite="square", inductor=None, **env):
    case = parse_shape(shape, op=op, dtype=dtype, suite=suite)
    us = None if inductor is None else 10.0 * inductor
    measured = Measurement(10.0, 10.0 * ratio, us, 0.01, 1e-3, 1e-3, None, CONFIG, "exact")
    return result(case, measured, ENV | env)


LINES = [
    line("64x64x64", 2.0, inductor=1.5),
    line("128x64x64", 0.5),
    line("128x64x64", 0.25),  # later: it counts
    line("100x200", 4.0, "permute", "float32", "transpose"),
    line("64x64x64", 9.0, gpu="another"),
]


def test_rows_are_the_last_results_of_a_gpu_one_for_each_baseline():
    rows = report.rows_of(LINES, "NVIDIA H200")
    assert [(row["problem"], row["baseline"], row["ratio"], row["band"]) for row in rows] == [
        ("64x64x64", "torch", 2.0, "square"),
        ("64x64x64", "inductor", 1.5, "square / inductor"),
        ("128x64x64", "torch", 0.25, "square"),
        ("100x200", "torch", 4.0, "transpose"),
    ]
    assert [row["layout"] for row in rows] == ["NN", "NN", "NN", "none"]
    assert rows[1]["baseline_us"] == 15.0


def test_the_command_writes_a_page_and_a_picture(tmp_path):
    append(tmp_path / "gpu" / "square.jsonl", LINES)
    with (tmp_path / "gpu" / "square.jsonl").open("a") as file:
        file.write(json.dumps(LINES[0] | {"tritile_us": -1}) + "\n")
    done = run("report", tmp_path, "--target", "h200", "--output", tmp_path / "report.html")
    assert done.exit_code == 0, done.output
    assert "1 of 7 lines skipped; line 6: tritile_us = -1" in done.stderr
    assert "1 results of another are left out" in done.output
    text = (tmp_path / "report.html").read_text()
    assert "<h1>tritile on NVIDIA H200</h1>" in text
    assert "torch 2.11.0, triton 3.6.0" in text
    losses = re.findall(r"<td>(\d\.\d{3})</td><td>10.00</td><td>2.50</td><td>(\w+)", text)
    assert losses == [("0.250", "128x64x64")]
    done = run("report", tmp_path, "--target", "h200", "--output", tmp_path / "speedups.svg")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "speedups.svg").read_text().startswith("<svg")


def test_words_from_files_are_escaped():
    evil = [each | {"suite": "<script>alert(1)</script>"} for each in LINES]
    text = report.page(report.rows_of(evil, "NVIDIA H200"), "<script>", "<b>")
    assert "<script>alert" not in text
    assert "<h1>tritile on &lt;script&gt;</h1>" in text


def test_without_results_nothing_is_drawn():
    with pytest.raises(FileError, match="no results"):
        report.speedups([])
    with pytest.raises(FileError, match="no results of this GPU"):
        report.page([], "NVIDIA H200", "")
