"""Time tritile and torch at drawn sizes of the kinds of products that no predictor serves.

    python tuning/kinds.py tuning/sweeps/kinds.jsonl [--sizes 25] [--table tritile/tables/nvidia-h200.json]

A line holds a problem, with microseconds of both sides; those of before stay in the file. A kind at which
torch is faster at most sizes, and on the mean, is by torch's kernel where nothing is measured: `--table`
writes these kinds into a table, as `by_aten`. With `--sizes 0` nothing is timed.
"""

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from tritile.choose import aten, table
from tritile.core.device import current_gpu
from tritile.core.problem import GroupedProblem, MatmulProblem, Product, problem_from_dict, problem_to_dict
from tritile.core.settings import mode
from tritile.lab.bench import measured

KINDS = ("float32 ieee", "float32 tf32", "float64 ieee")
FP8 = "float8_e4m3fn"
BYTES = (f"{FP8} fast", f"{FP8} ieee rows", f"{FP8} fast rows")  # as torch takes them
GROUPED = "grouped bfloat16"
KINDS += (*BYTES, GROUPED)
OPERATIONS = 1e7, 2e11
MOST_WON = 0.25  # of the sizes, by tritile


def drawn_for_torch(kind: str, count: int) -> list[Product]:
    """Draw products whose rows start on 16 bytes, NT: of fp8, and of groups, by the skewed load."""
    dice, found = random.Random(kind), list[Product]()
    while len(found) < count:
        m, n, k = (round(64 * 128 ** dice.random()) for _ in "mnk")
        n, k = (n + 31) // 32 * 32, (k + 31) // 32 * 32
        if kind == GROUPED:
            groups = 2 ** dice.randrange(2, 8)
            problem: Product = GroupedProblem(groups, groups * m, n, k, *["bfloat16"] * 2, b_layout="column")
        else:
            fused = "scale_a=column scale_b=row" if kind in BYTES[1:] else "scale_a=one scale_b=one"
            how = {"precision": kind.split()[1], "epilogue": fused}
            problem = MatmulProblem(1, m, n, k, FP8, "bfloat16", b_layout="column", **how)
        if OPERATIONS[0] <= problem.flops <= OPERATIONS[1]:
            found.append(problem)
    return found


def drawn(kind: str, count: int) -> list[Product]:
    if kind == GROUPED or kind in BYTES:
        return drawn_for_torch(kind, count)
    dice, found = random.Random(kind), list[Product]()
    dtype, precision = kind.split()
    while len(found) < count:
        m, n, k = (round(32 * 256 ** dice.random()) for _ in "mnk")
        m = m if dice.random() < 0.7 else round(256 ** dice.random())
        aligned = dice.random() < 0.6
        n, k = (n + 31) // 32 * 32 if aligned else n, (k + 31) // 32 * 32 if aligned else k
        layout, align = ("row", "column")[dice.random() < 0.5], 16 if aligned else 4
        problem = MatmulProblem(
            1, m, n, k, dtype, dtype, b_layout=layout, precision=precision,
            a_align=16 if aligned else max(align, 8 if "64" in dtype else 4), b_align=align, out_align=align,
        )  # fmt: skip
        if OPERATIONS[0] <= problem.flops <= OPERATIONS[1]:
            found.append(problem)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--sizes", type=int, default=25)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    asked = parser.parse_args()
    gpu = current_gpu()
    assert gpu is not None or not asked.sizes, "there is no GPU here"
    for kind in asked.kinds:
        for problem in drawn(kind, asked.sizes):
            with mode(backends="triton"):
                found = measured(problem)
            line = {"gpu": gpu.name, "torch": torch.__version__, "problem": problem_to_dict(problem)}
            line |= {"tritile_us": found.tritile_us, "torch_us": found.torch_us}
            with asked.file.open("a") as opened:
                opened.write(json.dumps(line) + "\n")
    by_kind: dict[str, list[float]] = {}
    for line in map(json.loads, asked.file.read_text().splitlines()):
        kind = aten.kind_of(problem_from_dict(line["problem"]))
        by_kind.setdefault(kind, []).append(line["torch_us"] / line["tritile_us"])
    chosen = []
    for kind, ratios in by_kind.items():
        mean, won = statistics.geometric_mean(ratios), statistics.mean(ratio > 1 for ratio in ratios)
        chosen += [kind] * (mean < 1 and won < MOST_WON)
        print(f"{kind}: torch/tritile {mean:.3f}, {min(ratios):.3f} to {max(ratios):.3f}, won {won:.0%}")
    if asked.table:
        table.write(replace(table.read(asked.table), by_aten=tuple(sorted(chosen))), asked.table)


if __name__ == "__main__":
    main()
