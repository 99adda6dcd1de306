"""Every operation, twice, with TRITON_INTERPRET set: `triton.jit` then makes interpreted functions itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tritile

ROOT = Path(__file__).parents[2]
SET = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


A, B, X = drawn(33, 17), drawn(17, 9).contiguous(), drawn(19, 35)
W, OFFSETS = drawn(2, 17, 9), torch.tensor([10, 33], dtype=torch.int32)
PACKED = tritile.quantize(drawn(32, 64), bits=4, group_size=32, dtype=torch.float16)
CALLS = {
    "ieee": (lambda: tritile.matmul(A, B, precision="ieee"), lambda: A @ B),
    "bfloat16": (lambda: tritile.matmul(A.bfloat16(), B.bfloat16()), lambda: A.bfloat16() @ B.bfloat16()),
    "fp16x3": (lambda: tritile.matmul(A, B, precision="fp16x3"), lambda: A @ B),
    "ozaki": (
        lambda: tritile.matmul(A.double(), B.double(), precision="ozaki"),
        lambda: A.double() @ B.double(),
    ),
    "complex64": (
        lambda: tritile.matmul(A.cfloat(), B.cfloat() * 1j),
        lambda: A.cfloat() @ (B.cfloat() * 1j),
    ),
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


@pytest.mark.parametrize("name", CALLS)
def test_a_call_made_twice(name):
    call, wanted = CALLS[name]
    loose = {"rtol": 2e-2, "atol": 2e-2} if name in ("bfloat16", "packed") else {"rtol": 1e-4, "atol": 1e-4}
    for _ in range(2):
        torch.testing.assert_close(call(), wanted(), **loose)


@pytest.mark.skipif(SET, reason="it is set already")
def test_with_the_variable_set():
    files = [__file__, str(ROOT / "tests/unit/test_interpreter.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
