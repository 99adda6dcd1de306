"""The study of the tuner, on made-up GPUs: what its figures mean."""

import functools
import json
from dataclasses import replace

import pytest

from tests.unit.fake_subjects import Formula, made_up_us
from tests.unit.helpers_for_fork_servers import QuickForkServer
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, PermuteProblem
from tritile.tune import study
from tritile.tune.measure.workshop import Workshop

H200 = target_device("nvidia-h200")
PROBLEMS = [MatmulProblem(1, 64, 64, 256 * i, "float16", "float16") for i in (1, 2)]


@pytest.fixture(autouse=True)
def _quick(server, monkeypatch):
    """Processes that are there at once."""
    monkeypatch.setattr(study, "Workshop", functools.partial(Workshop, fork_server=QuickForkServer(server)))


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
    names = ("regrets", "first_pick_regret", "tune_seconds", "transfer_regret")
    figures = [((0.0, 0.03, 0.01), 0.5, 2.0, 0.2), ((0.0, 0.0, 0.1), 0.1, 4.0, None)]
    ones = [dict(zip(names, one, strict=True)) for one in figures]
    found = study.summary(ones)
    assert found["regret_worst"] == 0.1
    assert found["regret_median"] == pytest.approx(0.005)
    assert found["flip_rate"] == pytest.approx(2 / 6)
    assert found["tune_seconds_median"] == 3.0
    assert found["first_pick_regret_median"] == pytest.approx(0.3)
    assert found["first_pick_regret_p95"] == 0.5
    assert found["transfer_regret_median"] == 0.2
    assert study.summary(ones[1:])["transfer_regret_median"] is None


def test_transfer_is_the_winner_of_one_problem_on_another(monkeypatch):
    """Of two problems that want different configs, what each costs the other is what the formula says."""
    monkeypatch.setattr(study, "ProblemSubject", Formula)
    small, large = (
        MatmulProblem(1, 64, 64, 256, "float16", "float16"),
        MatmulProblem(1, 4096, 4096, 4096, "float16", "float16"),
    )
    space = study.ProblemSpace(large, H200).configs()
    slow = max(space, key=lambda config: made_up_us(large, config))
    with study.Workshop(None, 1) as shop:
        found = study._transfer(slow, large, H200, shop)
        own = study._searched(study._task(large, H200), shop, study.Rules())[0].best
        assert found == pytest.approx(made_up_us(large, slow) / own.us - 1)
        assert study._transfer(Config.of(BLOCK_M=3), small, H200, shop) is None


def test_a_neighbour_is_a_quarter_larger_and_as_aligned():
    odd = MatmulProblem(1, 1001, 1003, 1007, "bfloat16", "bfloat16", a_align=2, b_align=2, out_align=2)
    assert study.neighbour(odd) == replace(odd, m=1241, n=1243)
    assert study.neighbour(replace(odd, m=1)).m == 1
    turned = study.neighbour(PermuteProblem.turned(1, 8191, 8193, 2))
    assert turned == PermuteProblem.turned(1, 8191, 8193 + 2048, 2)
