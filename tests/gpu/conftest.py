"""What tests on a GPU ask for: memory that begins as NaN, and calls that nothing met before."""

import pytest

import tritile
from tests.reference import poison_empty


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces and outputs begin as NaN, so that what is not written shows."""
    poison_empty(monkeypatch)


@pytest.fixture
def fresh(cuda_matmul):
    """No launch prepared by another test, and torch's own products in full fp32."""
    cuda_matmul.fp32_precision = "ieee"
    tritile.forget()
