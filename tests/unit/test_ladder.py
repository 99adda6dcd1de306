"""tritile ladder without a GPU: what it prints, keeps and draws; and a climb on a GPU that is acted."""

import html
import json
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

import tritile
from tests import commands
from tritile.cli.shared import PICTURES
from tritile.core.device import INTERPRETER, target_device
from tritile.core.settings import current_mode, mode
from tritile.errors import InvalidValueError, TuningError
from tritile.lab.ladder import climbing
from tritile.lab.ladder.running import (
    Reading,
    allowed_error,
    error_of,
    matrices,
    planned,
    reading_of,
    run_compiled,
    run_interpreted,
)
from tritile.lab.ladder.steps import LADDERS, Library

H200 = target_device("nvidia-h200")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def run(*arguments):
    return commands.run("ladder", *arguments)


def timed(climb):
    """Add times as of a GPU: each step, then a yardstick of each ladder, twice as fast as the one before."""
    readings = []
    for op in climb.ops:
        rungs = [*climb.of(op), Reading(op, "torch", "torch's own", "float32", True)]
        readings += [replace(reading, us=1e5 / 2**i, spread=0.01) for i, reading in enumerate(rungs)]
    return replace(climb, timed=True, readings=tuple(readings))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Climb without a GPU; return the file that was written and what was printed."""
    path = tmp_path_factory.mktemp("ladder") / "climb.json"
    result = run(16, "--target", "sm_90", "--output", path)
    assert result.exit_code == 0, result.output
    return path, result.output


def test_rungs_are_counted_checked_and_compiled(kept):
    path, _ = kept
    climb = climbing.read(path)
    assert (climb.n, climb.device, climb.timed) == (16, "NVIDIA H100 80GB HBM3", False)
    assert climb.env["torch"] == torch.__version__
    wanted = [(rung.op, rung.name) for ladder in LADDERS.values() for rung in ladder if not rung.yardstick]
    assert [(reading.op, reading.name) for reading in climb.readings] == wanted
    for reading in climb.readings:
        assert reading.registers > 0
        assert reading.failed is False
        if reading.note is None or "Gluon" not in reading.note:
            assert reading.error <= allowed_error("float16", 16)
            assert reading.asked in (None, reading.bytes_counted)
            assert reading.touched > 0


def test_the_table_names_every_rung_and_says_why_one_is_left_out(kept):
    climb, output = climbing.read(kept[0]), kept[1]
    for reading in climb.readings:
        assert reading.name in output
        assert climbing.size_text(reading.asked) in output
    assert "Gluon" in output
    assert "torch.matmul" not in output


def test_a_rung_that_a_gpu_lacks_says_so(capsys):
    """Compile for an A100, which has no TMA: the step is counted all the same."""
    result = run(8, "--op", "matmul", "--target", "sm_80")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if "persistent, TMA" in line)
    assert line.count("384 B") == 3
    assert "Hopper (sm_90)" in result.output
    assert "transpose" not in result.output


@without_gpu
def test_the_default_size_and_gpu(tmp_path):
    result = run("--op", "transpose", "--output", tmp_path / "x.json")
    assert result.exit_code == 0, result.output
    climb = climbing.read(tmp_path / "x.json")
    assert (climb.n, climb.device, climb.ops) == (climbing.COUNTED_N, "NVIDIA H200", ["transpose"])


@pytest.mark.parametrize("times", [False, True], ids=["counted", "timed"])
@pytest.mark.parametrize("suffix", PICTURES)
def test_a_kept_result_is_drawn_again(kept, tmp_path, suffix, times):
    climb, saved, drawn = climbing.read(kept[0]), tmp_path / "kept.json", tmp_path / f"drawn{suffix}"
    (timed(climb) if times else climb).save(saved)
    result = run("--from", saved, "--output", drawn)
    assert result.exit_code == 0, result.output
    if suffix == ".png":
        assert drawn.read_bytes().startswith(b"\x89PNG")
        return
    text = drawn.read_text()
    assert "<script" not in text
    for reading in climb.readings:
        assert reading.name in text
        assert reading.new in html.unescape(text)
    assert ("TFLOP/s" in text) == ("\u00d7 \u00b7 " in text) == ("Grey" in text) == times
    assert "logarithmic scale" in text


def test_one_ladder_of_a_kept_result(kept, tmp_path):
    result = run("--from", kept[0], "--op", "transpose")
    assert "row by row" in result.output
    assert "naive" not in result.output
    saved = tmp_path / "transpose.json"
    climbing.read(kept[0]).only(["transpose"]).save(saved)
    assert "only of transpose" in commands.refused("ladder", "--from", saved, "--op", "matmul")


def test_a_timed_result_is_shown_with_rates(kept, tmp_path):
    saved = tmp_path / "timed.json"
    climb = timed(climbing.read(kept[0]))
    replace(climb, n=8192).save(saved)
    result = run("--from", saved)
    naive, tiles = (next(s for s in result.output.splitlines() if s.startswith(f"{name} ")) for name in
                    ("naive", "shared tiles"))  # fmt: skip
    assert "100 ms" in naive
    assert f"{2 * 8192**3 / 1e5 / 1e6:.3g}" in naive
    assert re.split("  +", naive)[4:6] == ["1", "0.8%"]
    assert re.split("  +", tiles)[4:6] == ["2", "1.6%"]


def change(data, **fields):
    return data | {"readings": [data["readings"][0] | fields]}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: [],
        lambda data: {name: value for name, value in data.items() if name != "n"},
        lambda data: data | {"n": 0},
        lambda data: data | {"timed": 1},
        lambda data: data | {"readings": []},
        lambda data: data | {"env": {"gpu": 1}},
        lambda data: change(data, us=-1.0),
        lambda data: change(data, us="1"),
        lambda data: change(data, name=None),
        lambda data: change(data, op="conv"),
        lambda data: change(data, dtype="int5"),
    ],
)
def test_damaged_results_are_refused(kept, tmp_path, damage):
    (tmp_path / "x.json").write_text(json.dumps(damage(json.loads(kept[0].read_text()))))
    with pytest.raises(InvalidValueError, match=r"x\.json holds no climb: ."):
        climbing.read(tmp_path / "x.json")


def test_a_climb_of_failures_on_a_gpu_is_shown_as_one(kept, tmp_path):
    climb = timed(climbing.read(kept[0]))
    readings = tuple(replace(r, us=None, failed=True, note="no memory") for r in climb.readings)
    replace(climb, readings=readings).save(tmp_path / "x.json")
    assert climbing.read(tmp_path / "x.json").timed
    result = run("--from", tmp_path / "x.json", "--output", tmp_path / "x.svg")
    assert result.exit_code == 1
    assert "failed" in (tmp_path / "x.svg").read_text()
    assert f"on {climb.device}" in result.output
    assert "interpret" not in result.output.replace("no interpreter", "")


def test_figures():
    product = Reading("matmul", "naive", "", "float32", False, us=1000.0)
    turn = Reading("transpose", "row by row", "", "float32", False, us=1000.0)
    untimed = replace(product, name="c", us=None)
    climb = climbing.Climb(1000, "", True, {}, (untimed, product, replace(product, name="b", us=250.0)))
    assert climb.rate(product) == pytest.approx(2.0)  # TFLOP/s
    assert climb.rate(turn) == pytest.approx(8.0)  # GB/s
    assert climb.rate(untimed) is None
    assert climb.gains("matmul") == {"naive": (1.0, 0.25), "b": (4.0, 1.0)}
    assert climb.gains("transpose") == {}
    assert [climbing.size_text(v) for v in (None, 0, 999, 7114752, 999_999, 3 * 10**15)] == [
        "-", "0 B", "999 B", "7.11 MB", "1 MB", "3 PB"]  # fmt: skip
    assert [climbing.time_text(v) for v in (None, 0.9, 12.34, 4560.0, 2e6)] == [
        "-", "0.9 us", "12.3 us", "4.56 ms", "2 s"]  # fmt: skip


@pytest.mark.parametrize("op", LADDERS)
@pytest.mark.parametrize("fault", ["nothing written", "a wrong row", "one NaN"])
def test_wrong_answers_are_found(op, fault):
    *given, out = matrices(op, 300, "float32", "cpu")
    out.copy_(given[0] @ given[1] if op == "matmul" else given[0].t())
    assert error_of(op, (*given, out)) <= allowed_error("float32", 300)
    if fault == "nothing written":
        out.fill_(math.nan)
    elif fault == "one NaN":
        out[5, 7] = math.nan
    else:
        out[-1] *= 1.001
    with pytest.raises(TuningError, match="wrong answer"):
        error_of(op, (*given, out))


class Timer:
    """Stand for a graph whose launch takes so many microseconds."""

    launches = 1

    def __init__(self, us):
        self.us = us

    def time_us(self):
        return self.us


@pytest.fixture
def acted(monkeypatch):
    """Act a GPU: kernels run in the interpreter, and times are made up, in milliseconds."""
    monkeypatch.setattr(climbing, "check_size", lambda n, device: None)
    monkeypatch.setattr(
        climbing, "matrices", lambda op, n, dtype, where, seed: matrices(op, n, "float32", "cpu")
    )
    monkeypatch.setattr(climbing, "_copies", lambda n, device: 2)
    monkeypatch.setattr(climbing, "_chosen", lambda rung, given, device: planned(rung, 16, device))
    monkeypatch.setattr(
        climbing, "run_compiled", lambda rung, given, config, processors: run_interpreted(rung, given)
    )
    monkeypatch.setattr(climbing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(climbing.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(climbing, "graph_of", lambda run, calls: Timer(500.0))
    monkeypatch.setattr(climbing, "_once_us", lambda run, given: 500.0)
    return monkeypatch


def runs_here(rung):
    return rung.unfit(INTERPRETER, 16) is None


def test_rungs_are_timed_by_dtype(acted):
    rungs = [rung for rung in LADDERS["matmul"] if runs_here(rung)]
    done = []
    found = climbing.timed_climb(rungs, 16, H200, done.append)
    assert done == [reading.name for reading in found] == [rung.name for rung in rungs]
    assert {reading.us for reading in found} == {500.0}
    assert all(reading.error <= allowed_error("float32", 16) for reading in found)
    assert [r.name for r in found if r.registers is None] == ["torch, fp32", "torch, bf16"]


def test_a_slow_rung_is_timed_alone_and_few_times(acted):
    times = iter([3e6, 400.0, 3e5, 4e5, 5e5, 6e5, 7e5])
    acted.setattr(climbing, "_once_us", lambda run, given: next(times))
    slow, quick, medium = climbing.timed_climb(
        [r for r in LADDERS["transpose"] if runs_here(r)][:3], 16, H200, str
    )
    assert (slow.us, slow.spread) == (3e6, 0.0)
    assert quick.us == 500.0  # as the graph has it
    assert medium.us == 5e5
    assert next(times, None) is None


def test_a_rung_that_fails_costs_itself_alone(acted):
    wrong = Library(lambda x, out: out.fill_(1))
    raising = Library(lambda x, out: x.no_such_method())
    first, *_, last = LADDERS["transpose"]
    rungs = [first, replace(last, name="wrong", runs=wrong), replace(last, name="raising", runs=raising)]
    right, bad, raised = climbing.timed_climb(rungs, 16, H200, str)
    assert (right.us, right.failed) == (500.0, False)
    assert (bad.us, bad.failed, "wrong answer" in bad.note) == (None, True, True)
    assert (raised.us, raised.failed, "no_such_method" in raised.note) == (None, True, True)


def raising(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_after_a_fatal_error_what_was_read_is_kept(acted):
    """Let every call of the GPU raise from the third step on: the first, slow, has its time."""

    def fatal(x, out):
        for name in ("matrices", "run_compiled", "interleaved"):
            acted.setattr(climbing, name, raising)
        acted.setattr(climbing.torch.cuda, "empty_cache", raising)
        raising()

    times = iter([3e6, 500.0])
    acted.setattr(climbing, "_once_us", lambda run, given: next(times))
    first, second, *_, last = LADDERS["transpose"]
    rungs = [first, second, replace(last, name="fatal", runs=Library(fatal)), last, LADDERS["matmul"][0]]
    slow, *rest = climbing.timed_climb(rungs, 16, H200, str)
    assert (slow.us, slow.failed, slow.note) == (3e6, False, None)
    assert rest[0].registers is not None
    assert len(rest) == 4
    for reading in rest:
        assert (reading.us, reading.failed) == (None, True)
        assert "illegal memory access" in reading.note


def test_a_failure_of_timing_keeps_what_was_read(acted):
    def fatal(graphs, budget):
        acted.setattr(climbing, "interleaved", interleaved)
        raising()

    interleaved = climbing.interleaved
    acted.setattr(climbing, "interleaved", fatal)
    *lost, other = climbing.timed_climb([*LADDERS["transpose"][:2], LADDERS["matmul"][0]], 16, H200, str)
    for reading in lost:
        assert (reading.us, reading.failed, reading.error) == (None, True, 0.0)
        assert "illegal memory access" in reading.note
    assert (other.us, other.failed, other.note) == (500.0, False, None)


@pytest.mark.parametrize("run_rung", [run_interpreted, partial(run_compiled, config=None, processors=1)])
def test_the_librarys_rungs_run_in_the_mode_that_is_shown(run_rung):
    modes = []
    rung = replace(LADDERS["matmul"][-1], runs=Library(lambda *_: modes.append(current_mode())))
    with mode("strict"):
        run_rung(rung, ())
        assert current_mode() == "strict"
    assert modes == ["cached"]


def test_a_rung_that_does_not_run_there_is_no_failure(acted):
    (rung,) = (rung for rung in LADDERS["matmul"] if rung.name == "persistent, TMA")
    (reading,) = climbing.timed_climb([rung], 12, H200, str)
    assert (reading.us, reading.failed) == (None, False)
    assert "multiple of 8" in reading.note
    assert reading.asked is not None


def test_a_copy_is_a_limit_and_no_transpose(acted):
    (copy,) = (rung for rung in LADDERS["transpose"] if rung.name == "device copy")
    (reading,) = climbing.timed_climb([copy], 16, H200, str)
    assert (reading.us, reading.error, reading.note) == (500.0, None, None)


@pytest.mark.parametrize(("n", "device"), [(46341, H200), (0, H200), (513, None)])
def test_sizes_beyond_offsets_or_patience_are_refused(n, device):
    with pytest.raises(InvalidValueError, match=r"wanted 1 to (46,340|512)"):
        climbing.check_size(n, device)


def test_writes_of_small_transposes_share_sectors():
    """Compare "element by element", whose programs have several rows, with "row by row"."""
    for n, fewer in ((64, True), (128, False)):
        rows, elements = climbing.counted_climb(LADDERS["transpose"][:2], n, H200, str)
        assert rows.touched == n * n * (4 + climbing.SECTOR)
        assert (elements.touched < rows.touched) == fewer


@pytest.mark.parametrize("n", [1, 2, 7, 8, 100, 1001])
@pytest.mark.parametrize("op", LADDERS)
def test_the_librarys_rung_tells_of_the_kernel_that_runs(op, n):
    (rung,) = (rung for rung in LADDERS[op] if rung.name == f"tritile.{op}")
    *given, _ = matrices(op, n, rung.dtype, "cpu")
    plan = tritile.plan(getattr(tritile, op), *given, device=H200)
    assert plan.problem == rung.runs.problem(n)
    assert plan.config == planned(rung, n, H200)


def test_described_rungs_keep_the_compilers_reason():
    """Ask for more shared memory than there is."""
    (rung,) = (rung for rung in LADDERS["matmul"] if rung.name == "autotuned")
    config = max(rung.runs.configs, key=lambda c: c["BLOCK_M"] * c["BLOCK_N"] * c.num_stages)
    reading = reading_of(rung, 512, config, target_device("gfx942"))
    assert "shared memory" in reading.note
    assert reading.registers is None
