"""The comparison of tuners, as far as no GPU is needed: children, lines of results, tables, host times.

Tuning itself is real, of a kernel in Triton's interpreter; the times that decide are made up.
"""

import json
import math
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from triton.runtime.jit import KernelInterface

import authors
import compare_autotune as comparison
import compare_rows as rows_of
import compare_sides as sides
import tritile
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.runtime.interpreter import HostAware

SOFTMAX = ("softmax", (4, 50))
ENV = {"gpu": "x", "torch": "2", "triton": "3", "driver": "", "tritile": "0", "time": "now"}


class Interpreted(HostAware, KernelInterface):
    """Run a kernel in the interpreter under any decorator."""


def subject():
    """Return the softmax with three configs, as the interpreter runs it."""
    configs = authors.configs_of({"ROWS": (1, 2), "BLOCK": (64, 128), "num_warps": (4,)})[:3]
    return replace(authors.SUBJECTS["softmax"], configs=configs, kernel=Interpreted(authors.softmax))


class Ticks:
    """Count one second more each time the clock is read."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


class Bench:
    """Run each config once, and make the second one the fastest."""

    def __init__(self):
        self.calls = 0

    def __call__(self, call, quantiles):
        call()
        self.calls += 1
        return [1.0 if self.calls == 2 else 2.0] * 3


@pytest.mark.parametrize("side", ["triton", "tritile"])
def test_a_tuner_tries_every_config_and_says_which(side):
    bench, given = Bench(), authors.softmax_inputs((4, 50), torch.float32, "cpu")
    answer = sides.tuned(side, subject(), given, clock=Ticks(), do_bench=bench)
    assert bench.calls == 3
    assert answer["seconds"] == 1
    assert answer["error"] < 1e-6
    assert Config.from_dict(answer["config"]) == Config.of(ROWS=1, BLOCK=128, num_warps=4)
    assert json.loads(json.dumps(answer)) == answer


def test_the_space_is_wider_than_the_list():
    whole = authors.SUBJECTS["attention"]
    listed, space = (sides.configs_for(side, whole) for side in ("tritile", "space"))
    assert listed is whole.configs
    assert {str(config) for config in listed} < {str(config.to_triton()) for config in space.configs()}


def test_a_space_is_given_as_such_where_tritile_has_them(monkeypatch):
    monkeypatch.setattr(tritile, "Space", lambda parameters, where: (parameters, where), raising=False)
    whole = authors.SUBJECTS["attention"]
    assert sides.configs_for("space", whole) == (whole.parameters, whole.where)
    assert sides.configs_for("triton", whole) is whole.configs


def test_a_reference_goes_to_tritile_alone(monkeypatch):
    seen = []

    def noting(configs, key, **more):
        seen.append(more)
        return lambda kernel: kernel

    monkeypatch.setattr(tritile, "autotune", noting)
    monkeypatch.setattr(sides.triton, "autotune", noting)
    for side in ("tritile", "triton"):
        sides.decorated(side, subject(), [])
    assert seen == [{"reference": authors.softmax_reference}, {}]


@pytest.mark.parametrize(("side", "said"), [("tritile", "wrong answer"), ("triton", "triton chose .* error")])
def test_a_wrong_answer_is_no_result(side, said):
    wrong = replace(subject(), reference=lambda x_ptr, **_: {"out_ptr": torch.softmax(2 * x_ptr, -1)})
    given = authors.softmax_inputs((4, 50), torch.float32, "cpu")
    with pytest.raises(RuntimeError, match=said):
        sides.tuned(side, wrong, given, do_bench=Bench())


def test_an_output_with_a_gap_is_infinitely_wrong():
    given = authors.softmax_inputs((4, 50), torch.float32, "cpu")
    assert sides.error_of(subject(), given) == math.inf
    given["out_ptr"] = torch.softmax(given["x_ptr"], -1)
    assert sides.error_of(subject(), given) == 0


def test_operands_rotate_until_they_exceed_the_cache():
    given = authors.softmax_inputs((4, 50), torch.float32, "cpu")
    assert sides.bytes_of(given) == 2 * 4 * 50 * 4
    calls = sides.rotated(given, l2_bytes=4000)  # three times as much is 7.5 calls
    assert len(calls) == 8
    assert len({call["x_ptr"].data_ptr() for call in calls}) == 8
    assert all(torch.equal(call["x_ptr"], given["x_ptr"]) and list(call) == list(given) for call in calls)
    assert len(sides.rotated(given, l2_bytes=1)) == 1


def test_each_sides_config_is_timed_on_every_copy(monkeypatch):
    given, ran = authors.softmax_inputs((4, 50), torch.float32, "cpu"), []

    class Graph:
        def __init__(self, run, calls):
            for call in calls:
                call["out_ptr"].fill_(float("nan"))
                run(call)
                ran.append(sides.error_of(subject(), call))

    monkeypatch.setattr(sides, "Graph", Graph)
    monkeypatch.setattr(sides, "interleaved", lambda graphs, budget_ms: [[4.0, 4.0, 5.0], [2.0, 2.0, 2.0]])
    configs = {"triton": Config.of(ROWS=1, BLOCK=64), "tritile": Config.of(ROWS=2, BLOCK=128)}
    timings = sides.timed(subject(), given, configs, l2_bytes=1000)
    assert timings == {"triton": {"us": 4.0, "spread": 0.25}, "tritile": {"us": 2.0, "spread": 0.0}}
    assert len(ran) == 2 * 2
    assert max(ran) < 1e-6


def test_warm_calls_tune_nothing_anew():
    bench, given = Bench(), authors.softmax_inputs((4, 50), torch.float32, "cpu")
    calls = sides.warm_calls(subject(), given, do_bench=bench)
    assert list(calls) == ["jit", "triton", "tritile"]
    assert bench.calls == 2 * 2
    for call in calls.values():
        given["out_ptr"].fill_(float("nan"))
        call()
        assert sides.error_of(subject(), given) < 1e-6
    assert bench.calls == 2 * 2


def test_host_times_are_medians_of_single_calls():
    clock, counted = Ticks(), {"slow": 0, "fast": 0}

    def slow():
        counted["slow"] += 1
        clock.now += 2

    def fast():
        counted["fast"] += 1

    us = sides.host_us({"slow": slow, "fast": fast}, launches=4, rounds=3, clock=clock)
    assert us == {"slow": 1e6 * 9 / 4, "fast": 1e6 / 4}
    assert counted == {"slow": 1 + 3 * 4, "fast": 1 + 3 * 4}


def test_shapes_as_text():
    for _, shape in comparison.PROBLEMS:
        assert rows_of.shape_from(rows_of.shape_text(shape)) == shape
    assert rows_of.shape_text((4096, 1000)) == "4096x1000"


def test_problems_cover_every_kernel_in_turn():
    names = [name for name, _ in comparison.PROBLEMS]
    assert set(names[:3]) == set(authors.SUBJECTS) == set(comparison.TINY)
    assert all(names.count(name) >= 3 for name in authors.SUBJECTS)
    for name, shape in comparison.TINY.items():
        authors.SUBJECTS[name].inputs(shape, torch.float32, "cpu")


def test_a_child_starts_cold(tmp_path):
    environ = {"TRITILE_MODE": "strict", "PATH": "/bin", "PYTHONPATH": "/there"}
    cold = comparison.cold_environment(environ, tmp_path)
    assert "TRITILE_MODE" not in cold
    assert cold["PATH"] == "/bin"
    assert cold["PYTHONPATH"].endswith("/there")
    assert {cold["TRITON_CACHE_DIR"], cold["TRITILE_CACHE_DIR"]} == {
        str(tmp_path / "triton"),
        str(tmp_path / "tritile"),
    }


def script(folder, body):
    """Write a stand-in for the script that a child runs."""
    path = folder / "stand_in.py"
    path.write_text("import json, os, sys\nsys.stdin.readline()\n" + textwrap.dedent(body))
    return path


def test_a_child_answers_with_its_last_json_line(tmp_path):
    path = script(
        tmp_path,
        """
        print('{"seconds": 0}')
        made = [os.path.exists(os.environ[name]) for name in ("TRITON_CACHE_DIR", "TRITILE_CACHE_DIR")]
        print(json.dumps({"words": sys.argv[1:], "made": made}))
        print("and a word of a library")
        """,
    )
    one = comparison.Child("tritile", SOFTMAX, path)
    assert one.answer() == {"words": ["--child", "tritile", "softmax", "4x50"], "made": [False, False]}
    one.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [("sys.exit('no such kernel')", "triton softmax 4x50 failed: no such kernel"), ("", "no answer")],
)
def test_a_child_that_fails_says_why(tmp_path, body, reason):
    one = comparison.Child("triton", SOFTMAX, script(tmp_path, body))
    with pytest.raises(RuntimeError, match=reason):
        one.answer()
    one.close()


def test_a_child_that_is_not_wanted_ends(tmp_path):
    one = comparison.Child("triton", SOFTMAX, script(tmp_path, "print('{}')"))
    one.close()
    assert one._process.returncode not in (None, 0)


def test_the_child_of_the_script_prints_what_it_measured(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))  # noqa: PTH123, SIM115 as a process has it
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(
        comparison, "SUBJECTS", {"softmax": replace(subject(), inputs=lambda *given: asked.append(given))}
    )
    monkeypatch.setattr(sides, "tuned", lambda side, subject, given: {"seconds": 1.5, "config": {}})
    monkeypatch.setattr(sys, "argv", ["compare_autotune.py", "--child", "space", "softmax", "4x50"])
    assert comparison.main() == 0
    assert asked == [((4, 50), comparison.DTYPE)]
    assert comparison.answer_in(capsys.readouterr().out) == {"seconds": 1.5, "config": {}}


def answer(side, seconds=1.0):
    return {"seconds": seconds, "config": Config.of(ROWS=1, BLOCK=64).to_dict(), "error": 0.0}


class Fake:
    """Play a child; count who is alive, and who answers."""

    alive, answered, most = 0, [], 0

    def __init__(self, side, problem):
        self.side, self.problem = side, problem
        Fake.alive += 1
        Fake.most = max(Fake.most, Fake.alive)

    def answer(self):
        Fake.answered.append((self.problem[0], self.side))
        if (self.problem[0], self.side) == ("layer_norm", "tritile"):
            raise RuntimeError("it did not")
        return answer(self.side)

    def close(self):
        Fake.alive -= 1


@pytest.fixture
def fake(monkeypatch):
    for name, value in (("alive", 0), ("answered", []), ("most", 0)):
        monkeypatch.setattr(Fake, name, value)
    return Fake


def test_children_tune_one_at_a_time_while_the_next_gets_ready(fake):
    problems = [SOFTMAX, ("layer_norm", (3, 4))]
    found = dict(comparison.tunings(problems, fake))
    assert found == {SOFTMAX: {side: answer(side) for side in rows_of.TUNERS}, problems[1]: "it did not"}
    assert fake.answered == [(name, side) for name, _ in problems for side in rows_of.TUNERS]
    assert (fake.alive, fake.most) == (0, 2)
    assert list(comparison.tunings([], fake)) == []


def test_children_end_where_no_more_is_asked(fake):
    turns = comparison.tunings([SOFTMAX, ("layer_norm", (3, 4))], fake)
    next(turns)
    turns.close()
    assert fake.alive == 0


def timings(triton, tritile, space):
    return {
        side: {"us": us, "spread": 0.01}
        for side, us in zip(rows_of.TUNERS, (triton, tritile, space), strict=True)
    }


def tuned_row(problem=SOFTMAX, seconds=(30.0, 10.0, 15.0), us=(8.0, 4.0, 2.0)):
    answers = {side: answer(side, s) for side, s in zip(rows_of.TUNERS, seconds, strict=True)}
    return rows_of.tuning_row(problem, (3, 9), answers, timings(*us), ENV)


HOST = rows_of.host_row(SOFTMAX, {"jit": 10.0, "triton": 20.0, "tritile": 12.5}, ENV)


def test_a_line_of_results():
    row = tuned_row()
    assert (row["kernel"], row["problem"], row["configs"], row["space"]) == ("softmax", "4x50", 3, 9)
    assert (row["triton_s"], row["tritile_s"], row["space_s"]) == (30.0, 10.0, 15.0)
    assert (row["triton_us"], row["tritile_us"], row["ratio"], row["env"]) == (8.0, 4.0, 2.0, ENV)
    assert Config.from_dict(row["space_config"]) == Config.of(ROWS=1, BLOCK=64)
    assert json.loads(json.dumps(row)) == row


def test_lines_take_the_place_of_older_ones(tmp_path):
    path = tmp_path / "folder" / "autotune.json"
    rows_of.keep(path, [tuned_row(), tuned_row(("softmax", (30, 50))), HOST])
    rows_of.keep(path, [tuned_row(us=(1.0, 1.0, 1.0))])
    held = json.loads(path.read_text())
    assert [(row["measures"], row["problem"]) for row in held] == [
        ("host", "4x50"), ("tuning", "4x50"), ("tuning", "30x50"),
    ]  # fmt: skip
    assert [row["ratio"] for row in held[1:]] == [1.0, 2.0]


def test_the_summary_is_of_geometric_means():
    means = rows_of.summary([tuned_row(), tuned_row(("softmax", (1, 2)), us=(1.0, 2.0, 4.0)), HOST])
    assert means["seconds of a first call"] == pytest.approx(3)
    assert means["seconds of a first call, whole space"] == pytest.approx(2)
    assert means["us of what was chosen"] == pytest.approx(1)
    assert means["us of what was chosen, whole space"] == pytest.approx(1)
    assert means["host us of a warm call"] == pytest.approx(1.6)
    assert math.isnan(rows_of.summary([])["host us of a warm call"])


def test_tables_show_every_number():
    console = Console(width=250, record=True)
    for table in rows_of.tables([tuned_row(), HOST]):
        console.print(table)
    text = console.export_text()
    assert all(
        word in text for word in ("30.0", "10.0", "15.0", "8.0", "2.000", "3 of 9", "BLOCK=64", "12.50")
    )


def test_a_whole_comparison(tmp_path, monkeypatch, fake, capsys):
    """Compare with made-up children, timings and GPU: failures are printed and left out, the rest is kept."""
    monkeypatch.setattr(comparison, "Child", fake)
    monkeypatch.setattr(
        comparison,
        "SUBJECTS",
        {name: replace(s, inputs=lambda *_: {}) for name, s in authors.SUBJECTS.items()},
    )
    monkeypatch.setattr(sides, "warm_calls", lambda subject, given: {})
    monkeypatch.setattr(sides, "host_us", lambda calls: {"jit": 1.0, "triton": 2.0, "tritile": 1.0})
    monkeypatch.setattr(sides, "timed", lambda subject, given, configs, l2: timings(2.0, 1.0, 1.0))
    problems = [SOFTMAX, ("layer_norm", (3, 4)), ("attention", (1, 1, 2, 64, 0))]
    path = tmp_path / "autotune.json"
    rows, failed = comparison.compare(problems, path, target_device("nvidia-h200"), budget_s=100)
    assert failed == 1
    assert rows == json.loads(path.read_text())
    assert [(row["measures"], row["kernel"]) for row in rows] == [
        ("host", "attention"), ("host", "layer_norm"), ("host", "softmax"),
        ("tuning", "attention"), ("tuning", "softmax"),
    ]  # fmt: skip
    assert {(row["configs"], row["space"]) for row in rows[3:]} == {(22, 99), (26, 99)}
    assert "it did not" in capsys.readouterr().err
    path.unlink()
    rows, failed = comparison.compare(problems, path, target_device("nvidia-h200"), budget_s=0)
    assert [row["kernel"] for row in rows if row["measures"] == "tuning"] == ["softmax"]
    assert "left: layer_norm 3x4, attention 1x1x2x64x0" in capsys.readouterr().out
    assert fake.alive == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(("words", "told"), [([], "no GPU"), (["--only", "nothing"], "no GPU")])
def test_without_a_gpu_it_says_so(monkeypatch, capsys, words, told):
    monkeypatch.setattr(sys, "argv", ["compare_autotune.py", *words])
    assert comparison.main() == 1
    assert told in capsys.readouterr().err
