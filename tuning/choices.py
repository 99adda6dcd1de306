"""Time what two versions of tritile choose at drawn sizes, wherever they differ.

    TRITILE_SEED=... python tuning/choices.py --plan before.json    # in a checkout of each version
    TRITILE_SEED=... python tuning/choices.py --plan after.json
    python tuning/choices.py before.json after.json --output tuning/results/GPU
    python tuning/choices.py --tell tuning/sweeps/choices.jsonl

Both versions' kernels have to be the same. Planned are the products and permutations of four draws of suite
"unseen", each as called and by own kernels alone, for torch as it was swept. Configs that differ are timed
side by side, with torch's kernel, in CUDA graphs, with an L2 cache without their operands.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from train import VERSIONS
from tritile.choose import aten, pick
from tritile.core.config import Config
from tritile.core.device import current_gpu, target_device
from tritile.core.problem import problem_from_dict, problem_to_dict
from tritile.lab.environment import environment
from tritile.tune.calibrate import sweep
from unseen import draw, draw_by_time, seed_of

DRAWS: Final = range(1, 5)
ROUNDS: Final = 8  # of timing by turns
SIDES: Final = ("called", "own")  # as called, and by own kernels alone
Row = dict[str, Any]


def plans(target: str, triton: str) -> Iterator[Row]:
    """What this version chooses at all drawn sizes for a GPU and a version of Triton."""
    device = replace(target_device(target), triton=triton)
    aten.versions = lambda: VERSIONS  # type: ignore[assignment]
    for number in DRAWS:
        seed = seed_of(number)
        for how, cases in (("time", draw_by_time(seed)), ("size", draw(seed))):
            for case in cases:
                row: Row = {"draw": number, "drawn": how, "problem": problem_to_dict(case.problem)}
                for side in SIDES:
                    chosen = pick.plan_for(case.problem, device, "cached", side == "called")
                    assert chosen is not None
                    row[side] = chosen.config.to_dict()
                yield row


def timed(before: list[Row], after: list[Row], seconds: float, sides: Sequence[str]) -> Iterator[Row]:
    """The times of both versions' choices at sizes where these differ; those of a draw compile meanwhile."""
    pairs = list(zip(before, after, strict=True))
    if any(old["problem"] != new["problem"] for old, new in pairs):
        sys.exit("the plans are of other sizes: give both versions one TRITILE_SEED")
    device = current_gpu()
    if device is None:
        sys.exit("there is no GPU here to measure")
    until, flush = time.monotonic() + seconds, sweep.flusher(device)
    sweep._ROUNDS = ROUNDS  # type: ignore[misc]
    pairs = [(old, new) for old, new in pairs if any(old[side] != new[side] for side in sides)]
    configs = [{Config.from_dict(row[side]) for row in pair for side in sides} for pair in pairs]

    def compiled(places: Iterable[int]) -> None:
        sizes: dict[Config, list[Any]] = {}
        for place in places:
            for config in configs[place] - {aten.CONFIG}:
                sizes.setdefault(config, []).append(problem_from_dict(pairs[place][0]["problem"]))
        sweep.compile_all(sizes, device, lambda text: print(text, file=sys.stderr))

    parts: dict[Any, list[int]] = {}  # products by time first
    for place, (row, _) in enumerate(pairs):
        key = row["problem"]["op"] != "matmul", row["drawn"] != "time", row["draw"]
        parts.setdefault(key, []).append(place)
    ordered = [parts[key] for key in sorted(parts)]
    with ThreadPoolExecutor(1) as ahead:
        ready = [ahead.submit(compiled, part) for part in ordered]
        for part, done in zip(ordered, ready, strict=True):
            done.result()
            for place in part:
                if time.monotonic() > until:
                    ahead.shutdown(cancel_futures=True)
                    return
                old, new = pairs[place]
                problem: Any = problem_from_dict(old["problem"])
                own = sorted(configs[place] - {aten.CONFIG}, key=lambda config: config.key)
                row = sweep.timed(problem, own, device, flush, lambda text: print(text, file=sys.stderr))
                times = {**row.times, aten.CONFIG: row.torch_us}
                us = {f"{side}_{name}": times.get(Config.from_dict(each[side]))
                      for name, each in (("before", old), ("after", new)) for side in sides}  # fmt: skip
                facts: Row = {name: old[name] for name in ("draw", "drawn", "problem")}
                env = environment(device)
                yield {"op": "choices"} | facts | us | {"torch": row.torch_us, "env": env}


def told(rows: list[Row]) -> None:
    """Print by what share the choices gain, where they differ: of all time, and on average."""
    kinds = [("time", "matmul"), ("size", "matmul"), ("size", "permute")]
    for side in SIDES:
        for how, op in kinds:
            own = [row for row in rows if (row["drawn"], row["problem"]["op"]) == (how, op)]
            pairs = [(row.get(f"{side}_before"), row.get(f"{side}_after")) for row in own]
            good = [(old, new) for old, new in pairs if old and new and old != new]
            if good:
                total = sum(old for old, _ in good) / sum(new for _, new in good) - 1
                mean = sum(old / new for old, new in good) / len(good) - 1
                worst = min(old / new for old, new in good)
                gained = f"{len(good)} differ, by time {total:+.2%}, mean {mean:+.2%}"
                print(f"{side:6} {op} drawn by {how}: {gained}, "
                      f"worst {worst:.2f}, best {max(old / new for old, new in good):.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("plans", nargs="*", type=Path, help="of the version before, and of the one after")
    parser.add_argument("--plan", type=Path, help="write what this version chooses")
    parser.add_argument("--target", default="nvidia-h200")
    parser.add_argument("--triton", default="3.6.0", help="the version that --plan plans for (3.6.0)")
    parser.add_argument("--own", action="store_true", help="time what own kernels alone would run, too")
    parser.add_argument("--tell", type=Path, help="tell what lines that were written say")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if asked.plan:
        asked.plan.write_text(json.dumps(list(plans(asked.target, asked.triton))))
    elif asked.tell:
        told([json.loads(line) for line in asked.tell.read_text().splitlines()])
    else:
        before, after = (json.loads(path.read_text()) for path in asked.plans)
        rows = []
        for row in timed(before, after, asked.seconds, SIDES if asked.own else SIDES[:1]):
            rows.append(row)
            if asked.output:
                asked.output.mkdir(parents=True, exist_ok=True)
                with (asked.output / "choices.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
        told(rows)


if __name__ == "__main__":
    main()
