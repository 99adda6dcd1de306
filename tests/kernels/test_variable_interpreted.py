"""Every operation, twice, as Triton itself interprets it: without what tests/interpreting.py corrects."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

import tritile
from tritile.core.versions import parsed

pytestmark = pytest.mark.interpreted

ROOT = Path(__file__).parents[2]


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


A, B, X = drawn(33, 17), drawn(17, 9).contiguous(), drawn(19, 35)
W, OFFSETS = drawn(2, 17, 9), torch.tensor([10, 33], dtype=torch.int32)
PACKED = tritile.quantize(drawn(32, 64), bits=4, group_size=32, dtype=torch.float16)
CALLS = {
    "ieee": (lambda: tritile.matmul(A, B, precision="ieee"), lambda: A @ B),
    "bfloat16": (lambda: tritile.matmul(A.bfloat16(), B.bfloat16()), lambda: A.bfloat16() @ B.bfloat16()),
    "fp16x3": (lambda: tritile.matmul(A, B, precision="fp16x3"), lambda: A @ B),
    "grouped": (
        lambda: tritile.grouped_matmul(A, W, OFFSETS),
        lambda: torch.cat([A[:10] @ W[0], A[10:] @ W[1]]),
    ),
    "linear": (
        lambda: tritile.linear(A, B.mT, bias=B[0], activation="relu"),
        lambda: torch.relu(A @ B + B[0]),
    ),
    "gated": (
        lambda: tritile.gated_linear(A, B.mT, B.mT, activation="relu"),
        lambda: torch.relu(A @ B) * (A @ B),
    ),
    "packed": (
        lambda: tritile.linear(drawn(5, 64).half(), PACKED),
        lambda: drawn(5, 64).half() @ PACKED.dequantize().half().mT,
    ),
    "transpose": (lambda: tritile.transpose(X), lambda: X.mT),
    "permute": (lambda: tritile.permute(W, (2, 0, 1)), lambda: W.permute(2, 0, 1)),
}


def assert_twice(name):
    call, wanted = CALLS[name]
    loose = {"rtol": 2e-2, "atol": 2e-2} if name in ("bfloat16", "packed") else {"rtol": 1e-4, "atol": 1e-4}
    for _ in range(2):
        torch.testing.assert_close(call(), wanted(), **loose)


# From Triton 3.9 on its interpreter refuses, as masks, comparisons of scalars that are spread over a block.
ALONE = [name for name in CALLS if name != "fp16x3" or parsed(triton.__version__) < (3, 9)]


def test_calls_as_triton_itself_interprets_them():
    code = "from tests.kernels import test_variable_interpreted as t; [t.assert_twice(n) for n in t.ALONE]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
