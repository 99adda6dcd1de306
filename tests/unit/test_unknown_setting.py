"""Products of float32 under a setting of torch's that tritile does not know: torch makes them.

Calls are made on host tensors that pass for a GPU's, so that torch really computes them.
"""

import pytest
import torch

import tritile
from tritile.choose import aten
from tritile.core.device import target_device
from tritile.errors import UnsupportedError
from tritile.nn.exchanged import LayerCall, compare
from tritile.ops import memo
from tritile.ops import request as ops_request

H200 = target_device("nvidia-h200")
A, B, C = torch.randn(6, 9), torch.randn(9, 5), torch.randn(5)
BATCH, EXPANDED, STRIDED = (
    torch.randn(3, 6, 9),
    torch.randn(9, 5).expand(3, 9, 5),
    torch.randn(12, 18)[::2, ::2],
)
CALLS = {
    "matmul": (lambda: tritile.matmul(A, B), A @ B),
    "a vector": (lambda: tritile.matmul(A, B[:, 0]), A @ B[:, 0]),
    "a batch": (lambda: tritile.matmul(BATCH, EXPANDED), BATCH @ EXPANDED),
    "strides": (lambda: tritile.mm(STRIDED, B), STRIDED @ B),
    "another dtype": (lambda: tritile.matmul(A, B, out_dtype=torch.bfloat16), (A @ B).bfloat16()),
    "linear": (lambda: tritile.linear(A, B.t(), C, activation="relu"), torch.relu(A @ B + C)),
    "a bias of bf16": (lambda: tritile.linear(A, B.t(), C.bfloat16()), A @ B + C.bfloat16()),
    "addmm": (lambda: tritile.addmm(C, STRIDED, B, beta=2, alpha=3), 2 * C + 3 * (STRIDED @ B)),
    "out": (lambda: tritile.addmm(C, A, B, out=torch.empty(5, 6).t(), activation="silu"),
            torch.nn.functional.silu(A @ B + C)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TRITILE_BACKENDS", "triton,aten")
    monkeypatch.setattr(ops_request, "on_host", lambda tensor: False)
    monkeypatch.setattr(ops_request.devices, "gpu", lambda index: H200)
    monkeypatch.setattr(memo, "fp32_precision", lambda backend, op: "bfx9")
    tritile.forget()
    yield
    tritile.forget()


@pytest.mark.parametrize("name", CALLS)
def test_torch_computes_the_call(name, monkeypatch):
    call, wanted = CALLS[name]
    monkeypatch.setattr(ops_request, "prepared", lambda *given: pytest.fail("a kernel of tritile's runs"))
    for _ in range(2):  # planned, then remembered
        torch.testing.assert_close(call(), wanted)


def test_a_gradient_too():
    a = A.clone().requires_grad_()
    tritile.matmul(a, B).sum().backward()
    torch.testing.assert_close(a.grad, B.sum(1).expand(6, 9))


def test_plan_and_layer_say_so():
    found = tritile.plan("matmul", A, B, device=H200)
    assert found.config == aten.CONFIG
    assert "fp32_precision" in found.why
    assert "torch's setting" in repr(found)
    assert tritile.plan("matmul", A, B, precision="tf32", device=H200).problem.precision == "tf32"
    layer = compare(
        LayerCall(64, torch.float32, True, True), torch.empty(512, 512, device="meta"), None, H200
    )
    assert not layer.wins


ENDS = torch.tensor([2, 6], dtype=torch.int32)
REFUSED = {
    "gated_linear": lambda: tritile.gated_linear(A, B.t(), B.t()),
    "grouped_matmul": lambda: tritile.grouped_matmul(A, B.expand(2, 9, 5), ENDS),
    "batch-invariant": tritile.batch_invariant()(lambda: tritile.matmul(A, B)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_compute_is_refused(name):
    with pytest.raises(UnsupportedError, match=r"fp32_precision is 'bfx9', .*precision='ieee' by name"):
        REFUSED[name]()
