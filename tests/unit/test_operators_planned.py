"""What is planned as a call is traced: the problem that the call will pose, on a GPU that is played here."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tritile
from tests.operators import OFFS, A, B, W, X, drawn
from tritile.core.versions import parsed
from tritile.ops import plan as plan_of
from tritile.ops.described import Extras, described
from tritile.ops.grouped import Operands
from tritile.ops.grouped import described as grouped
from tritile.ops.operators import library

pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.skipif(
        torch.version.cuda is not None
        and not torch.cuda.is_available()
        and parsed(torch.__version__) < (2, 13),
        reason="before 2.13 a torch made for CUDA asks for a driver even for fake tensors",
    ),
]


@pytest.fixture
def traced(monkeypatch):
    """The problems that are planned as a call on fakes on a GPU is traced."""
    problems = []
    monkeypatch.setattr(library, "planned", lambda problem, index: problems.append(problem))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(library, "capturing", lambda: False)

    def trace(call, *tensors, mode=None):
        with mode or FakeTensorMode():
            fakes = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda:0") for t in tensors
            ]
            call(*fakes)
        return problems[-1] if problems else None

    return trace


def test_products(traced):
    half, column = A.half(), B.half().mT.contiguous().mT
    wanted = plan_of.plan(tritile.matmul, half, column).problem
    assert traced(tritile.matmul, half, column) == wanted
    a, b, turned = (torch.empty(*shape, dtype=torch.complex64) for shape in ((64, 32), (32, 48), (48, 64)))
    wanted = described(a, b, turned.mT, "ieee").problem  # stored as out lies
    assert traced(lambda a, b, out: tritile.matmul(a, b, out=out), a, b, turned.mT) == wanted
    bias = drawn(5).half()
    extras = Extras(bias=bias, activation="gelu")
    x, weight, out = X.half(), W.half(), torch.empty(2, 3, 5).half()
    wanted = described(x, weight.mT, out, "ieee", extras).problem
    assert traced(lambda x, w, b: tritile.linear(x, w, b, activation="gelu"), x, weight, bias) == wanted


def test_gated_grouped_and_permuted(traced):
    x, weight, out = X.half(), W.half(), torch.empty(2, 3, 5).half()
    wanted = described(x, weight.mT, out, "ieee", Extras(activation="silu", up=weight.mT)).problem
    assert traced(tritile.gated_linear, x, weight, weight) == wanted
    a, b = drawn(6, 4).half(), drawn(3, 4, 2).half()
    wanted = grouped(Operands(a, b, OFFS, None, None), torch.empty(6, 2).half(), "ieee").problem
    assert traced(tritile.grouped_matmul, a, b, OFFS) == wanted
    wanted = tritile.plan(tritile.transpose, x).problem
    assert traced(tritile.transpose, x) == wanted


def test_a_quantized_weight(traced):
    weight = tritile.quantize(torch.randn(16, 32), bits=4, group_size=32, dtype=torch.float16)
    words = {"bits": 4, "group_size": 32, "n": 16, "k": 32}
    op = torch.ops.tritile.linear_quantized.default
    got = traced(
        lambda x, p, s: op(x, p, s, **words), torch.randn(3, 32).half(), weight.packed, weight.scales
    )
    assert (got.op, got.sizes[-3:]) == ("linear_quantized", (3, 16, 32))


def test_a_plan_that_cannot_be_made_disturbs_nothing(traced, monkeypatch):
    def fail(problem, index):
        raise RuntimeError

    monkeypatch.setattr(library, "planned", fail)
    assert traced(tritile.matmul, A.half(), B.half()) is None


def test_what_starts_amid_16_bytes_is_planned_as_such():
    whole = torch.zeros(40, dtype=torch.float16)
    for offset in range(9):
        view = whole[offset : offset + 6].view(2, 3)
        assert library._stand_in(view).data_ptr() % 16 == (2 * offset) % 16
