"""Explanations on a GPU: what is measured now, beside what is predicted."""

import pytest
import torch

import tritile
from tritile.core.problem import MatmulProblem
from tritile.lab.explain import config_like

pytestmark = [pytest.mark.gpu, pytest.mark.serial]


def test_a_product_is_measured_and_so_are_the_next_best():
    a, b = (torch.randn(1024, 1024, device="cuda", dtype=torch.float16) for _ in range(2))
    found = tritile.explain(a, b)
    assert found.live
    assert 0.2 < found.measured_us / found.predicted_us < 5
    assert found.measured_us > 0.9 * found.roof_us
    assert len([other for other in found.others if other.measured_us]) >= 3
    assert "now: " in repr(found)


def test_a_config_that_is_named_is_measured():
    problem = MatmulProblem(1, 512, 512, 512, "float16", "float16")
    device = tritile.plan(problem).device
    found = tritile.explain(problem, config="tile BLOCK_M=64")
    assert found.config == config_like("tile BLOCK_M=64", problem, device)
    assert found.measured_us > 0
    assert not tritile.explain(problem, measure=False).live


def test_a_transpose_is_measured():
    found = tritile.explain(torch.randn(4096, 4099, device="cuda"))
    assert found.live
    assert found.measured_us > 0.9 * found.roof_us
