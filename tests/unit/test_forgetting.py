"""Memos have a bound: a process that meets sizes without end keeps its memory, and answers right."""

import gc
import weakref

import pytest
import torch

import tritile
from tritile.core.config import Config
from tritile.core.device import target_device
from tritile.core.forgetting import MOST, Memo
from tritile.core.problem import MatmulProblem
from tritile.ops import memo
from tritile.ops import request as ops_request
from tritile.planning import plans
from tritile.runtime import counters

HOPPER = target_device("nvidia-h200")
SIZES = range(1, 20_001)


class Launch:
    """Stands for a prepared launch of a product with `k` columns of a."""

    def __init__(self, k):
        self.k = k

    def __call__(self, *tensors):
        pass

    def at(self, pointers):
        pass


@pytest.fixture(autouse=True)
def _nothing_stays():
    tritile.forget()
    yield
    tritile.forget()


def test_the_older_half_makes_room_and_is_freed():
    kept, launches = Memo(4), [Launch(k) for k in range(5)]
    for k, launch in enumerate(launches):
        kept[k] = launch
        kept[k] = launch  # replaced, which takes no room
    freed = [weakref.ref(launch) for launch in launches]
    del launch, launches
    gc.collect()
    assert list(kept) == [2, 3, 4]
    assert [each() is None for each in freed] == [True, True, False, False, False]


def test_calls_of_sizes_without_end(monkeypatch):
    prepared, launched = [], []

    def prepare(call, *how):
        prepared.append(call.problem.k)
        return Launch(call.problem.k)

    monkeypatch.setattr(ops_request, "on_host", lambda tensor: False)
    monkeypatch.setattr(ops_request, "prepared", prepare)
    monkeypatch.setattr(memo, "new_output", lambda shape, *rest: torch.empty(shape))
    monkeypatch.setattr(Launch, "at", lambda launch, pointers: launched.append(launch.k))
    numbers = torch.zeros(2 * SIZES[-1])

    def multiply(k):
        a, b = numbers[: 2 * k].view(2, k), numbers[: 2 * k].view(k, 2)
        assert tritile.matmul(a, b).shape == (2, 2)

    for k in SIZES:
        multiply(k)
    assert prepared == [*SIZES]
    assert MOST // 2 <= len(memo.CALLS) <= MOST
    for k in (SIZES[0], SIZES[-1], SIZES[0]):  # dropped, kept, prepared again
        multiply(k)
    assert prepared == [*SIZES, SIZES[0]]
    assert launched[-2:] == [SIZES[-1], SIZES[0]]


def test_plans_of_sizes_without_end(monkeypatch):
    made = []

    def choose(problem, device, mode, by_torch):
        made.append(problem.m)
        return plans.Plan(problem, Config.of(family="tile", BLOCK_M=problem.m), "model", device)

    monkeypatch.setattr(plans, "_chosen", choose)
    for m in (*SIZES, SIZES[-1], SIZES[0]):
        plan = plans.plan_for(MatmulProblem(1, m, 16, 16, "bfloat16", "bfloat16"), HOPPER)
        assert (plan.problem.m, plan.config["BLOCK_M"]) == (m, m)
    assert made == [*SIZES, SIZES[0]]
    assert MOST // 2 <= len(plans._memo) <= MOST


def test_counters_of_streams_without_end(monkeypatch):
    monkeypatch.setattr(counters, "capturing", lambda: False)
    monkeypatch.setattr(counters.Counters, "_zeros", lambda self, count: torch.zeros(count))
    kept = counters.Counters(0)
    first = kept.take(4, 1000)
    assert kept.take(4, 1000) is first
    for stream in range(1000, 3000):
        last = kept.take(4, stream)
        assert kept.take(4, stream) is last
    assert len(kept._eager) <= counters._STREAMS
    assert kept.take(4, 1000) is not first
