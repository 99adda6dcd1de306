"""Results: what a line holds, that files survive being cut off, what they sum up to, and comparisons."""

import json
import math
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.commands import run
from tests.warned import one_warning
from tritile.cli import shared
from tritile.cli.bench import print_results, print_summary
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.errors import InvalidValueError, StoreWarning
from tritile.lab.environment import environment
from tritile.lab.results import (
    Measurement,
    Result,
    append,
    case_of,
    host_result,
    latest,
    read,
    result,
    summary,
)
from tritile.tune.suites import parse_shape

ENV = {
    "gpu": "GPU", "torch": "2.11.0", "triton": "3.6.0", "driver": "1.2", "tritile": "abc",
    "time": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
CONFIG = Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=8)


def measured(tritile_us: float, torch_us: float, **changes: object) -> Measurement:
    rest: dict = {
        "inductor_us": None, "spread": 0.01, "error": 1e-3, "torch_error": 2e-3, "copy_gbps": None,
        "config": CONFIG, "plan_source": "exact",
    }  # fmt: skip
    return Measurement(tritile_us, torch_us, **(rest | changes))


def product(text: str, ratio: float, dtype: str = "bfloat16", layout: str = "NN", **env: str) -> Result:
    case = parse_shape(text, dtype=dtype, layout=layout, suite="square")
    return result(case, measured(100.0, 100.0 * ratio), ENV | env)


def transposed(ratio: float = 1.5, copy_gbps: float | None = 2500.0) -> Result:
    case = parse_shape("1000x2000", op="permute", dtype="float32", suite="transpose")
    return result(case, measured(8.0, 8.0 * ratio, copy_gbps=copy_gbps, error=0.0, torch_error=0.0), ENV)


def printed(lines: list[Result], show: object = print_results, **options: object) -> str:
    console = Console(file=StringIO(), width=250, **options)
    show(lines, console)
    return console.file.getvalue()


def test_matmul_line() -> None:
    line = result(parse_shape("8x1000x500x200", layout="NT"), measured(10.0, 20.0, inductor_us=5.0), ENV)
    assert (line["op"], line["suite"], line["dtype"], line["layout"]) == ("matmul", "given", "bfloat16", "NT")
    assert (line["batch"], line["m"], line["n"], line["k"]) == (8, 1000, 500, 200)
    assert (line["ratio_torch"], line["ratio_inductor"]) == (2.0, 0.5)
    assert line["tflops"] == 160.0  # 2 * 8 * 1000 * 500 * 200 operations in 10 us
    assert Config.from_dict(line["config"]) == CONFIG
    assert not {"shape", "dims", "gbps", "copy_gbps"} & set(line)


def test_permute_line_counts_bytes_read_and_written() -> None:
    line = transposed()
    assert (line["shape"], line["dims"]) == ([1000, 2000], [1, 0])
    assert line["gbps"] == 2000.0  # 2 * 8 MB in 8 us
    assert line["copy_gbps"] == 2500.0
    assert line["layout"] is line["precision"] is line["inductor_us"] is line["ratio_inductor"] is None
    assert not {"m", "n", "k", "batch", "tflops"} & set(line)


def test_lines_tell_every_side_and_older_ones_that_do_not_are_read(tmp_path: Path) -> None:
    sides = {
        "torch_call": "matmul", "torch_calls": {"matmul": 20.0, "torch.compile": 21.0},
        "spreads": {"torch": 0.0}, "samples": 40, "launches": 3,
    }  # fmt: skip
    new = result(parse_shape("64x64x64"), measured(10.0, 20.0, **sides), ENV)
    assert sides.items() <= new.items()
    old = {name: value for name, value in new.items() if name not in sides}
    old |= {"tutorial_us": 30.0, "ratio_tutorial": 3.0}
    append(tmp_path / "given.jsonl", [old, new])
    assert read(tmp_path / "given.jsonl") == [old, new]
    assert not sides.keys() & result(parse_shape("64x64x64"), measured(10.0, 20.0), ENV).keys()


@pytest.mark.parametrize("op", ["invariance", "models", "rows"])
def test_lines_of_scripts_are_passed_over(tmp_path: Path, op: str) -> None:
    line = result(parse_shape("64x64x64"), measured(10.0, 20.0), ENV)
    path = tmp_path / "given.jsonl"
    path.write_text(json.dumps({"op": op, "m": 1}) + "\n" + json.dumps(line) + "\n")
    assert read(path, pytest.fail) == [line]


