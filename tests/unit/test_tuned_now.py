"""A problem that mode "tune" meets: the likeliest configs are raced; without them the space is searched."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch

from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem, QuantizedProblem
from tritile.errors import TuningError
from tritile.families.registry import FAMILIES
from tritile.planning import model, plans
from tritile.planning.store import store_of
from tritile.planning.trial import TORCH, Trial
from tritile.tune import now
from tritile.tune.subject import race as race_module
from tritile.tune.subject import torch_calls
from tritile.tune.subject.problem import is_tuned

H200 = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 1234, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
PACKED = QuantizedProblem(1234, 4096, 4096, "bfloat16", 4, 128)
UNSERVED = replace(PROBLEM, dtype="float64", out_dtype="float64")


@pytest.fixture
def race(monkeypatch):
    """Times by config or call of torch's, which a test sets, and the configs whose answers are wrong."""
    times, wrong, seen = {}, set(), []

    class Clock:
        def __init__(self, run, calls, before):
            self.run = getattr(run, "func", run)
            if self.run not in times:
                raise TuningError("it does not run")
            self.us = itertools.cycle(times[self.run])

        def time_us(self):
            seen.append((self.run, torch.backends.cuda.matmul.fp32_precision))
            return next(self.us)

    def check(run, call, every):
        assert not every
        if run in wrong:
            raise TuningError("wrong answer")
        return 1e-3

    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda gpus: contextlib.nullcontext())
    monkeypatch.setattr(now, "calls_of", lambda problem, device: [problem])
    monkeypatch.setattr(now, "_compile", lambda *arguments: None)
    monkeypatch.setattr(now, "flusher", lambda device: None)
    monkeypatch.setattr(now, "Queued", Clock)
    monkeypatch.setattr(now.launch, "prepare", lambda call, config: config)
    for module in (now, race_module):
        monkeypatch.setattr(module, "run_of", lambda prepared: prepared)
    monkeypatch.setattr(now.answers, "check", check)
    monkeypatch.setattr(now, "searched_now", lambda *arguments: "searched")
    plans.forget()
    yield times, wrong, seen
    plans.forget()


def remembered(problem, us=40.0):
    """The config that is on record as the fastest."""
    config = model.pick(problem, H200)
    digest = FAMILIES[problem.op][config.family].digest
    store_of(H200).add(digest, Trial(problem, config, us, error=0.0))
    return config


def test_the_fastest_of_the_likeliest_runs_and_is_remembered(race):
    times, *_ = race
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
    ("change", "run"),
    [
        ({}, torch_calls.multiply),
        ({"epilogue": "bias=row"}, torch_calls.add),
        ({"epilogue": "bias=row gelu"}, None),
        ({"epilogue": "bias=row", "batch": 3}, None),
        ({"epilogue": "gelu", "dtype": "float32", "out_dtype": "float32"}, torch_calls.compose),
        (PACKED, torch_calls.unpack_and_multiply),
    ],
)
def test_torch_is_timed_in_turns_with_the_fastest_on_record(race, change, run):
    """Its time on record is by as much longer than ours as it was in the race, however far behind it is."""
    times, _, seen = race
    problem = PACKED if change is PACKED else replace(PROBLEM, **change)
    now.time_torch(problem, H200, 0)
    assert seen == []  # nothing of ours is on record
    config = remembered(problem)
    times |= {config: [10.0], run: [25.0]}
    now.time_torch(problem, H200, 0)
    found = store_of(H200).best(TORCH, problem)
    if run is None:
        assert (found, seen) == (None, [])
    else:
        assert [clock for clock, _ in seen[4:]] == [config, run] * 4
        assert found.us == pytest.approx(100.0)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torch_is_timed_in_the_precision_of_the_problem(race, cuda_matmul, precision):
    times, _, seen = race
    problem = replace(PROBLEM, dtype="float32", out_dtype="float32", precision=precision)
    times |= {remembered(problem): [1.0], torch_calls.multiply: [1.0]}
    cuda_matmul.fp32_precision = "ieee" if precision == "tf32" else "tf32"
    now.time_torch(problem, H200, 0)
    assert {setting for _, setting in seen} == {precision}
    assert cuda_matmul.fp32_precision != precision


def test_where_torch_offers_no_such_product_the_failure_is_remembered(race):
    times, *_ = race
    times[remembered(PROBLEM)] = [10.0]
    now.time_torch(PROBLEM, H200, 0)
    assert [trial.failure for trial in store_of(H200).trials(TORCH, PROBLEM)] == [
        "TuningError: it does not run"
    ]


def test_of_winners_within_noise_the_first_in_a_fixed_order(race):
    times, *_ = race
    likely = plans.likely(PROBLEM, H200, now.RACED)
    first = min(likely, key=lambda config: config.key)
    for one, other in ((10.00, 10.03), (10.03, 10.00)):
        times |= {config: [one, 10.1, 10.0] if config == first else [other, 10.05, 10.1] for config in likely}
        assert now.tuned_now(PROBLEM, H200, 0) == first


def test_a_wrong_answer_costs_its_config_alone(race):
    times, wrong, _ = race
    likely = plans.likely(PROBLEM, H200, now.RACED)
    times |= {config: [10.0 + place] * 3 for place, config in enumerate(likely)}
    wrong.add(likely[0])
    assert now.tuned_now(PROBLEM, H200, 0) == likely[1]
    failed = [trial for trial in plans.trials(PROBLEM, H200) if trial.failure]
    assert [trial.config for trial in failed] == [likely[0]]
    wrong.update(likely)
    assert now.tuned_now(PROBLEM, H200, 0) == "searched"


def test_a_race_is_no_search_and_where_it_finds_no_memory_it_is_searched(race, monkeypatch):
    times, *_ = race
    times |= {config: [10.0] * 3 for config in plans.likely(PROBLEM, H200, now.RACED)}
    now.tuned_now(PROBLEM, H200, 0)
    plans.forget()
    assert plans.plan_for(PROBLEM, H200, "tune").source == "exact"
    assert not is_tuned(PROBLEM, H200)  # `tritile tune` goes on where the race stopped

    def no_memory(problem, device):
        raise torch.OutOfMemoryError("of 9 GiB")

    monkeypatch.setattr(now, "calls_of", no_memory)
    assert now.tuned_now(replace(PROBLEM, m=99), H200, 0) == "searched"


def test_without_a_portfolio_it_is_searched(race):
    assert now.tuned_now(UNSERVED, H200, 0) == "searched"
    assert now.tuned_now(PROBLEM, H200, 0) == "searched"  # nothing ran
