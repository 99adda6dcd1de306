"""A problem that mode "tune" meets: the likeliest configs are raced; without them the space is searched."""

import contextlib
from dataclasses import replace

import pytest
import torch

from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import TuningError
from tritile.planning import plans
from tritile.tune import now
from tritile.tune.subject import is_tuned

H200 = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 1234, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
UNSERVED = replace(PROBLEM, dtype="float64", out_dtype="float64")


@pytest.fixture
def race(monkeypatch, tmp_path):
    """Times by config, which a test sets; and the configs whose answers are wrong."""
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    times, wrong = {}, set()

    def check(run, call, every):
        assert not every
        if run in wrong:
            raise TuningError("wrong answer")
        return 1e-3

    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda gpus: contextlib.nullcontext())
    monkeypatch.setattr(now, "copies_of", lambda problem, device, count: [problem] * count)
    monkeypatch.setattr(now, "_compile", lambda *arguments: None)
    monkeypatch.setattr(now, "flusher", lambda device: None)
    monkeypatch.setattr(
        now, "raced", lambda calls, configs, flush: {c: times[c] for c in configs if c in times}
    )
    monkeypatch.setattr(now.launch, "prepare", lambda call, config: config)
    monkeypatch.setattr(now, "run_of", lambda prepared: prepared)
    monkeypatch.setattr(now.answers, "check", check)
    monkeypatch.setattr(now, "searched_now", lambda *arguments: "searched")
    plans.forget()
    yield times, wrong
    plans.forget()


def test_the_fastest_of_the_likeliest_runs_and_is_remembered(race):
    times, _ = race
    likely = plans.likely(PROBLEM, H200, now.RACED)
    assert len(likely) == now.RACED
    times |= {
        config: [10.0 + place, 10.1 + place, 9.9 + place] for place, config in enumerate(reversed(likely))
    }
    assert now.tuned_now(PROBLEM, H200, 0) == likely[-1]
    plans.forget()
    plan = plans.plan_for(PROBLEM, H200, "cached")
    assert (plan.source, plan.config, plan.us) == ("exact", likely[-1], 10.0)
    assert len(plans.trials(PROBLEM, H200)) == now.RACED


def test_of_winners_within_noise_the_first_in_a_fixed_order(race):
    times, _ = race
    likely = plans.likely(PROBLEM, H200, now.RACED)
    first = min(likely, key=lambda config: config.key)
    for one, other in ((10.00, 10.03), (10.03, 10.00)):
        times |= {config: [one, 10.1, 10.0] if config == first else [other, 10.05, 10.1] for config in likely}
        assert now.tuned_now(PROBLEM, H200, 0) == first


def test_a_wrong_answer_costs_its_config_alone(race):
    times, wrong = race
    likely = plans.likely(PROBLEM, H200, now.RACED)
    times |= {config: [10.0 + place] * 3 for place, config in enumerate(likely)}
    wrong.add(likely[0])
    assert now.tuned_now(PROBLEM, H200, 0) == likely[1]
    failed = [trial for trial in plans.trials(PROBLEM, H200) if trial.failure]
    assert [trial.config for trial in failed] == [likely[0]]
    wrong.update(likely)
    assert now.tuned_now(PROBLEM, H200, 0) == "searched"


def test_a_race_is_no_search_and_where_it_finds_no_memory_it_is_searched(race, monkeypatch):
    times, _ = race
    times |= {config: [10.0] * 3 for config in plans.likely(PROBLEM, H200, now.RACED)}
    now.tuned_now(PROBLEM, H200, 0)
    plans.forget()
    assert plans.plan_for(PROBLEM, H200, "tune").source == "exact"
    assert not is_tuned(PROBLEM, H200)  # `tritile tune` goes on where the race stopped

    def no_memory(problem, device, count):
        raise torch.OutOfMemoryError("of 9 GiB")

    monkeypatch.setattr(now, "copies_of", no_memory)
    assert now.tuned_now(replace(PROBLEM, m=99), H200, 0) == "searched"


def test_without_a_portfolio_it_is_searched(race):
    assert now.tuned_now(UNSERVED, H200, 0) == "searched"
    assert now.tuned_now(PROBLEM, H200, 0) == "searched"  # nothing ran
