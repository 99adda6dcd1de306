"""Calls of `matmul` met before, on tensors that say they are on a GPU: what is looked at every time.

Nothing is compiled or launched: a stand-in records what the launch of the first call is given.
"""

import pytest
import torch

import tritile
from tritile.errors import GradientError, OverlapError
from tritile.ops import matmul as matmul_op


class OnGpu(torch.Tensor):
    """Host memory that is taken for a GPU's."""

    is_cuda = True


@pytest.fixture
def first_calls(monkeypatch):
    """The calls that were prepared: those that were not met before."""
    calls = []
    monkeypatch.setattr(matmul_op, "on_host", lambda tensor: False)
    monkeypatch.setattr(matmul_op, "prepared", lambda call: calls.append(call) or (lambda *tensors: None))
    monkeypatch.setattr(matmul_op, "fresh", lambda shape, strides, dtype, device: torch.empty(shape))
    tritile.forget()
    yield calls
    tritile.forget()


def parts(*places):
    """6 x 6 matrices that begin at these elements of one memory, far apart from each other unless told."""
    memory = torch.zeros(1024).as_subclass(OnGpu)
    return [memory[place : place + 36].view(6, 6) for place in places]


@pytest.mark.parametrize("swapped", [False, True])
def test_an_output_that_overlaps_an_input_is_refused_in_a_warm_call_too(first_calls, swapped):
    apart, over_a, over_b = parts(0, 256, 512), parts(0, 256, 4), parts(0, 256, 252)
    for a, b, out in (apart, apart):
        matmul_op.eager(a, b, out.mT if swapped else out)
    for (a, b, out), name in ((over_a, "input"), (over_b, "other")):
        with pytest.raises(OverlapError, match=f"out overlaps {name}"):
            matmul_op.eager(a, b, out.mT if swapped else out)
    assert len(first_calls) == 1  # the others were known


def test_an_output_of_inference_mode_is_refused_in_a_warm_call_too(first_calls):
    a, b, out = parts(0, 256, 512)
    matmul_op.eager(a, b, out)
    with torch.inference_mode():
        of_inference = torch.zeros(36).as_subclass(OnGpu).view(6, 6)
    with pytest.raises(GradientError, match="inference_mode"):
        matmul_op.eager(a, b, of_inference)
    assert len(first_calls) == 1


@pytest.mark.parametrize(
    "rules", [lambda: tritile.mode("off"), tritile.batch_invariant], ids=["mode", "rows"]
)
def test_calls_by_other_rules_are_planned_anew(first_calls, rules):
    a, b = parts(0, 256)
    for _ in range(2):
        matmul_op.eager(a, b)
        with rules():
            matmul_op.eager(a, b)
    assert len(first_calls) == 2
