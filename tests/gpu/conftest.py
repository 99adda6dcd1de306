"""What tests on a GPU ask for: memory that begins as NaN, and calls that nothing met before."""

import pytest

import tritile
from tests.reference import poison_empty
from tritile.choose import aten
from tritile.ops import request as ops_request


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces and outputs begin as NaN, so that what is not written shows."""
    poison_empty(monkeypatch)


@pytest.fixture
def fresh(cuda_matmul):
    """No launch prepared by another test, and torch's own products in full fp32."""
    cuda_matmul.fp32_precision = "ieee"
    tritile.forget()


@pytest.fixture
def forgotten():
    """Nothing that another test prepared or planned, and nothing that is left for the next."""
    tritile.forget()
    yield
    tritile.forget()


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch):
    """Has torch make what it may; returns a list that grows at each of its calls."""
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    made = []
    monkeypatch.setattr(ops_request, "is_by_aten", lambda problem, index: aten.illegal(problem) is None)
    make = ops_request.torch_call_of

    def counted(*given):
        found = make(*given)
        return found and (lambda *call: made.append(None) or found(*call))

    monkeypatch.setattr(ops_request, "torch_call_of", counted)
    tritile.forget()
    yield made
    tritile.forget()
