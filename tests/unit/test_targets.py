"""Results beside the targets: which are met, what counts, and what `tritile bench --compare` says."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tritile import cli
from tritile.core.config import Config
from tritile.lab.report.results import Measurement, Result, append, host_result, result
from tritile.lab.report.targets import TARGETS, Row, compare
from tritile.tune.suites import Case, parse_shape

ENV = {
    "gpu": "GPU", "torch": "2.11.0", "triton": "3.6.0", "driver": "1.2", "tritile": "abc",
    "time": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
ALIGNED, RAGGED, INDUCTOR, TUTORIAL, ODD, HOST, PEAK, PERMUTE, *OTHERS = (target.what for target in TARGETS)
COPIES = EVEN, UNEVEN, BYTES, THIN = OTHERS[:4]
PARTS, FP64, INT8, FP8, BLOCKS, INT4, GROUPS, FUSED = OTHERS[4:]


def product(
    text: str, ratio: float, suite: str = "square", us: float = 100.0, dtype: str = "bfloat16",
    layout: str = "NN", time: str = ENV["time"], **peers: float,
) -> Result:  # fmt: skip
    case = parse_shape(text, dtype=dtype, layout=layout, suite=suite)
    times = {"inductor_us": None} | {f"{name}_us": us * ratio for name, ratio in peers.items()}
    rest = {"spread": 0.01, "error": 0.0, "torch_error": 0.0, "copy_gbps": None, "plan_source": "exact"}
    measured = Measurement(us, us * ratio, **times, **rest, config=Config.of(BLOCK_M=64))
    return result(case, measured, ENV | {"time": time})


def permuted(
    ratio: float, share: float | None, shape: tuple[int, ...] = (8192, 8192), dtype: str = "float32"
) -> Result:
    """A permutation that reverses all dimensions, at this share of the rate of a copy."""
    case = Case("permute", "permute", dtype, shape=shape, dims=tuple(reversed(range(len(shape)))))
    copy_gbps = None if share is None else case.problem.bytes / 130.0 / 1e3 / share
    measured = Measurement(
        130.0, 130.0 * ratio, None, 0.0, 0.0, 0.0, copy_gbps, Config.of(BLOCK_M=64), "exact"
    )
    return result(case, measured, ENV)


def row(what: str, *lines: Result) -> Row:
    (found,) = [row for row in compare(lines) if row.what == what]
    return found


def test_every_target_has_a_row_and_none_is_met_by_nothing() -> None:
    rows = compare([])
    assert [row.what for row in rows] == [target.what for target in TARGETS]
    assert {(row.cases, row.met) for row in rows} == {(0, None)}


def test_rows_of_suites_and_layouts_come_before_their_sum() -> None:
    lines = [product("64x64x64", 2.0, "deep", layout="NT"), product("64x64x64", 8.0), product("8x8x8", 0.5)]
    found = [(row.what, row.cases, row.worst) for row in compare(lines)][:3]
    assert found == [
        ("square NN against cuBLAS", 2, 0.5),
        ("deep NT against cuBLAS", 1, 2.0),
        (ALIGNED, 3, 0.5),
    ]
    total = row(ALIGNED, *lines)
    assert total.geomean == pytest.approx(2.0)
    assert total.worst_label == "square 8x8x8 bfloat16 NN"
    assert (total.worst_met, total.geomean_met, total.met) == (False, True, False)


def test_noise_is_not_a_miss() -> None:
    assert row(ALIGNED, product("64x64x64", 0.97), product("8x8x8", 2.0)).met is True
    assert row(ALIGNED, product("64x64x64", 0.96), product("8x8x8", 2.0)).met is False
    assert row(ALIGNED, product("64x64x64", 1.05)).met is False  # the mean


def test_only_16_bit_products_of_the_suite_count() -> None:
    lines = [product("64x64x64", 5.0, "ragged", dtype="float16"), product("8x8x8", 0.1, "given")]
    found = row(RAGGED, *lines, product("64x64x64", 0.1, "ragged", dtype="float32"), permuted(1.0, None))
    assert (found.cases, found.worst, found.met) == (1, 5.0, True)


def test_peers_count_where_they_were_measured() -> None:
    lines = [product("64x64x64", 5.0, "ragged", inductor=1.2, tutorial=2.0), product("8x8x8", 5.0, "ragged")]
    found = row(INDUCTOR, *lines)
    assert (found.cases, found.worst, found.met) == (1, pytest.approx(1.2), True)
    assert (row(TUTORIAL, *lines).cases, row(TUTORIAL, *lines).met) == (1, None)


def test_a_later_run_without_a_peer_does_not_unmeasure_it() -> None:
    with_peer = product("64x64x64", 5.0, "ragged", inductor=0.5)
    without = product("64x64x64", 6.0, "ragged", time="2027-01-01T00:00:00+00:00")
    assert row(INDUCTOR, with_peer, without).worst == pytest.approx(0.5)
    assert row(RAGGED, with_peer, without).worst == pytest.approx(6.0)


def test_odd_square_beside_the_even_one() -> None:
    even = product("8192x8192x8192", 1.0, us=1000.0)
    slow = product("8192x8192x8192", 1.0, "quick", us=2000.0, time="2025-01-01T00:00:00+00:00")
    odd = product("8191x8191x8191", 1.0, "ragged", us=1250.0)
    found = row(ODD, even, slow, odd, product("8191x8191x8191", 1.0, "ragged", layout="NT"))
    assert (found.cases, found.worst_label, found.met) == (1, "bfloat16 NN", False)
    assert found.worst == pytest.approx(0.8, rel=1e-3)


def test_peak_rate_is_that_of_the_fastest() -> None:
    lines = [
        product("8192x8192x8192", 1.0, us=us, layout=way) for us, way in ((1300.0, "NT"), (2000.0, "NN"))
    ]
    found = row(PEAK, *lines)
    assert (found.worst_label, found.met) == ("bfloat16 NT", True)
    assert found.worst == pytest.approx(845.8, rel=1e-3)


def test_host() -> None:
    lines = [host_result(call, 10.0, 9.0, ENV) for call in ("matmul(a, b)", "transpose(x)")]
    assert (row(HOST, *lines).cases, row(HOST, *lines).worst, row(HOST, *lines).met) == (1, 0.9, False)


@pytest.mark.parametrize(
    ("what", "shape", "dtype"),
    [
        (EVEN, (8192, 8192), "float32"),
        (EVEN, (4, 4096, 4096), "bfloat16"),
        (UNEVEN, (8191, 8192), "float32"),
        (BYTES, (8192, 8193), "uint8"),
        (THIN, (128, 1048576), "float64"),
        (THIN, (64, 64, 64, 129), "float64"),
        (None, (4096, 4096), "bfloat16"),
    ],
)
def test_permutations_count_where_they_belong(what, shape, dtype) -> None:
    line = permuted(7.0, 0.98, shape, dtype)
    assert row(PERMUTE, line).met is True
    assert [name for name in COPIES if row(name, line).cases] == ([] if what is None else [what])
    if what is not None:
        assert row(what, line).met is True
        assert row(what, permuted(7.0, 0.8, shape, dtype)).met is False
        assert row(what, permuted(7.0, None, shape, dtype)).cases == 0


def test_the_newest_line_of_a_case_counts() -> None:
    newer = product("64x64x64", 3.0, time="2026-02-01T00:00:00+00:00")
    assert row(ALIGNED, newer, product("64x64x64", 0.5)).worst == 3.0


def compared(*arguments: object) -> str:
    done = CliRunner().invoke(
        cli.app, ["bench", "--compare", *map(str, arguments)], env={"COLUMNS": "220"}, catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.console, "width", 220)


@pytest.mark.usefixtures("wide")
def test_compare_marks_what_is_met_and_what_is_missed(tmp_path: Path) -> None:
    append(
        tmp_path / "gpu" / "square.jsonl", [product("64x64x64", 1.5), product("64x64x64", 0.5, layout="NT")]
    )
    for place in (tmp_path, tmp_path / "gpu", tmp_path / "gpu" / "square.jsonl"):
        text = compared(place)
        assert "GPU, torch 2.11.0" in text
        assert re.search(r"square NN against cuBLAS .*1\.500 square 64x64x64 bfloat16 NN .*✓", text)
        assert re.search(r"square NT against cuBLAS .*0\.500 square 64x64x64 bfloat16 NT .*✗", text)
        assert re.search(r"ragged against cuBLAS .*not measured", text)
    assert compared("--results", tmp_path) == compared(tmp_path)


@pytest.mark.usefixtures("wide")
def test_compare_shows_each_gpu_by_itself_and_names_bad_lines(tmp_path: Path) -> None:
    good = product("64x64x64", 1.5)
    other = good | {"env": ENV | {"gpu": "Other [/b]"}}
    bad = good | {"tritile_us": -1}
    (tmp_path / "square.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (good, bad, other)))
    text = compared(tmp_path)
    assert text.count("square, llm, deep, batched against cuBLAS") == 2
    assert "Other [/b], torch" in text
    assert re.search(r"square\.jsonl:\s+1 of \d+ lines\s+skipped; line 2: tritile_us = -1", text)


def test_compare_of_what_is_not_there_is_an_error(tmp_path: Path, capsys, monkeypatch) -> None:
    for place in (tmp_path, tmp_path / "missing.jsonl"):
        monkeypatch.setattr("sys.argv", ["tritile", "bench", "--compare", str(place)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert exit_.value.code == 2
        assert str(place) in capsys.readouterr().err


@pytest.mark.usefixtures("wide")
def test_compare_reads_the_results_that_are_kept() -> None:
    assert "against cuBLAS" in compared()


def typed(dtype: str, ratio: float, size: int = 4096, us: float = 100.0, **words: str) -> Result:
    """A square product of another type."""
    case = Case("any", "matmul", dtype, "NT", 1, size, size, size, **words)
    measured = Measurement(us, us * ratio, None, 0.0, 0.0, 0.0, None, Config.of(BLOCK_M=64), "exact")
    return result(case, measured, ENV)


def test_types_are_told_by_dtype_precision_and_size() -> None:
    lines = [
        typed("float32", 3.0, precision="fp16x3"),
        typed("float32", 9.0, precision="tf32"),
        typed("float32", 0.1, 2048, precision="fp16x3"),
        typed("float64", 1.25, 8192, precision="ozaki"),
        typed("float64", 0.5, 4096, precision="ozaki"),
        typed("int8", 1.5),
        typed("int8", 0.5, epilogue="scale_a=column scale_b=row"),
        typed("float8_e4m3fn", 1.0, us=80.0),
        typed("float8_e4m3fn", 0.2, us=100.0, block_scales="1x128"),
    ]
    found = {what: row(what, *lines) for what in (PARTS, FP64, INT8, FP8, BLOCKS)}
    assert {what: (one.cases, one.worst) for what, one in found.items()} == {
        PARTS: (1, 3.0), FP64: (1, 1.25), INT8: (1, 1.5), FP8: (1, 1.0),
        BLOCKS: (1, pytest.approx(0.8, rel=1e-5)),
    }  # fmt: skip
    assert [one.met for one in found.values()] == [False, True, True, True, False]


def test_few_rows_of_small_weights_and_groups_have_targets_of_their_own() -> None:
    weights = [
        Case("weights", "linear_quantized", "bfloat16", layout, m=m, n=4096, k=4096)
        for layout, m in (("int4/128", 16), ("int4/128", 256), ("int8/128", 16))
    ]
    measured = Measurement(10.0, 30.0, None, 0.0, 0.0, 0.0, None, Config.of(BLOCK_M=64), "exact")
    lines = [result(case, measured, ENV) for case in weights]
    assert row(INT4, *lines).cases == 1
    assert row(INT4, *lines).met is True
    assert row(FUSED, *lines).cases == row(GROUPS, *lines).cases == 0
