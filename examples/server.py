"""Serve requests whose number of rows changes, without a stall: python examples/server.py

`warm` compiles what a layer needs for any number of rows, in parallel processes. From then on mode "strict"
compiles nothing: where a kernel is missing it raises, and torch answers. On a CPU there is nothing to warm:
torch computes tritile's calls, too, or with TRITON_INTERPRET=1 Triton's interpreter runs their kernels.
"""

import random
import time

import torch
import triton
from torch import Tensor

import tritile
from tritile.errors import NotCompiledError, NotTunedError

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH, MOST_ROWS, REQUESTS = (4096, 8192, 200) if ON_GPU else (64, 40, 4)


def answer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, bool]:
    """Return silu(x @ weight.mT + bias), and whether tritile computed it."""
    try:
        return tritile.linear(x, weight, bias, activation="silu"), True
    except (NotTunedError, NotCompiledError):
        return torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias)), False


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(WIDTH, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(MOST_ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    if ON_GPU:
        kernels = tritile.warm(tritile.linear, x, weight, bias, activation="silu", any_rows=True)
        print(f"{kernels} kernels are compiled")

    slowest, by_tritile = 0.0, 0
    with tritile.mode("strict"):
        for rows in random.sample(range(1, MOST_ROWS + 1), REQUESTS):
            started = time.perf_counter()
            y, ours = answer(x[:rows], weight, bias)
            if ON_GPU:
                torch.cuda.synchronize()
            slowest, by_tritile = max(slowest, time.perf_counter() - started), by_tritile + ours
    how = "by tritile"
    if not ON_GPU:
        interpreted = triton.knobs.runtime.interpret
        how += "'s kernels in the interpreter" if interpreted else "'s call, which torch computes on a CPU"
    print(f"{by_tritile} of {REQUESTS} requests {how}; the slowest took {1e3 * slowest:.1f} ms")
    expected = torch.nn.functional.silu(torch.nn.functional.linear(x[:rows], weight, bias))
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-1)


if __name__ == "__main__":
    main()
