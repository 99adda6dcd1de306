"""Tune public kernels on several ranks, each with a GPU: who searches what, and do all choose alike?

    python tuning/adopted.py --fetch .gpu-sources
    python tuning/ranks.py --output tuning/results/GPU          # as many ranks as there are GPUs
    python tuning/ranks.py --collectives                        # misses of different ranks, NCCL between them

The cases are of `adopted_cases.py`, in processes of `tritile run torchrun` with one empty store: by one rank,
then by all at once. In a line are the problems, the searches of all ranks, whether all ranks chose alike
without `tritile.sync`, and the seconds of the slowest rank beside those of one alone.

`--collectives` draws, 200 times, which ranks call a kernel with a new size, at a time of their own; all ranks
meet in an `all_reduce` after each. A line has the searches, the choices that differ before and after
`tritile.sync`, and the seconds.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MARK: Final = "@@"  # begins lines that a child writes for its parent
CASES: Final = "fla_l2norm,fla_causal_conv1d,vllm_chunk_state,attorch_softmax"
ROUNDS: Final = 200
LIMIT_S: Final = 400
Row = dict[str, Any]


def report(seconds: float) -> Row:
    """Return what this rank measured, and every choice, by kernel and key."""
    from adopted import chosen

    rows = [row for one in sys.modules["tritile.tuner.adoption"]._adoptions for row in one.report]
    counts = {name: sum(getattr(row, name) for row in rows) for name in ("measured", "remembered", "guessed")}
    return {"seconds": round(seconds, 2), "chosen": chosen()} | counts


def run_cases(names: str, sources: Path) -> Row:
    """Call each case once, as a rank."""
    import torch

    import adopted_cases

    adopted_cases.add_to_path(sources)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    cases = [next(case for case in adopted_cases.CASES if name in case.name) for name in names.split(",")]
    calls = [case.build("cuda", *case.size)[0] for case in cases]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    return report(time.perf_counter() - start)


def run_collectives() -> Row:
    """Miss at drawn sizes between collectives, as a rank."""
    import torch
    from torch import distributed

    import tritile
    from ranks_kernel import add_one

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl")
    dice, together = random.Random(f"rank {rank}"), torch.zeros(1 << 20, device="cuda")
    sizes = [1000 * (number + 1) for number in range(20)]
    start = time.perf_counter()
    for _ in range(ROUNDS):
        if dice.random() < 0.5:
            time.sleep(dice.uniform(0, 0.01))
            n = dice.choice(sizes)
            add_one(torch.zeros(n, device="cuda"), n)
        distributed.all_reduce(together)
    torch.cuda.synchronize()
    row = report(time.perf_counter() - start)
    changes = tritile.sync()
    for n in sizes:
        add_one(torch.zeros(n, device="cuda"), n)
    distributed.destroy_process_group()
    return row | {"changes": len(changes), "synced": report(0.0)["chosen"]}


def on_ranks(count: int, folder: str, asked: argparse.Namespace) -> list[Row]:
    """Return the lines of `count` ranks that share an empty store. Raises RuntimeError if one fails."""
    caches = {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TRITON", "TRITILE")}
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    kind = (
        ["--collectives"] if asked.collectives else ["--cases", asked.cases, "--sources", str(asked.sources)]
    )
    command = [
        sys.executable, "-m", "tritile", "run", sys.executable, "-m", "torch.distributed.run",
        "--standalone", "--nproc-per-node", str(count), __file__, "--child", *kind,
    ]  # fmt: skip
    env = os.environ | caches | {"PYTHONPATH": paths.rstrip(os.pathsep), "TRITILE_TUNE_BUDGET": "120"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    lines = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or len(lines) != count:
        raise RuntimeError(done.stderr.strip()[-2000:] or f"exit status {done.returncode}")
    return [json.loads(line) for line in lines]


def differing(choices: list[dict[str, dict[str, Row]]]) -> int:
    """Return for how many problems two ranks have different configs."""
    found: dict[tuple[str, str], set[str]] = {}
    for one in choices:
        for kernel, configs in one.items():
            for key, config in configs.items():
                found.setdefault((kernel, key), set()).add(json.dumps(config, sort_keys=True))
    return sum(len(each) > 1 for each in found.values())


def measure(asked: argparse.Namespace, count: int) -> Row:
    """Run one rank alone, unless collectives are asked for, and then all."""
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        alone = [] if asked.collectives else on_ranks(1, f"{folder}/one", asked)
        rows = on_ranks(count, f"{folder}/all", asked)
    problems = {(kernel, key) for row in rows for kernel, keys in row["chosen"].items() for key in keys}
    line: Row = {
        "op": "ranks",
        "case": "collectives" if asked.collectives else asked.cases,
        "ranks": count,
        "problems": len(problems),
        "searches": sum(row["measured"] for row in rows),
        "guessed": sum(row["guessed"] for row in rows),
        "differ": differing([row["chosen"] for row in rows]),
        "seconds": max(row["seconds"] for row in rows),
    }
    if asked.collectives:
        line |= {"changes": [row["changes"] for row in rows]}
        line |= {"differ_after_sync": differing([row["synced"] for row in rows])}
    else:
        line |= {"alone_s": alone[0]["seconds"], "alone_searches": alone[0]["measured"]}
    return line


def main() -> int:
    """Measure on the GPUs of this machine; the exit status is 0 if the ranks chose alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="parts of the names of cases, with commas")
    parser.add_argument(
        "--collectives", action="store_true", help="misses between collectives, in their place"
    )
    parser.add_argument("--sources", type=Path, default=Path(".gpu-sources"), metavar="FOLDER")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="append a line to ranks.jsonl there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        row = run_collectives() if asked.collectives else run_cases(asked.cases, asked.sources)
        print(f"{MARK}{json.dumps(row)}", flush=True)
        return 0
    import torch

    from tritile.core.device import current_gpu
    from tritile.lab.environment import environment

    gpu, count = current_gpu(), torch.cuda.device_count()
    if gpu is None:
        sys.exit("there is no GPU here to measure")
    line = measure(asked, count)
    text = json.dumps(line | {"env": environment(gpu)})
    print(text, flush=True)
    if asked.output:
        asked.output.mkdir(parents=True, exist_ok=True)
        with (asked.output / "ranks.jsonl").open("a") as file:
            file.write(text + "\n")
    return min(1, line.get("differ_after_sync", line["differ"]))


if __name__ == "__main__":
    sys.exit(main())
