"""Results compared: which count, and what `tritile bench --compare` prints."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tritile import cli
from tritile.core.config import Config
from tritile.lab.report.results import Measurement, Result, append, host_result, result
from tritile.lab.report.summary import summary
from tritile.tune.suites import parse_shape

ENV = {
    "gpu": "GPU", "torch": "2.11.0", "triton": "3.6.0", "driver": "1.2", "tritile": "abc",
    "time": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
LATER = "2027-01-01T00:00:00+00:00"


def product(
    text: str, ratio: float, suite: str = "square", us: float = 100.0, layout: str = "NN",
    time: str = ENV["time"], **peers: float,
) -> Result:  # fmt: skip
    case = parse_shape(text, dtype="bfloat16", layout=layout, suite=suite)
    times = {"inductor_us": None} | {f"{name}_us": us * ratio for name, ratio in peers.items()}
    rest = {"spread": 0.01, "error": 0.0, "torch_error": 0.0, "copy_gbps": None, "plan_source": "exact"}
    measured = Measurement(us, us * ratio, **times, **rest, config=Config.of(BLOCK_M=64))
    return result(case, measured, ENV | {"time": time})


def test_peers_count_where_they_were_measured() -> None:
    lines = [product("64x64x64", 5.0, "ragged", inductor=1.2, tutorial=2.0), product("8x8x8", 5.0, "ragged")]
    (row,) = summary(lines, "inductor")
    assert (row.count, row.worst, row.worst_label) == (1, pytest.approx(1.2), "64x64x64")
    (row,) = summary(lines, "tutorial")
    assert (row.count, row.behind) == (1, 0)
    assert summary(lines[1:], "tutorial") == []


def test_a_later_run_without_a_peer_does_not_unmeasure_it() -> None:
    lines = [product("64x64x64", 5.0, inductor=0.5), product("64x64x64", 6.0, time=LATER)]
    (row,) = summary(lines, "inductor")
    assert (row.worst, row.behind) == (pytest.approx(0.5), 1)
    (row,) = summary(lines)
    assert (row.worst, row.count) == (pytest.approx(6.0), 1)


def compared(*arguments: object) -> str:
    done = CliRunner().invoke(
        cli.app, ["bench", "--compare", *map(str, arguments)], env={"COLUMNS": "220"}, catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_compare_summarises_against_each_peer(tmp_path: Path) -> None:
    lines = [product("64x64x64", 1.5, inductor=1.25), product("64x64x64", 0.5, layout="NT")]
    lines.append(product("64x64x64", 1.5, time=LATER))
    append(tmp_path / "gpu" / "square.jsonl", lines)
    append(tmp_path / "gpu" / "host.jsonl", [host_result("matmul(a, b)", 10.0, 9.0, ENV)])
    for place in (tmp_path, tmp_path / "gpu"):
        text = compared(place)
        by_torch, by_inductor = text.split("GPU, torch 2.11.0, triton 3.6.0, against ")[1:]
        assert by_torch.startswith("torch")
        assert re.search(r"square .*bfloat16 .*NN .* 1 .*1\.500 .* 0 .*1\.500 .*64x64x64", by_torch)
        assert re.search(r"square .*bfloat16 .*NT .* 1 .*0\.500 .* 1 .*0\.500 .*64x64x64", by_torch)
        assert by_inductor.startswith("inductor")
        assert re.search(r"square .*NN .*1\.250", by_inductor)
        assert " NT " not in by_inductor
        assert text.endswith("host cost of matmul(a, b): tritile 10.0 us, torch 9.0 us\n")
    assert compared("--results", tmp_path) == compared(tmp_path)


def test_compare_takes_the_newest_line_of_a_case(tmp_path: Path) -> None:
    append(tmp_path / "square.jsonl", [product("8x8x8", 3.0, time=LATER), product("8x8x8", 0.5)])
    text = compared(tmp_path / "square.jsonl")
    assert "3.000" in text
    assert "0.500" not in text


def test_compare_shows_each_gpu_by_itself_and_names_bad_lines(tmp_path: Path) -> None:
    good = product("64x64x64", 1.5)
    other = good | {"env": ENV | {"gpu": "Other [/b]"}}
    bad = good | {"tritile_us": -1}
    (tmp_path / "square.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (good, bad, other)))
    text = compared(tmp_path)
    assert text.count("against torch") == 2
    assert "Other [/b], torch" in text
    unwrapped = re.sub(r"\s", "", text)
    assert re.search(r"square\.jsonl:1of\d+linesskipped;line2:tritile_us=-1", unwrapped)


def test_compare_of_what_is_not_there_is_an_error(tmp_path: Path, capsys, monkeypatch) -> None:
    for place in (tmp_path, tmp_path / "missing.jsonl"):
        monkeypatch.setattr("sys.argv", ["tritile", "bench", "--compare", str(place)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert exit_.value.code == 2
        assert str(place) in capsys.readouterr().err


def test_compare_reads_the_results_that_are_kept() -> None:
    assert "against torch" in compared()