def test_host_lines_come_back_and_are_no_cases(tmp_path: Path) -> None:
    line = host_result("matmul(a, b)", 8.0, 10.0, ENV)
    assert (line["op"], line["suite"], line["ratio_torch"]) == ("host", "host", 1.25)
    append(tmp_path / "host.jsonl", [line, line])
    assert latest(read(tmp_path / "host.jsonl")) == [line]
    assert summary([line]) == []
    assert "no results" in printed([line])
    assert "1.250" not in printed([line, product("64x64x64", 0.5)])


@pytest.mark.parametrize("changes", [{"call": ""}, {"suite": "deep"}, {"torch_us": None}, {"env": {}}])
def test_host_lines_are_checked(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(InvalidValueError):
        append(tmp_path / "host.jsonl", [host_result("matmul(a, b)", 8.0, 10.0, ENV) | changes])


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "gpu" / "square.jsonl"
    lines = [product("64x64x64", 1.25), transposed(), transposed(copy_gbps=None)]
    append(path, lines[:1])
    append(path, [])
    append(path, lines[1:])
    assert len(path.read_text().splitlines()) == 3
    assert read(path, pytest.fail) == lines
    assert case_of(lines[1]) == parse_shape("1000x2000", op="permute", dtype="float32", suite="transpose")


def test_a_truncated_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "square.jsonl"
    lines = [product(f"{size}x64x64", 1.25) for size in (64, 128, 256)]
    append(path, lines[:2])
    path.write_bytes(path.read_bytes()[:-40])
    append(path, lines[2:])
    with one_warning("lines skipped; line 2"):
        assert read(path) == [lines[0], lines[2]]


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "conv"}, {"op": ["matmul"]}, {"m": 0}, {"m": "64"}, {"m": True}, {"dtype": "half"},
        {"layout": None}, {"torch_us": None}, {"ratio_torch": -1}, {"tflops": None}, {"tritile_us": 10**400},
        {"tritile_us": math.nan}, {"inductor_us": 3.0}, {"config": {"kwargs": 1}}, {"env": {}}, {"env": None},
        {"tutorial_us": 3.0, "ratio_tutorial": None},
        {"plan_source": 7}, {"spread": "?"}, {"samples": "?"}, {"torch_calls": [1.0]},
        {"spreads": {"torch": None}}, {"inductor_us": 0.0}, {"copy_gbps": -1.0}, {"spread": -0.1},
        {"error": math.inf}, {"plan_source": ""}, {"samples": 0}, {"torch_calls": {"matmul": 0.0}},
        {"layout": 5}, {"precision": ["x"]},
    ],
)  # fmt: skip
def test_lines_that_are_no_results_are_skipped(tmp_path: Path, changes: dict) -> None:
    path = tmp_path / "square.jsonl"
    good = product("64x64x64", 1.25)
    path.write_text(json.dumps(good | changes) + "\n" + json.dumps(good) + "\n")
    with pytest.warns(StoreWarning):
        assert read(path) == [good]
    with pytest.raises(InvalidValueError):
        append(path, [good | changes])


