"""Measure one weight at 120 numbers of rows that nobody chose, as a server meets them.

    python tuning/rows.py [--output tuning/results/GPU] [--count 120] [--size 4096] [--mode cached]

Row counts from 1 to 4096 are drawn by a seed that nobody chose, that of suite "unseen" (unseen.py). Two
processes make the same calls, one after the other: the first begins with nothing compiled and nothing
remembered, the second finds what the first compiled, and remembers nothing. A call is timed with the host's
clock to the end of its product; a second call of each size follows. Then each size is timed beside torch on
the GPU, as it is called and within `tritile.batch_invariant()`. A line of each process is appended to
`rows.jsonl`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

PROCESSES = ("from nothing", "compiled ahead")


def timed_ms(call: Any) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def on_the_gpu(rows: list[int], size: int) -> dict[str, list[float]]:
    """Times of tritile and torch at each number of rows, in CUDA graphs side by side, and their spreads."""
    from tritile.lab import bench
    from tritile.tune.suites import Case

    cases = [Case("rows", "matmul", "bfloat16", "NT", m=m, n=size, k=size) for m in rows]
    found = [bench.measured(case) for case in cases]
    invariant = [bench.measured(replace(case.problem, invariant=True)) for case in cases]
    times = {
        "ratio_torch": [one.torch_us / one.tritile_us for one in found],
        "tritile_us": [one.tritile_us for one in found],
        "torch_us": [one.torch_us for one in found],
        "spread": [one.spread for one in found],
        "torch_spread": [one.spreads["torch"] for one in found],
        "invariant_ratio_torch": [one.torch_us / one.tritile_us for one in invariant],
    }
    return {name: [round(each, 4) for each in values] for name, values in times.items()}


def measured(count: int, size: int, mode: str) -> dict[str, Any]:
    import torch
    from triton import knobs

    import tritile
    import unseen
    from tritile.lab.environment import environment

    seed = unseen.seed_of()
    rows = random.Random(seed).sample(range(1, 4097), count)
    weight = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    inputs = [torch.randn(m, size, device="cuda", dtype=torch.bfloat16) for m in rows]
    torch.matmul(inputs[0], weight.mT)  # torch's own first call is not ours
    compiled: list[bool] = []
    knobs.compilation.listener = lambda **facts: compiled.append(not facts["cache_hit"])
    with tritile.mode(mode):
        first = [timed_ms(lambda x=x: tritile.matmul(x, weight.mT)) for x in inputs]
        second = [timed_ms(lambda x=x: tritile.matmul(x, weight.mT)) for x in inputs]
    return {
        "op": "rows",
        "mode": mode,
        "size": size,
        "rows": rows,
        "first_ms": [round(ms, 3) for ms in first],
        "second_ms": [round(ms, 3) for ms in second],
        "kernels": sum(compiled),
        "compile_s": round(sum(compiled), 2),
        **on_the_gpu(rows, size),
        "env": environment() | {"seed": seed},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--mode", default="cached")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.count, asked.size, asked.mode)))
        return
    import unseen

    with tempfile.TemporaryDirectory() as folder:
        for number, process in enumerate(PROCESSES):
            caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TRITILE_CACHE_DIR": f"{folder}/{number}"}
            run = subprocess.run(
                [sys.executable, *sys.argv, "--one"], stdout=subprocess.PIPE, text=True, check=True,
                env=os.environ | caches | {"TRITILE_SEED": unseen.seed_of()},
            )  # fmt: skip
            line = json.loads(run.stdout.splitlines()[-1]) | {"process": process}
            print(json.dumps(line))
            if asked.output is not None:
                asked.output.mkdir(parents=True, exist_ok=True)
                with (asked.output / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
