"""A problem that mode "tune" meets: the likeliest configs are raced; without them the space is searched."""

import contextlib
from dataclasses import replace

import pytest
import torch

from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.errors import TuningError
from tritile.planning import plans
from tritile.planning.store import store_of
from tritile.planning.trial import TORCH
from tritile.tune import now
from tritile.tune.subject import is_tuned, torch_calls

H200 = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 1234, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
UNSERVED = replace(PROBLEM, dtype="float64", out_dtype="float64")


class Clock:
    """Tells what torch takes, and in which precision of fp32 it was asked."""

    us, asked = 15.0, ()

    def __init__(self, run, calls, before):
        self.run = run

    def time_us(self):
        Clock.asked = (self.run, torch.backends.cuda.matmul.fp32_precision)
        return Clock.us


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
        now, "raced", lambda calls, configs, flush, clock: {c: times[c] for c in configs if c in times}
    )
    monkeypatch.setattr(now.launch, "prepare", lambda call, config: config)
    monkeypatch.setattr(now, "run_of", lambda prepared: prepared)
    monkeypatch.setattr(now.answers, "check", check)
    monkeypatch.setattr(now, "searched_now", lambda *arguments: "searched")
    monkeypatch.setattr(now, "Queued", Clock)
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


@pytest.mark.parametrize(
    ("change", "run", "setting"),
    [
        ({}, torch_calls.multiply, "ieee"),
        ({"epilogue": "bias=row"}, torch_calls.add, "ieee"),
        ({"epilogue": "bias=row gelu"}, None, ""),
        ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, torch_calls.multiply, "tf32"),
    ],
)
def test_torch_is_timed_beside_the_winner(race, change, run, setting, monkeypatch):
    problem = replace(PROBLEM, **change)
    monkeypatch.setattr(Clock, "asked", ())
    now.tuned_now(problem, H200, 0)
    if run is None:
        assert Clock.asked == ()
        assert store_of(H200).best(TORCH, problem) is None
    else:
        assert Clock.asked == (run, setting)
        assert store_of(H200).best(TORCH, problem).us == 15.0


def test_where_torch_offers_no_such_product_the_winner_runs_all_the_same(race, monkeypatch):
    monkeypatch.setattr(Clock, "time_us", lambda self: (_ for _ in ()).throw(RuntimeError("no such product")))
    assert now.tuned_now(PROBLEM, H200, 0) == "searched"
    assert store_of(H200).best(TORCH, PROBLEM) is None


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
