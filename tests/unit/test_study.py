"""The study of the tuner, on made-up GPUs: what its figures mean."""

import json

import pytest

from tests.unit.fake_subjects import Formula, made_up_us
from tritile.config import Config
from tritile.device import target_device
from tritile.problem import MatmulProblem
from tritile.tune import study

H200 = target_device("nvidia-h200")
PROBLEMS = [MatmulProblem(1, 64, 64, 256 * i, "float16", "float16") for i in (1, 2)]


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(study, "ProblemSubject", Formula)
    said = []
    figures = study.study(PROBLEMS, PROBLEMS, H200, None, jobs=1, repeats=2, say=said.append)
    assert len(said) == 2
    return figures


def test_every_figure_is_there_and_is_what_it_says(found):
    json.dumps(found, allow_nan=False)
    spaces = [study.ProblemSpace(problem, H200).configs() for problem in PROBLEMS]
    for one, problem, space in zip(found["problems"], PROBLEMS, spaces, strict=True):
        least = min(made_up_us(problem, config) for config in space)
        assert one["space"] == len(space)
        assert one["configs"] < len(space)
        assert one["best_us"] <= least + 1e-9  # or better: searches also step outside of it
        assert len(one["regrets"]) == 2
        assert one["regrets"][0] == one["regrets"][1]  # times without noise: every repeat chooses the same
        pick = study.model.pick(problem, H200)
        assert one["first_pick_regret"] == pytest.approx(made_up_us(problem, pick) / one["best_us"] - 1)
    assert found["suite_problems"] == 2
    assert found["suite_failed"] == 0
    assert found["flip_rate"] == sum(r > 0.02 for one in found["problems"] for r in one["regrets"]) / 4
    assert found["transfer_regret_median"] == pytest.approx(0, abs=0.05)  # a scaled problem: the same config


def test_the_summary_counts_every_repeat():
    ones = [
        study.Studied("a", (0.0, 0.03, 0.01), 0.5, 2.0, 30, 100, 9.0, "", 1.0),
        study.Studied("b", (0.0, 0.0, 0.1), 0.1, 4.0, 30, 100, 9.0, "", 1.0),
    ]
    found = study.summary(ones, [0.1, 0.2, 0.9])
    assert found["regret_worst"] == 0.1
    assert found["regret_median"] == pytest.approx(0.005)
    assert found["flip_rate"] == pytest.approx(2 / 6)
    assert found["tune_seconds_median"] == 3.0
    assert found["first_pick_regret_median"] == pytest.approx(0.3)
    assert found["first_pick_regret_p95"] == 0.5
    assert found["transfer_regret_median"] == 0.2
    assert study.summary(ones, [])["transfer_regret_median"] is None


def test_transfer_compares_what_both_measured():
    a, b = (Config.of(B=value) for value in (1, 2))
    times = {PROBLEMS[0]: {a: 1.0, b: 2.0}, PROBLEMS[1]: {a: 3.0, b: 2.0}}
    assert sorted(study._transfers(times)) == [0.5, 1.0]
    del times[PROBLEMS[1]][a]
    assert study._transfers(times) == [1.0]
