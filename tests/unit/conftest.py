"""Fixtures for tests of decorated kernels, under Triton's decorator and tritile's, and of shipped tables."""

import pytest
import triton

import tritile
from tests.mock_gpu import recording
from tritile.choose import gpu_tables, pick
from tritile.core.device import target_device
from tritile.tuner.store import files


@pytest.fixture(params=["triton", "tritile", "adopted"])
def autotune(request):
    """`triton.autotune`, which proves the test, `tritile.autotune`, and Triton's where it is adopted."""
    if request.param != "adopted":
        yield {"triton": triton, "tritile": tritile}[request.param].autotune
        return
    with tritile.adopt():
        yield triton.autotune


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for an H200, for Triton and for tritile."""
    device = target_device("nvidia-h200")
    for name in ("gpu", "current_gpu"):
        monkeypatch.setattr(f"tritile.core.device.{name}", lambda index=0: device)
    with recording(device) as found:
        yield found


def forget_tables():
    for kept in (gpu_tables._like, files._opened):
        kept.cache_clear()
    pick.forget()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder in the place of that of shipped tables."""
    tables = tmp_path / "tables"
    tables.mkdir()
    monkeypatch.setattr(gpu_tables, "_folder", lambda: tables)
    forget_tables()
    yield tables
    forget_tables()
