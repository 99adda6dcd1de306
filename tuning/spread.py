"""Measure mode "spread": what its turns cost the calls of a program, and what it ends with.

    python tuning/spread.py                                    # 20 drawn problems: a quarter of an hour
    python tuning/spread.py --only product --cases 4
    python tuning/spread.py --output tuning/results/GPU

Each problem is called 20,000 times: in mode "spread" with an empty store, and by the first config alone, the
guess. Then the guess, the winner of mode "tune" and what "spread" ended with are timed by turns. Sizes
are drawn with the seed of the drawn benchmarks. In a line:

- `ended`: the calls made until the choice; null if it was not clear at the end;
- `turns`: calls that ran another config until then; `slowest`: the slowest of these configs, by the guess;
- `added`: what turns slower than the guess took, by the time of all calls until then;
- `total`: the time of all calls by that of as many with the guess; `stall_ms`: the host's longest call.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import tritile  # noqa: E402
from authors import SUBJECTS, Subject, configs_of  # noqa: E402
from authors import random as normal  # noqa: E402
from compare_autotune import timed  # noqa: E402
from tritile.core.config import Config  # noqa: E402
from tritile.core.device import current_gpu  # noqa: E402
from tritile.lab.environment import environment  # noqa: E402
from unseen import environ, seed_of  # noqa: E402

CALLS: Final = 20_000
LEAST_US: Final = 50.0
Row = dict[str, Any]


@triton.jit
def product(
    a_ptr, b_ptr, out_ptr, M, N, K, stride_a, stride_b, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = a @ b, as in a first tutorial: a program for each tile."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + rows[:, None] * stride_a + inner,
            mask=(rows[:, None] < M) & (inner < K), other=0.0,
        )  # fmt: skip
        b = tl.load(
            b_ptr + inner[:, None] * stride_b + columns,
            mask=(inner[:, None] < K) & (columns < N), other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total)
    tl.store(
        out_ptr + rows[:, None] * stride_out + columns, total.to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < M) & (columns < N),
    )  # fmt: skip


def product_inputs(shape: Any, dtype: torch.dtype, device: str = "cuda") -> dict[str, Any]:
    m, n, k = shape
    a, b = normal((m, k), dtype, device, 0), normal((k, n), dtype, device, 1)
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    return {"a_ptr": a, "b_ptr": b, "out_ptr": out, "M": m, "N": n, "K": k,
            "stride_a": k, "stride_b": n, "stride_out": n}  # fmt: skip


PRODUCT: Final = Subject(
    product,
    configs_of({"BLOCK_M": (64, 128), "BLOCK_N": (64, 128, 256), "BLOCK_K": (32, 64), "num_warps": (4, 8),
                "num_stages": (3, 4)}),
    {}, lambda _: True, ["M", "N", "K"],
    lambda M, N, **_: lambda meta: (triton.cdiv(M, meta["BLOCK_M"]), triton.cdiv(N, meta["BLOCK_N"])),
    product_inputs,
    lambda a_ptr, b_ptr, **_: {"out_ptr": a_ptr @ b_ptr},
)  # fmt: skip
KERNELS: Final = {"attention": SUBJECTS["attention"], "product": PRODUCT}


def drawn(count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Draw problems, half of each kernel, that are long enough on any GPU of a data centre."""
    dice = random.Random(f"spread {seed_of()}")

    def size(least: int, most: int, unit: int) -> int:
        return unit * round(math.exp(dice.uniform(math.log(least), math.log(most))) / unit)

    cases: list[tuple[str, tuple[int, ...]]] = []
    while len(cases) < count:
        if len(cases) % 2:
            m, n, k = shape = size(256, 8192, 1), size(256, 8192, 8), size(256, 8192, 8)
            flops = 2 * m * n * k
        else:
            batch, heads, length, head, causal = dice.choice((1, 2, 4)), dice.choice((8, 16, 32)), \
                size(256, 4096, 1), dice.choice((64, 128)), dice.choice((0, 1))  # fmt: skip
            shape = (batch, heads, length, head, causal)
            flops = 4 * batch * heads * length**2 * head // (1 + causal)
        if 5e10 < flops < 4e11:  # some 100 to 1,000 us on an H200
            cases.append(("product" if len(cases) % 2 else "attention", shape))
    return cases


