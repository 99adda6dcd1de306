"""Measure sizes that nobody chose: products and permutations, drawn anew for every version of the code.

    python tuning/unseen.py [--results tuning/results/GPU] [--products 200] [--permutations 100]

The seed is the tree hash of `tritile/` at HEAD, or TRITILE_SEED: whoever changes the code changes the sizes,
so nothing can be tuned to them. Lines are appended to `unseen.jsonl`, and none is ever taken away; each has
its seed in `env`. Configs are those that a call would use with nothing remembered, compiled ahead, in
parallel.

Products: bf16, NN and NT in turn, M log-uniform from 1 to 16384, N and K from 32 to 32768, 2e7 to 2e12
operations. Permutations: rank 2 to 5, 1 to 16 bytes an element, 1 MB to 1 GB. Of each *shape* it is drawn
whether its sizes (M left out) are multiples of 64 (60%), of 8 (20%) or any (20%).
"""

import argparse
import os
import random
import subprocess
import tempfile
from pathlib import Path

from tritile.planning.classes import OPERATIONS, ROWS, SIDES
from tritile.tune.calibrate.draw import OF_SIZE, log_uniform, permutation, sized
from tritile.tune.suites import Case

UNITS = (64, 8, 1), (60, 20, 20)  # what sizes of a shape are multiples of, and how often


def seed() -> str:
    given = os.environ.get("TRITILE_SEED")
    if given:
        return given
    command = ["git", "rev-parse", "HEAD:tritile"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def product(dice: random.Random) -> tuple[int, int, int]:
    """M, N and K."""
    while True:
        unit = dice.choices(*UNITS)[0]
        m = log_uniform(dice, 1, ROWS)
        n, k = sized(dice, *SIDES, unit), sized(dice, *SIDES, unit)
        if OPERATIONS[0] <= 2 * m * n * k <= OPERATIONS[1]:
            return m, n, k


def draw(text: str, products: int, permutations: int) -> list:
    """The cases of a seed."""
    dice = random.Random(text)
    cases = []
    for turn in range(products):
        m, n, k = product(dice)
        cases.append(Case("unseen", "matmul", "bfloat16", ("NN", "NT")[turn % 2], m=m, n=n, k=k))
    for _ in range(permutations):
        size = dice.choice(tuple(OF_SIZE))
        shape, dims = permutation(dice, size, dice.choices(*UNITS)[0])
        cases.append(Case("unseen", "permute", OF_SIZE[size], shape=shape, dims=dims))
    return list(dict.fromkeys(cases))


def compiled(case, device) -> None:
    """Compile what a call of the case would launch, into Triton's cache."""
    from tritile.planning import plans
    from tritile.runtime.ahead import compiled_for

    compiled_for(case.problem, plans.plan_for(case.problem, device, "cached").config, device)


def compile_all(cases, device) -> None:
    from tritile.tune.measure.pool import CompilePool

    with CompilePool() as pool:
        for future in [pool.submit(compiled, case, device) for case in cases]:
            future.exception()  # what fails is met again, and told, where it is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--products", type=int, default=200)
    parser.add_argument("--permutations", type=int, default=100)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--list", action="store_true", help="print the cases and measure nothing")
    asked = parser.parse_args()
    text = seed()
    cases = draw(text, asked.products, asked.permutations)
    if asked.list:
        print("\n".join(case.problem.label for case in cases))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITILE_CACHE_DIR"] = folder  # nothing remembered
        measure(cases, text, asked)


def measure(cases, text: str, asked) -> None:
    from tritile.core import device as devices
    from tritile.lab.report import console, run
    from tritile.lab.report.environment import environment

    device = devices.current_gpu()
    if device is None:
        raise SystemExit("there is no GPU here to measure")
    compile_all(cases, device)
    env = environment(device) | {"seed": text}
    lines, failed = run.run_cases(cases, asked.peer, env, asked.results, print, lambda label: None)
    console.print_summary(lines)
    print(f"{len(lines)} cases, {failed} failed, seed {text}")


if __name__ == "__main__":
    main()
