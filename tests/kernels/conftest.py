"""What tests of kernels get: outputs that begin as NaN, and no warnings that interpreting gives."""

import os
from pathlib import Path

import pytest

from tests.reference import poison_empty

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
QUIET = (
    "ignore::tritile.errors.InterpreterWarning",
    "ignore::RuntimeWarning",  # numpy's, at NaN and at overflow
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        for warning in QUIET:
            item.add_marker(pytest.mark.filterwarnings(warning), append=False)
        if INTERPRETING and item.path.stem.endswith("_ahead"):
            item.add_marker(pytest.mark.skip(reason="triton.jit interprets in this process"))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces and outputs begin as NaN, so that what is not written shows."""
    poison_empty(monkeypatch)
