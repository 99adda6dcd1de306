"""What tests on a GPU ask for: memory that begins as NaN, and calls that nothing met before."""

import pytest
import torch

import tritile
from tests.reference import poison_empty


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces and outputs begin as NaN, so that what is not written shows."""
    poison_empty(monkeypatch)


@pytest.fixture
def fresh():
    """No launch prepared by another test, and torch's own products in full fp32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    tritile.forget()
    yield
    torch.backends.cuda.matmul.fp32_precision = before
