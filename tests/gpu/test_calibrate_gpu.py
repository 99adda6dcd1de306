"""Calibrating on a GPU: sweeps, what is trained by them, and the race of the likeliest in mode "tune"."""

import math

import pytest
import torch

import tritile
import tritile.tune.calibrate.candidates as choosing
from tests.reference import assert_product, values
from tritile.choose import gpu_tables, pick
from tritile.cli import calibrating
from tritile.core.device import current_gpu
from tritile.families.space import illegal
from tritile.tune.calibrate import sweep, train
from tritile.tune.calibrate.draw import DRAWS, drawn
from tritile.tune.subject import torch_calls

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forgotten")]


@pytest.mark.parametrize("name", DRAWS)
def test_a_sweep_times_configs_and_torch(name):
    device, told = current_gpu(), []
    problems = [p for p in drawn(name, 60, "gpu") if p.bytes < 1 << 24 and p.m >= 64][:3]
    assert len(problems) == 3
    configs = dict.fromkeys(c for p in problems for c in list(choosing.likely(p, device))[:3])
    chooser = sweep.ready(problems, list(configs), device, told.append)
    rows = list(sweep.sweep(problems, chooser, device, told.append))
    assert [row.problem for row in rows] == problems, told
    peak = device.memory_gbps * 1e3  # bytes a microsecond
    for row in rows:
        least = row.problem.bytes / peak / 2  # what lies in the L2 cache comes faster
        assert all(least < us < 1e5 for us in row.times.values())
        assert (row.torch_us is None) == (row.problem.op not in torch_calls.RUNS)
        assert row.torch_us is None or least < row.torch_us < 1e5


def test_calibration_serves_plans(tmp_path, monkeypatch):
    """What is timed here is trained by, and predicts other sizes; a second calibration adds to the first."""
    monkeypatch.setenv("TRITILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(train, "STEPS", 100)
    monkeypatch.setattr(calibrating, "LIKELY", 4)
    device = current_gpu()
    sweeps = gpu_tables.sweeps_path(device)
    for sizes in (8, 12):
        made = calibrating.calibrate(["permute_4"], device, sizes, 24, math.inf, tmp_path, sweeps)
        assert [each.classes["permute_4"].loss.sizes <= sizes for each in made] == [True]
    (problem,) = drawn("permute_4", 1, "another")
    plan = pick.by_predictor(problem, device)
    assert "measured here" in plan.why
    assert illegal(plan.config, problem, device) is None
    least = problem.bytes / (device.memory_gbps * 1e3) / 2
    assert least < plan.us < 100 * least + 100


def test_mode_tune_measures_the_likeliest_alone():
    a, b = values((333, 1024), torch.bfloat16, 0, "cuda"), values((512, 1024), torch.bfloat16, 1, "cuda")
    with tritile.mode("tune"):
        assert_product(tritile.matmul(a, b.mT), a, b.mT)
    plan = tritile.plan(tritile.matmul, a, b.mT)
    assert plan.source == "exact"
    measured = [trial.config for trial in pick.trials(plan.problem, current_gpu()) if trial.us]
    assert plan.config in measured
    assert set(measured) <= set(pick.likely(plan.problem, current_gpu(), 8))
    assert len(measured) >= 2
