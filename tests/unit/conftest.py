"""Fixtures for tests of decorated kernels, each run under Triton's decorator and under tritile's."""

import pytest
import triton

import tritile
from tests.mock_gpu import recording
from tritile.core.device import target_device


@pytest.fixture(params=[triton, tritile], ids=["triton", "tritile"])
def autotune(request):
    """`triton.autotune`, which proves the test, then `tritile.autotune`."""
    return request.param.autotune


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for an H200, for Triton and for tritile."""
    device = target_device("nvidia-h200")
    for name in ("gpu", "current_gpu"):
        monkeypatch.setattr(f"tritile.core.device.{name}", lambda index=0: device)
    with recording(device) as found:
        yield found