@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b'{"op": "matmul"}'])
def test_garbage_is_skipped(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "square.jsonl"
    path.write_bytes(garbage + b"\n\n")
    with pytest.warns(StoreWarning):
        assert read(path) == []


def test_latest_keeps_the_last_of_each_case_and_gpu() -> None:
    first, again = product("64x64x64", 0.5), product("64x64x64", 2.0)
    other, elsewhere = product("128x64x64", 1.0), product("64x64x64", 3.0, gpu="Other")
    assert latest([first, other, again, elsewhere]) == [again, other, elsewhere]


def test_summary() -> None:
    lines = [
        product("64x64x64", 0.1),
        product("64x64x64", 0.5),
        product("128x64x32", 4.0),
        product("256x64x64", 4.0),
    ]
    rows = summary([*lines, product("64x64x64", 1.5, layout="NT"), transposed(1.25)])
    assert [(row.suite, row.dtype, row.layout, row.count) for row in rows] == [
        ("square", "bfloat16", "NN", 3),
        ("square", "bfloat16", "NT", 1),
        ("transpose", "float32", "", 1),
    ]
    assert rows[0].geomean == pytest.approx(2.0)  # the cube root of 0.5 * 4 * 4
    assert (rows[0].worst, rows[0].worst_label, rows[0].behind) == (0.5, "64x64x64", 1)
    assert (rows[2].geomean, rows[2].worst_label, rows[2].behind) == (pytest.approx(1.25), "1000x2000", 0)


def test_print_results() -> None:
    text = printed([product("64x64x64", 0.5), transposed()])
    assert re.search(r"64x64x64 .*square .*NN .*bfloat16 .* 100\.00 .* 50\.00 .* 0\.500 .* TFLOP/s", text)
    assert re.search(r"1000x2000 .*transpose .*float32 .* 2000 GB/s \(80% of copy\)", text)
    assert "no results" in printed([])
    lines = [product("64x64x64", 0.5), product("128x64x32", 8.0)]
    assert printed(lines).splitlines()[0].strip().endswith("square, bfloat16, NN")


def test_ratios_below_one_are_highlighted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    colors = {"force_terminal": True, "color_system": "standard"}
    behind, ahead = (printed([product("64x64x64", ratio)], **colors) for ratio in (0.5, 2.0))
    assert re.search(r"\x1b\[1;31m *0\.500", behind)
    assert "\x1b[1;31m" not in ahead


def test_words_from_files_are_not_markup() -> None:
    line = product("64x64x64", 0.5) | {"suite": "a[/b]"}
    assert "a[/b]" in printed([line])
    assert "a[/b]" in printed([line], print_summary)


def test_environment() -> None:
    env = environment(target_device("nvidia-h200"))
    assert env["gpu"] == "NVIDIA H200"
    assert env["tritile"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", env["time"])
    assert set(env) == set(ENV)


LATER = "2027-01-01T00:00:00+00:00"


def timed(
    text: str, ratio: float, suite: str = "square", us: float = 100.0, layout: str = "NN",
    time: str = ENV["time"], **peers: float,
) -> Result:  # fmt: skip
    case = parse_shape(text, layout=layout, suite=suite)
    times = {f"{name}_us": us * ratio for name, ratio in peers.items()}
    return result(case, measured(us, us * ratio, **times), ENV | {"time": time})


def test_peers_count_where_they_were_measured() -> None:
    lines = [timed("64x64x64", 5.0, "ragged", inductor=1.2), timed("8x8x8", 5.0, "ragged")]
    (row,) = summary(lines, "inductor")
    assert (row.count, row.worst, row.worst_label) == (1, pytest.approx(1.2), "64x64x64")
    assert summary(lines, "tutorial") == []


def test_a_later_run_without_a_peer_does_not_unmeasure_it() -> None:
    lines = [timed("64x64x64", 5.0, inductor=0.5), timed("64x64x64", 6.0, time=LATER)]
    (row,) = summary(lines, "inductor")
    assert (row.worst, row.behind) == (pytest.approx(0.5), 1)
    (row,) = summary(lines)
    assert (row.worst, row.count) == (pytest.approx(6.0), 1)


def compared(*arguments: object) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shared.console, "width", 120)
        done = run("bench", "--compare", *arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_compare_summarises_against_each_peer(tmp_path: Path) -> None:
    lines = [timed("64x64x64", 1.5, inductor=1.25), timed("64x64x64", 0.5, layout="NT")]
    lines.append(timed("64x64x64", 1.5, time=LATER))
    append(tmp_path / "gpu" / "square.jsonl", lines)
    append(tmp_path / "gpu" / "host.jsonl", [host_result("matmul(a, b)", 10.0, 9.0, ENV)])
    for place in (tmp_path, tmp_path / "gpu"):
        text = compared(place)
        by_torch, by_inductor = text.split("GPU, torch 2.11.0, triton 3.6.0, against ")[1:]
        assert by_torch.startswith("torch")
        assert re.search(r"NN .* 1 .*1\.500 .* 0 .*1\.500 .*64x64x64", by_torch)
        assert re.search(r"NT .* 1 .*0\.500 .* 1 .*0\.500 .*64x64x64", by_torch)
        assert by_inductor.startswith("inductor")
        assert re.search(r"^inductor, square, bfloat16, NN *\n.*\n.* 1\.250", by_inductor)
        assert re.search(r"matmul\(a, b\) +10\.0 +9\.0 *\n$", text)


def test_compare_takes_the_newest_line_of_a_case(tmp_path: Path) -> None:
    append(tmp_path / "square.jsonl", [timed("8x8x8", 3.0, time=LATER), timed("8x8x8", 0.5)])
    text = compared(tmp_path / "square.jsonl")
    assert "3.000" in text
    assert "0.500" not in text


def test_compare_shows_each_gpu_by_itself_and_names_bad_lines(tmp_path: Path) -> None:
    good = timed("64x64x64", 1.5)
    other = good | {"env": ENV | {"gpu": "Other [/b]"}}
    bad = good | {"tritile_us": -1}
    (tmp_path / "square.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (good, bad, other)))
    text = compared(tmp_path)
    assert text.count("against torch") == 2
    assert "Other [/b], torch" in text
    unwrapped = re.sub(r"\s", "", text)
    assert re.search(r"square\.jsonl:1of\d+linesskipped;line2:tritile_us=-1", unwrapped)


def test_compare_reads_the_results_that_are_kept() -> None:
    assert "against torch" in compared()
