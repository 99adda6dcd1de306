"""IEEE fp32 products that copy b row by row first, compiled ahead of time."""

from dataclasses import replace

import pytest

from tests.ahead import fits
from tests.kernels.test_rows_interpreted import CONFIG, NT
from tritile.core.device import target_device
from tritile.core.problem import matmul as problems
from tritile.families.space import illegal
from tritile.runtime import ahead


@pytest.mark.parametrize("name", ["sm_80", "nvidia-h200", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    "problem", [NT, replace(NT, batch=3, m=257, n=131, k=1003, a_align=4, b_align=4, out_align=4)]
)
def test_both_kernels_fit(name, problem, monkeypatch):
    monkeypatch.setattr(problems, "_BY_ROWS_FROM", 1)
    device = target_device(name)
    assert illegal(CONFIG, problem, device) is None
    with ahead.compiling_for(device):
        kernels = [make() for make in ahead.compiles_for(problem, CONFIG, device)]
    assert len(kernels) == 2
    assert all(fits(ahead.resources(kernel), device) for kernel in kernels)
