"""What tests of kernels get: outputs that begin as NaN."""

import pytest

from tests.reference import poison_empty


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces and outputs begin as NaN, so that what is not written shows."""
    poison_empty(monkeypatch)
