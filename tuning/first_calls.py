"""Time the first call of each of many new numbers of rows for one weight, as a server meets them.

    python tuning/first_calls.py [--count 120] [--size 4096] [--json FILE]

Row counts are drawn, from a seed that nobody chose: the tree hash of `tritile/` at HEAD, or TRITILE_SEED.
Each first call is timed with the host's clock from the call to the end of its product; a second call of the
same size follows, so that what stays is told from what is met once. The process compiles its kernels itself,
with Triton's cache empty, and remembers nothing.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path


def seed() -> str:
    given = os.environ.get("TRITILE_SEED")
    if given:
        return given
    command = ["git", "rev-parse", "HEAD:tritile"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def timed(call) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(count: int, size: int) -> dict:
    import torch

    import tritile

    rows = random.Random(seed()).sample(range(1, 4097), count)
    weight = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    inputs = [torch.randn(m, size, device="cuda", dtype=torch.bfloat16) for m in rows]
    torch.matmul(inputs[0], weight.mT)  # torch's own first call is not ours
    first = [timed(lambda x=x: tritile.matmul(x, weight.mT)) for x in inputs]
    second = [timed(lambda x=x: tritile.matmul(x, weight.mT)) for x in inputs]
    return {
        "rows": rows,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "first_ms": [round(ms, 3) for ms in first],
        "second_ms": [round(ms, 3) for ms in second],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITILE_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder
        found = measure(asked.count, asked.size)
    for name in ("first_ms", "second_ms"):
        times = sorted(found[name])
        print(
            f"{name}: {sum(times) / 1e3:.2f} s in all, median {statistics.median(times):.2f}, "
            f"95% {times[int(0.95 * len(times))]:.2f}, worst {times[-1]:.1f}"
        )
    if asked.json:
        asked.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
