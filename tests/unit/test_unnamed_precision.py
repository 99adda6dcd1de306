"""The precision of float32 products where neither the call nor torch's setting names one."""

import pytest
import torch

import tritile
from tritile.core.device import target_device
from tritile.core.problem import MatmulProblem
from tritile.families import numerics
from tritile.ops import products
from tritile.ops.fused import gated_of, linear_of
from tritile.ops.products import matmul_of

LARGE = (2048, 2048, 384)
HOPPER = target_device("nvidia-h200")


def operands(m, n, k, dtype=torch.float32):
    return torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")


def precision_of(a, b, precision=None):
    return matmul_of(a, b, None, precision).checked(None)[2]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch, cuda_matmul):
    monkeypatch.setattr(products, "capability", lambda device: (9, 0))
    cuda_matmul.fp32_precision = "none"


SMALLER = [(2047, 2048, 384), (2048, 2048, 383), (2048, 2048, 8449), (511, 10000, 1024)]
OTHERS = [torch.float16, torch.float64, torch.complex64]


def test_large_products_are_made_of_parts():
    assert precision_of(*operands(*LARGE)) == "fp16x3"
    x, weight = torch.empty(3, 1024, 400, device="meta"), torch.empty(4096, 400, device="meta")
    assert linear_of(x, weight, activation="gelu").checked(None)[2] == "fp16x3"


@pytest.mark.parametrize(
    "given", [*(operands(*sizes) for sizes in SMALLER), *(operands(*LARGE, dtype) for dtype in OTHERS)]
)
def test_others_are_not(given):
    assert precision_of(*given) == "ieee"


@pytest.mark.parametrize("named", ["ieee", "tf32"])
def test_a_precision_that_is_named_or_that_torch_is_set_to_is_taken(cuda_matmul, named):
    assert precision_of(*operands(*LARGE), named) == named
    cuda_matmul.fp32_precision = named
    assert precision_of(*operands(*LARGE)) == named


def test_batch_invariant_gated_and_other_gpus_products_have_no_parts(monkeypatch):
    with tritile.batch_invariant():
        assert precision_of(*operands(*LARGE)) == "ieee"
    x, weight = torch.empty(2048, 384, device="meta"), torch.empty(2048, 384, device="meta")
    assert gated_of(x, weight, weight).checked(None)[2] == "ieee"
    monkeypatch.setattr(products, "capability", lambda device: (8, 0))
    assert precision_of(*operands(*LARGE)) == "ieee"


def test_a_problem_says_the_same():
    problem = MatmulProblem(1, *LARGE, "float32", "float32")
    assert numerics.unnamed(problem, HOPPER).precision == "fp16x3"
    assert numerics.unnamed(numerics.in_one_way(problem), HOPPER).precision == "ieee"
    assert numerics.unnamed(problem, target_device("sm_80")).precision == "ieee"
    small = MatmulProblem(1, 64, 64, 64, "float32", "float32", precision="fp16x3")
    assert numerics.unnamed(small, HOPPER).precision == "ieee"
    halves = MatmulProblem(1, *LARGE, "float16", "float16")
    assert numerics.unnamed(halves, HOPPER) is halves
