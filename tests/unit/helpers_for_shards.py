"""Be a rank that measures by sleeping: `python helpers_for_shards.py FOLDER [items] [seconds] [lost_s]`.

What it did is in FOLDER: a line in `begun` and one in `done` for each problem, what it raised in
`error-RANK`, and on rank 0 the store.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem
from tritile.errors import TritileError
from tritile.planning.store import Store
from tritile.planning.trial import Trial
from tritile.tune import shards as sharing
from tritile.tune.shards import Place, Shards

DEVICE = replace(TARGETS["nvidia-h200"], triton="3.6.0", compiler="V12.8.93")
KERNEL = "0123456789abcdef"
TRIALS = 3


def problems(count, first=0):
    return [MatmulProblem(1, 64 + first + i, 128, 64, "bfloat16", "bfloat16") for i in range(count)]


def trials(problem):
    """Return the trials that every rank measures of a problem."""
    return [Trial(problem, Config.of(BLOCK_M=16 << i), float(problem.m + i)) for i in range(TRIALS)]


def note(folder, name, text):
    with (folder / name).open("a") as file:
        file.write(f"{text}\n")


def work(folder, count=20, seconds=0.1, lost_s=1.0, facts=None, first_s=0.0, join_s=30.0, ahead=1, rounds=1):
    """Take part in `rounds` lists of problems, one after the other.

    The first problem takes `first_s` more seconds. Up to `ahead` problems are in hand.
    """
    sharing.facts_of = lambda device: facts or {"code": "1"}
    place = Place.from_environment()
    store = Store(DEVICE, folder / f"rank-{place.rank}")
    for turn in range(rounds):
        mine = problems(count, turn * count) if place.rank == 0 else []
        take_part(folder, place, mine, store, seconds, lost_s, first_s, join_s, ahead)


def take_part(folder, place, mine, store, seconds, lost_s, first_s, join_s, ahead):
    """Take part in one list of problems."""
    with Shards(place, mine, store, lost_s, join_s) as shards:
        claims, hand = shards.claims(), []
        while True:
            problem = next(claims, claims)
            if problem is claims and not hand:
                break
            if problem is None and not hand:
                time.sleep(0.02)
            elif problem is not None and problem is not claims:
                hand.append(problem)
            if hand and (problem in (None, claims) or len(hand) == ahead):
                problem = hand.pop(0)
                for number, trial in enumerate(trials(problem)):
                    shards.keep(KERNEL, trial)
                    if number == 0:
                        note(folder, "begun", f"{place.rank} {problem.m} {os.getpid()}")
                    time.sleep((seconds + first_s) / TRIALS)
                first_s = 0.0
                shards.finished(problem)
                note(folder, "done", f"{place.rank} {problem.m}")
        note(folder, "left", f"{place.rank} {shards.left}")


def main(folder, *arguments, **options):
    try:
        work(folder, *arguments, **options)
    except TritileError as error:
        note(folder, f"error-{os.environ['RANK']}", f"{type(error).__name__}: {error}")
        sys.exit(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(text) for text in sys.argv[2:3]), *(float(text) for text in sys.argv[3:]))
