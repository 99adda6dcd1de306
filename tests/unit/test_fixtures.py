"""What tests share leaves nothing behind."""

import re
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
NAMES = ["fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"]


@pytest.fixture
def unchanged():
    """Torch's settings of products are at a test's end what they were before it."""

    def now():
        return [getattr(torch.backends.cuda.matmul, name) for name in NAMES]

    before = now()
    yield
    assert now() == before


@pytest.mark.parametrize(("name", "value"), list(zip(NAMES, ["tf32", False, False], strict=True)))
def test_settings_of_products_are_restored(unchanged, cuda_matmul, name, value):
    setattr(cuda_matmul, name, value)
    assert getattr(torch.backends.cuda.matmul, name) == value


def test_monkeypatch_sets_none_of_torchs_settings():
    """It deletes at its end what an object's `__dict__` lacked: the setting stays, and the test fails."""
    pattern = re.compile(r"setattr\(\s*\"?(torch\.backends|torch\._(inductor|dynamo)\.config|config\b)")
    found = [path.name for path in TESTS.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))]
    assert found == []
