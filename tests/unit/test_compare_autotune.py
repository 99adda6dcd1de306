"""The comparison of tuners, as far as no GPU is needed: children, lines of results, warm calls.

Tuning itself is real, of a kernel in Triton's interpreter; the times that decide are made up.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

import authors
import compare_autotune as comparison
import tritile
from tritile.core.config import Config

pytestmark = pytest.mark.interpreted

GIVEN = {"shape": (4, 50), "dtype": torch.float32, "device": "cpu"}


def subject():
    """Return the softmax with three configs, as the interpreter runs it."""
    configs = authors.configs_of({"ROWS": (1, 2), "BLOCK": (64, 128), "num_warps": (4,)})[:3]
    return replace(authors.SUBJECTS["softmax"], configs=configs)


class Bench:
    """Run each config once, and make the second one the fastest."""

    def __init__(self):
        self.calls = 0

    def __call__(self, call, quantiles):
        call()
        self.calls += 1
        return [1.0 if self.calls == 2 else 2.0] * 3


@pytest.mark.parametrize("side", ["triton", "tritile"])
def test_tuner_tries_every_config(side):
    bench = Bench()
    answer = comparison.tuned(side, subject(), authors.softmax_inputs(**GIVEN), do_bench=bench)
    assert bench.calls == 3
    assert answer["seconds"] > 0
    assert Config.from_dict(answer["config"]) == Config.of(ROWS=1, BLOCK=128, num_warps=4)
    assert json.loads(json.dumps(answer)) == answer


@pytest.mark.parametrize(("side", "said"), [("tritile", "wrong answer"), ("triton", "triton chose .* error")])
def test_a_wrong_answer_is_no_result(side, said):
    wrong = replace(subject(), reference=lambda x_ptr, **_: {"out_ptr": torch.softmax(2 * x_ptr, -1)})
    with pytest.raises(RuntimeError, match=said):
        comparison.tuned(side, wrong, authors.softmax_inputs(**GIVEN), do_bench=Bench())


def test_configs_timed_on_every_copy(monkeypatch):
    errors = []

    class Graph:
        def __init__(self, run, calls):
            for call in calls:
                call["out_ptr"].fill_(math.nan)
                assert comparison.error_of(subject(), call) == math.inf
                run(call)
                errors.append(comparison.error_of(subject(), call))

    monkeypatch.setattr(comparison, "Graph", Graph)
    monkeypatch.setattr(comparison, "copies_for", lambda count, l2_bytes: count // (2 * 4 * 50 * 4) + 1)
    monkeypatch.setattr(comparison, "interleaved", lambda *_, **__: [[4.0, 4.0, 5.0], [2.0, 2.0, 2.0]])
    configs = {"triton": Config.of(ROWS=1, BLOCK=64), "tritile": Config.of(ROWS=2, BLOCK=128)}
    found = comparison.timed(subject(), authors.softmax_inputs(**GIVEN), configs, 1000)
    assert found == {"triton_us": 4.0, "triton_spread": 0.25, "tritile_us": 2.0, "tritile_spread": 0.0}
    assert len(errors) == 2 * 2
    assert max(errors) < 1e-6


def test_a_whole_comparison(tmp_path, monkeypatch, capsys):
    """Compare with made-up children, timings and GPU: failures are printed and left out, the rest is kept."""

    def answer(side, problem):
        if problem.startswith("layer_norm"):
            raise RuntimeError("it did not")
        return {"seconds": 1.5, "config": Config.of(ROWS=1).to_dict()}

    subjects = {name: replace(s, inputs=lambda *_: {}) for name, s in authors.SUBJECTS.items()}
    times = {"triton_us": 4.0, "tritile_us": 2.0, "space_us": 2.0}
    monkeypatch.setattr(comparison, "SUBJECTS", subjects)
    monkeypatch.setattr(comparison, "HERE", tmp_path)
    monkeypatch.setattr(comparison, "current_gpu", lambda: tritile.target_device("nvidia-h200"))
    monkeypatch.setattr(comparison, "tuned_cold", answer)
    monkeypatch.setattr(comparison, "timed", lambda *_: times)
    monkeypatch.setattr(comparison, "warm_calls", lambda *_: {"jit": None, "tritile": None})
    monkeypatch.setattr(comparison, "host_us", lambda *calls: [3.0] * len(calls))
    monkeypatch.setattr("sys.argv", ["compare_autotune.py"])
    path = tmp_path / "results" / "nvidia-h200" / "autotune.json"
    path.parent.mkdir(parents=True)
    older = {"measures": "host", "kernel": "softmax", "problem": "4x64", "jit_host_us": 9.0}
    path.write_text(json.dumps([older]))
    assert comparison.main() == 1
    rows = json.loads(path.read_text())
    kinds = [(row["measures"], row["kernel"]) for row in rows]
    hosts = [("host", name) for name in sorted(subjects)]
    assert kinds == hosts + [("tuning", "attention")] * 3 + [("tuning", "softmax")] * 3
    assert {row["jit_host_us"] for row in rows[:3]} == {3.0}  # the older line is gone
    assert (rows[-1]["configs"], rows[-1]["ratio"], rows[-1]["space_s"]) == (26, 2.0, 1.5)
    assert "it did not" in capsys.readouterr().err
