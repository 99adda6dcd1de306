"""Portfolios on a GPU: sweeps that measure them, and the race of the likeliest in mode "tune"."""

import threading

import pytest
import torch

import tritile
from tests.reference import assert_product, values
from tritile.core.device import current_gpu
from tritile.planning import plans
from tritile.tune.calibrate import run, sweep
from tritile.tune.calibrate.draw import DRAWS, drawn
from tritile.tune.measure.timing import Queued
from tritile.tune.subject import torch_calls

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgotten")]


@pytest.mark.parametrize("name", DRAWS)
def test_a_sweep_times_configs_and_torch(name):
    device, told = current_gpu(), []
    problems = [p for p in drawn(name, 60, "gpu") if p.bytes < 1 << 24 and p.m >= 64][:3]
    assert len(problems) == 3
    configs = dict.fromkeys(c for p in problems for c in list(run.likely(p, device))[:3])
    chooser = sweep.ready(problems, list(configs), device, told.append)
    rows = list(sweep.sweep(problems, chooser, device, told.append))
    assert [row.problem for row in rows] == problems, told
    peak = device.memory_gbps * 1e3  # bytes a microsecond
    for row in rows:
        least = row.problem.bytes / peak / 2  # what lies in the L2 cache comes faster
        assert all(least < us < 1e5 for us in row.times.values())
        assert (row.torch_us is None) == (row.problem.op not in torch_calls.RUNS)
        assert row.torch_us is None or least < row.torch_us < 1e5


def test_mode_tune_measures_the_likeliest_alone():
    a, b = values((333, 1024), torch.bfloat16, 0, "cuda"), values((512, 1024), torch.bfloat16, 1, "cuda")
    with tritile.mode("tune"):
        assert_product(tritile.matmul(a, b.mT), a, b.mT)
    plan = tritile.plan(tritile.matmul, a, b.mT)
    assert plan.source == "exact"
    measured = [trial.config for trial in plans.trials(plan.problem, current_gpu()) if trial.us]
    assert plan.config in measured
    assert set(measured) <= set(plans.likely(plan.problem, current_gpu(), 8))
    assert len(measured) >= 2


def test_other_threads_allocate_and_wait_while_launches_are_timed():
    """What is measured in a program's own process must not fail what its other threads do."""
    x, failed, stop = torch.zeros(1 << 20, device="cuda"), [], threading.Event()

    def allocate():
        size = 1 << 21
        while not stop.is_set():
            try:
                torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)
                torch.cuda.synchronize()
                size += 1 << 21  # a new piece of memory each time
                if size > 1 << 28:
                    torch.cuda.empty_cache()
                    size = 1 << 21
            except RuntimeError as error:
                failed.append(error)
                return

    other = threading.Thread(target=allocate)
    other.start()
    try:
        for _ in range(50):
            assert Queued(lambda call: call.add_(1), [x] * 3).time_us() > 0
    finally:
        stop.set()
        other.join()
    assert failed == []
    torch.cuda.synchronize()
    assert float(x[0]) >= 50 * (1 + 3)  # more, where it was not enqueued in time and timed again
