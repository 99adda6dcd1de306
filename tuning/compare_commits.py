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
    """Yield the problems of a suite: op, dtype and layout, sizes, and what else their call takes."""
    for case in tomllib.loads((SUITES / f"{suite}.toml").read_text())["cases"]:
        op = case.get("op", "matmul")
        if op in OTHERS:
            yield from ({"op": op} | problem for problem in OTHERS[op](case))
            continue
        sizes = [(n, n, n) for n in case.get("squares", [])] + [tuple(mnk) for mnk in case.get("mnk", [])]
        sizes += [(m, *nk) for m, nk in itertools.product(case.get("m", []), case.get("nk", []))]
        ways = itertools.product(case["dtypes"], case["layouts"], case.get("epilogues", [""]), sizes)
        for dtype, layout, epilogue, (m, n, k) in ways:
            sides = {"m": m, "n": n, "k": k}
            yield {"op": op, "dtype": dtype, "layout": layout, "epilogue": epilogue} | sides


def _permutations(case: dict) -> Iterator[dict]:
    orders = case["dims"] if len(case["dims"]) > 1 else case["dims"] * len(case["shapes"])
    for dtype, (shape, dims) in itertools.product(case["dtypes"], zip(case["shapes"], orders, strict=True)):
        yield {"dtype": dtype, "shape": shape, "dims": dims}


def _groups(case: dict) -> Iterator[dict]:
    from tritile.core.problem import ends_of

    ways = itertools.product(case["dtypes"], case["layouts"], case["ragged"], case["loads"], case["gmnk"])
    for dtype, layout, ragged, load, (g, m, n, k) in ways:
        found = {"dtype": dtype, "layout": layout, "ragged": ragged, "load": load, "g": g, "m": m, "n": n}
        ends = None if ragged == "none" else ends_of(load, g, m if ragged == "m" else k)
        yield found | {"k": k, "ends": ends}


def _packed(case: dict) -> Iterator[dict]:
    sizes = [(m, *nk) for m, nk in itertools.product(case.get("m", []), case.get("nk", []))]
    for dtype, weight, (m, n, k) in itertools.product(case["dtypes"], case["weights"], sizes):
        bits, group_size, *zeros = weight.removeprefix("int").replace("/", " ").split()
        how = {"bits": int(bits), "group_size": int(group_size), "zero_points": bool(zeros)}
        yield {"dtype": dtype, "m": m, "n": n, "k": k, "weight": how}


OTHERS = {"permute": _permutations, "grouped": _groups, "linear_quantized": _packed}


def permute_of(problem: dict):
    """Do as `call_of`, for a permutation."""
    import torch

    import tritile

    dtype, shape = getattr(torch, problem["dtype"]), problem["shape"]
    wide = torch.complex64 if dtype.is_complex else torch.float32

    def make():
        x = (torch.randn(shape, device="cuda", dtype=wide) * 9).to(dtype)
        return lambda: tritile.permute(x, problem["dims"])

    return 2 * math.prod(shape) * dtype.itemsize, 0, make


def groups_of(problem: dict):
    """Do as `call_of`, for products of groups, with scales for 8-bit types."""
    import torch

    import tritile

    dtype, (g, m, n, k) = getattr(torch, problem["dtype"]), (problem[side] for side in "gmnk")
    ragged, ends = problem["ragged"], problem["ends"]
    of_a, of_b = (() if ragged != "none" else (g,)), (() if ragged == "k" else (g,))

    def matrix(batch: tuple, rows: int, columns: int, way: str) -> torch.Tensor:
        sides = (rows, columns) if way == "N" else (columns, rows)
        made = (torch.randn(*batch, *sides, device="cuda", dtype=torch.bfloat16) / 8).to(dtype)
        return made if way == "N" else made.mT

    def make():
        a, b = matrix(of_a, m, k, problem["layout"][0]), matrix(of_b, k, n, problem["layout"][1])
        offs = None if ends is None else torch.tensor(ends, dtype=torch.int32, device="cuda")
        words = {}
        if dtype.itemsize == 1:
            words = {
                "scale_a": torch.ones(*of_a, m, device="cuda"),
                "scale_b": torch.ones(g, n, device="cuda"),
            }
        return lambda: tritile.grouped_matmul(a, b, offs, **words)

    size = (m * k * ((len(of_a) and g) or 1) + k * n * ((len(of_b) and g) or 1)) * dtype.itemsize
    return size, 2 * m * n * k * (1 if ends else g), make


def packed_of(problem: dict):
    """Do as `call_of`, for a linear layer with a packed weight."""
    import torch

    import tritile

    dtype, (m, n, k) = getattr(torch, problem["dtype"]), (problem[side] for side in "mnk")

    def make():
        weight = tritile.quantize(torch.randn(n, k, device="cuda", dtype=dtype), **problem["weight"])
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        return lambda: tritile.linear(x, weight)

    return n * k * problem["weight"]["bits"] // 8 + (m * k + m * n) * dtype.itemsize, 2 * m * n * k, make


def product_of(problem: dict):
    """Do as `call_of`, for a product."""
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

    return (m * k + k * n + m * n) * dtype.itemsize, 2 * m * n * k, make


MAKERS = {"matmul": product_of, "permute": permute_of, "grouped": groups_of, "linear_quantized": packed_of}


def call_of(problem: dict):
    """Return bytes and operations of a problem, and a function that makes operands and returns their call."""
    return MAKERS[problem["op"]](problem)


class Timed:
    """Capture a problem in a CUDA graph; each call returns the microseconds of one launch."""

    def __init__(self, problem: dict) -> None:
        import torch

        size, flops, make = call_of(problem)
        calls = [make() for _ in range(max(1, math.ceil(3 * 60e6 / size)) if size < 180e6 else 1)]
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
    """Hold the process of one checkout."""

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
    """Return the median microseconds of both sides, timed by turns, and their ratio."""
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