class Calls:
    """Calls of one kernel: the GPU's time of each, the config that it ran, and the host's longest."""

    def __init__(self, subject: Subject, given: Mapping[str, Any], tuner: Any) -> None:
        self.ran: list[tuple[Any, ...]] = []
        self.ended: int | None = None
        self.stall_ms, self._events = 0.0, []
        names, run = list(subject.configs[0].all_kwargs()), subject.kernel.run

        def noting(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("warmup"):
                self.ran.append(tuple(kwargs[name] for name in names))
            return run(*args, **kwargs)

        launch, values = tuner[subject.grid(**given)], list(given.values())
        launch(*values)  # compiles
        with mock.patch.object(subject.kernel, "run", noting):
            for number in range(CALLS):
                self._time(launch, values)
                if self.ended is None and not any(tuner._spreads.values()):
                    self.ended = number
                if number % 200 == 199:  # a queue of launches that is full blocks the host
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
        self.us = [1e3 * start.elapsed_time(end) for start, end in self._events]

    def _time(self, launch: Any, values: list[Any]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before = time.perf_counter()
        start.record()
        launch(*values)
        end.record()
        self.stall_ms = max(self.stall_ms, 1e3 * (time.perf_counter() - before))
        self._events.append((start, end))


def measure(name: str, shape: tuple[int, ...]) -> Row:
    """Run one problem in both modes."""
    subject, gpu = KERNELS[name], current_gpu()
    given = subject.inputs(shape, torch.bfloat16)

    def tuner(mode: Any) -> Any:
        return tritile.autotune(subject.configs, subject.key, mode=mode)(subject.kernel)

    def stored(folder: str) -> Any:
        return environ(TRITILE_CACHE_DIR=folder, TRITILE_TABLE=None)

    chosen: dict[str, Config] = {"guess": Config.from_triton(subject.configs[0])}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as one, stored(one):
        kernel = tuner("tune")
        kernel[subject.grid(**given)](*given.values())
        chosen["tune"] = Config.from_triton(kernel.best_config)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as two, stored(two):
        guessed = Calls(subject, given, tuner("off"))
        kernel = tuner("spread")
        spread = Calls(subject, given, kernel)
        chosen["spread"] = Config.from_triton(kernel.best_config)
    assert gpu is not None
    row: Row = {"op": "spread", "kernel": name, "size": "x".join(map(str, shape)), "calls": CALLS}
    row |= timed(subject, given, chosen, gpu.l2_bytes)
    first, until = guessed.ran[0], spread.ended or CALLS
    by_config: dict[Any, list[float]] = {}
    for config, us in zip(spread.ran[:until], spread.us[:until], strict=True):
        by_config.setdefault(config, []).append(us)
    middle = {config: statistics.median(times) for config, times in by_config.items()}
    guess_us = middle.get(first) or statistics.median(guessed.us)
    others = {config: times for config, times in by_config.items() if config != first}
    added = sum(len(times) * max(0.0, middle[config] - guess_us) for config, times in others.items())
    ordered = sorted(spread.us)
    return row | {
        "ended": spread.ended,
        "turns": sum(map(len, others.values())),
        "slowest": round(max((middle[config] / guess_us for config in others), default=1.0), 3),
        "added": round(added / sum(spread.us[:until]), 4) if until else 0.0,
        "total": round(sum(spread.us) / sum(guessed.us), 4),
        "p999": round(ordered[int(0.999 * len(ordered))] / guess_us, 3),
        "stall_ms": round(spread.stall_ms, 2),
        "guess_stall_ms": round(guessed.stall_ms, 2),
        "config": chosen["spread"].to_dict(),
    }


def main() -> int:
    """Measure drawn problems; the exit status is 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=20, help="how many problems to draw (20)")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems of kernels with this name")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the problems")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="append lines to spread.jsonl there")
    asked = parser.parse_args()
    gpu = current_gpu()
    if gpu is None:
        sys.exit("there is no GPU here to measure")
    part, parts = map(int, asked.part.split("/"))
    for name, shape in [case for case in drawn(asked.cases) if asked.only in case[0]][part - 1 :: parts]:
        row = measure(name, shape) | {"env": environment(gpu)}
        print(json.dumps(row), flush=True)
        if asked.output:
            asked.output.mkdir(parents=True, exist_ok=True)
            with (asked.output / "spread.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
