"""The table of what batch-invariant mode costs, as far as no GPU is needed."""

import pytest
import torch

import invariance
import tritile
from tritile.core.device import TARGETS
from tritile.core.views import posed
from tritile.lab.report import baselines, torch_ways
from tritile.ops import linear_quantized
from tritile.ops.described import described
from tritile.tune.measure import timing
from tritile.tune.subject import operands, torch_calls

HOPPER = TARGETS["nvidia-h200"]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("m", [1, 5, 16])
def test_what_is_compiled_is_what_calls_pose(m, invariant):
    x, weight = torch.zeros(m, 64, dtype=torch.bfloat16), torch.zeros(48, 64, dtype=torch.bfloat16)
    packed, out = tritile.quantize(weight, bits=4), torch.zeros(m, 48, dtype=torch.bfloat16)
    with tritile.batch_invariant(invariant):
        calls = described(x, weight.t(), out, "ieee"), linear_quantized.described(x, packed, None, out)
    for name, call in zip(("bfloat16", "int4"), calls, strict=True):
        assert call.problem == invariance.problem_of(name, m, 48, 64, invariant)


def test_a_line_tells_times_and_their_ratio():
    config = invariance.config_of(invariance.problem_of("bfloat16", 3, 4096, 4096, True), HOPPER)
    row = {"weight": "bfloat16", "m": 3, "n": 4096, "k": 4096, "invariant_us": 12.5, "default_us": 10.0}
    row |= {"torch_us": 25.0, "cost": 1.25, "invariant_config": config.to_dict()}
    for word in ("bfloat16 4096x4096, 3 rows", "12.5", "10.0", "25.0", "1.25", str(config)):
        assert word in invariance.line_of(row)


@pytest.mark.parametrize("weight", ["bfloat16", "int4"])
def test_a_line_tells_both_modes_and_torch_as_they_were_timed(weight, monkeypatch):
    """Let torch stand for tritile's kernels, and times come from a list."""
    times = iter([6.0, 4.0, 8.0])  # the mode, the default, torch
    prepared = []

    class Graph:
        def __init__(self, run, calls):
            self.launches, self.us = len(calls), next(times)
            for call in calls:
                run(call)

        def time_us(self):
            return self.us

    def make(dtype, elements):
        kind = getattr(torch, dtype)
        return torch.randn(elements).to(kind) if kind.is_floating_point else torch.ones(elements, dtype=kind)

    plain = baselines.into_out(torch_ways.by_wide_weight if weight == "int4" else torch_calls.multiply)
    monkeypatch.setattr(timing, "Graph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(operands, "copies_of", lambda problem, gpu: [posed(problem, make) for _ in range(2)])
    monkeypatch.setattr(invariance.launch, "prepare", lambda call, config: prepared.append((call, config)))
    monkeypatch.setattr(operands, "run_of", lambda launch: plain)
    line = invariance.row_of(weight, 3, 64, 128, HOPPER)
    assert [call.invariant for call, _ in prepared] == [True, False]
    assert [config.to_dict() for _, config in prepared] == [line["invariant_config"], line["default_config"]]
    assert (line["invariant_us"], line["default_us"], line["torch_us"], line["cost"]) == (6.0, 4.0, 8.0, 1.5)
    assert (line["samples"], line["launches"], line["torch_spread"]) == (40, 2, 0.0)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(invariance.device, "current_gpu", lambda: None)
    monkeypatch.setattr("sys.argv", ["invariance.py"])
    assert invariance.main() == 1
    assert "no GPU" in capsys.readouterr().err
