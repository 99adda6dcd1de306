"""Time two checkouts of tritile against each other, by turns, on the problems of suites.

    git worktree add ../before COMMIT
    python tuning/compare_commits.py ../before --suite square --suite llm [--only bfloat16] [--json FILE]

Each checkout has a process of its own; one of them runs at a time. A problem is captured in a CUDA graph on
operands rotated over three times the L2 cache, and the two graphs take turns. The ratio is the other
checkout's time by this one's: above 1, this one is faster.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROUNDS, REPLAYS = 5, 6
SUITES = Path(__file__).parent / "suites"


def problems(suite: str) -> Iterator[dict]:
    """The products of a suite: dtype, layout, m, n, k and epilogue."""
    for case in tomllib.loads((SUITES / f"{suite}.toml").read_text())["cases"]:
        sizes = [(n, n, n) for n in case.get("squares", [])] + [tuple(mnk) for mnk in case.get("mnk", [])]
        sizes += [(m, *nk) for m, nk in itertools.product(case.get("m", []), case.get("nk", []))]
        ways = itertools.product(case["dtypes"], case["layouts"], case.get("epilogues", [""]), sizes)
        for dtype, layout, epilogue, (m, n, k) in ways:
            yield {"dtype": dtype, "layout": layout, "epilogue": epilogue, "m": m, "n": n, "k": k}


def call_of(problem: dict):
    """A function that makes operands of a problem, and returns their bytes and the call on them."""
    import torch

    import tritile

    dtype, (m, n, k) = getattr(torch, problem["dtype"]), (problem[side] for side in "mnk")
    words = problem["epilogue"].split()
    activation = next((word for word in words if word in ("relu", "gelu", "gelu_tanh", "silu")), None)

    def matrix(rows: int, columns: int, way: str) -> torch.Tensor:
        made = torch.randn(rows, columns, device="cuda") / 8
        return made.to(dtype) if way == "N" else made.T.contiguous().to(dtype).T

    def make():
        a, b = matrix(m, k, problem["layout"][0]), matrix(k, n, problem["layout"][1])
        bias = torch.randn(n, device="cuda").to(dtype)
        more = matrix(m, n, "N") if "full" in problem["epilogue"] else None
        if "weighted" in words:
            return lambda: tritile.addmm(more, a, b, beta=0.5, alpha=2.0)
        if words:
            return lambda: tritile.linear(a, b.T, bias, activation=activation, residual=more)
        return lambda: tritile.matmul(a, b)

    return (m * k + k * n + m * n) * dtype.itemsize, make


class Timed:
    """A problem captured: each call returns microseconds of one product."""

    def __init__(self, problem: dict) -> None:
        import torch

        size, make = call_of(problem)
        calls = [make() for _ in range(max(1, math.ceil(3 * 60e6 / size)) if size < 180e6 else 1)]
        flops = 2 * problem["m"] * problem["n"] * problem["k"]
        self.calls = max(len(calls), min(200, math.ceil(2e-3 / (flops / 4e14 + size / 4e12))))
        for call in calls:
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(self.calls):
                calls[i % len(calls)]()
        self.held = calls

    def __call__(self) -> float:
        import torch

        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / self.calls)
        return statistics.median(times)


def serve() -> None:
    """Answer lines: a problem to capture, or an empty one to time what is captured."""
    timed = None
    for line in sys.stdin:
        if line.strip():
            timed = None
            timed = Timed(json.loads(line))
        print(json.dumps(timed()), flush=True)


class Side:
    """The process of one checkout."""

    def __init__(self, root: Path) -> None:
        rest = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *rest])}
        command = [sys.executable, __file__, "--serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=env, text=True, **pipes)

    def __call__(self, problem: dict | None = None) -> float:
        self.process.stdin.write((json.dumps(problem) if problem else "") + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def compared(sides: list[Side], problem: dict) -> dict:
    """Median microseconds of both, by turns, and their ratio."""
    for side in sides:
        side(problem)
    rounds = [[side() for side in sides] for _ in range(ROUNDS)]
    here, there = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(other / own for own, other in rounds)
    return problem | {"us": round(here, 3), "other_us": round(there, 3), "ratio": round(ratio, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true")
    asked = parser.parse_args()
    if asked.serve:
        return serve()
    sides = [Side(Path(__file__).parents[1]), Side(asked.other.resolve())]
    for suite in asked.suite:
        lines = []
        for problem in problems(suite):
            if asked.only in " ".join(map(str, problem.values())):
                lines.append(compared(sides, problem) | {"suite": suite})
                if asked.json:
                    with asked.json.open("a") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
        ratios = sorted(line["ratio"] for line in lines)
        worst = min(lines, key=lambda line: line["ratio"])
        mean = statistics.geometric_mean(ratios)
        print(f"{suite}: {len(ratios)} problems, ratio {mean:.4f}, worst {worst}", flush=True)
    return None


if __name__ == "__main__":
    main()
