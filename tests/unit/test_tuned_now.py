"""A problem that mode "tune" meets: the likeliest configs are raced; without them the space is searched."""

import contextlib
from dataclasses import replace
from typing import ClassVar

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
from tritile.tune.subject import is_tuned, torch_calls

H200 = target_device("nvidia-h200")
PROBLEM = MatmulProblem(1, 1234, 4096, 4096, "bfloat16", "bfloat16", b_layout="column")
PACKED = QuantizedProblem(1234, 4096, 4096, "bfloat16", 4, 128)
UNSERVED = replace(PROBLEM, dtype="float64", out_dtype="float64")


class Clock:
    """Tells what a config takes, and torch."""

    us: ClassVar = {
        torch_calls.multiply: 15.0, torch_calls.add: 18.0, torch_calls.compose: 20.0,
        torch_calls.unpack_and_multiply: 21.0, None: 10.0,
    }  # fmt: skip
    made: ClassVar = []

    def __init__(self, run, calls, before):
        self.run = run
        Clock.made.append(run)

    def time_us(self):
        return Clock.us.get(self.run, Clock.us[None])


@pytest.fixture
def race(monkeypatch):
    """Times by config, which a test sets; and the configs whose answers are wrong."""
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
    monkeypatch.setattr(Clock, "made", [])
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
def test_torch_is_timed_by_turns_with_what_is_known_to_be_fastest(race, change, run):
    """What is remembered of torch is by as much longer than our time as it was beside us."""
    problem = PACKED if change is PACKED else replace(PROBLEM, **change)
    now.time_torch(problem, H200, 0)
    assert Clock.made == []  # nothing is known of ours
    config = model.pick(problem, H200)
    store = store_of(H200)
    store.add(FAMILIES[problem.op][config.family].digest, Trial(problem, config, 40.0, error=0.0))
    now.time_torch(problem, H200, 0)
    found = store.best(TORCH, problem)
    if run is None:
        assert found is None
        assert Clock.made == []
    else:
        assert Clock.made == [config, run]
        assert found.us == pytest.approx(40.0 * Clock.us[run] / Clock.us[None])


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_torch_is_timed_in_the_precision_of_the_problem(race, monkeypatch, cuda_matmul, precision):
    problem, seen = replace(PROBLEM, dtype="float32", out_dtype="float32", precision=precision), []
    config = model.pick(problem, H200)
    store = store_of(H200)
    store.add(FAMILIES["matmul"][config.family].digest, Trial(problem, config, 40.0, error=0.0))
    cuda_matmul.fp32_precision = "ieee" if precision == "tf32" else "tf32"
    monkeypatch.setattr(Clock, "time_us", lambda self: seen.append(cuda_matmul.fp32_precision) or 1.0)
    now.time_torch(problem, H200, 0)
    assert set(seen) == {precision}
    assert cuda_matmul.fp32_precision != precision


def test_where_torch_offers_no_such_product_nothing_is_remembered_of_it(race, monkeypatch):
    config = model.pick(PROBLEM, H200)
    store = store_of(H200)
    store.add(FAMILIES["matmul"][config.family].digest, Trial(PROBLEM, config, 40.0, error=0.0))
    monkeypatch.setattr(Clock, "time_us", lambda self: (_ for _ in ()).throw(RuntimeError("no such product")))
    now.time_torch(PROBLEM, H200, 0)
    assert store.best(TORCH, PROBLEM) is None


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
