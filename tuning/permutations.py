"""Sweep permutations of drawn sizes: python tuning/permutations.py NAME ... --sweeps FOLDER [--seconds 400]

Kernels of permutations depend on ranks and alignments, so nearly every size has kernels of its own. A size is
timed here as soon as its kernels are compiled; `tritile tune --calibrate` compiles all before it times any.
At each size it times the configs that the class's predictor puts first, those that the model does, a few
others at random, and all boxes. tuning/train.py trains by the files, gzipped. It ran on four H200s, a class
each: `--jobs 16 --seconds 490` for elements of 1, 2 and 4 bytes, `--seconds 165` for 16. With `--boxes` it
times boxes alone, at the same sizes: what is in tuning/sweeps/more is from four other H200s.
"""

import argparse
import itertools
import multiprocessing
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from tritile.choose import gpu_tables, waves
from tritile.cli.calibrating import LIKELY
from tritile.core.config import Config
from tritile.core.device import Device, current_gpu
from tritile.core.problem import Tiled
from tritile.families.permute import boxes
from tritile.tune.calibrate.candidates import candidates
from tritile.tune.calibrate.draw import drawn
from tritile.tune.calibrate.files import write_sweep
from tritile.tune.calibrate.sweep import Row, compile_at, flusher, timed, useful
from tritile.tuner.measure.workers import WorkerPool

CANDIDATES = 96  # configs of a class
BY_PREDICTOR = 14  # of them timed at a size
BY_MODEL = 8
RANKED = 48  # of the predictor, boxes among them
AT_RANDOM = 2
JOBS = 12  # processes that choose
AHEAD = 64  # sizes that compile while one is timed


def first(problem: Tiled, configs: Sequence[Config], name: str, device: Device) -> list[Config]:
    """The candidates to time at a size."""
    own = useful(configs, problem, device)
    boxed = [c for c in own if c.family == boxes.BOX]
    tiles = [c for c in own if c.family != boxes.BOX]
    if not tiles:
        return boxed
    tiles.sort(key=lambda c: waves.predict_us(c, problem, device))
    found = gpu_tables.predictor(name, device)
    ranked = [config for _, config in found[0].ranked(name, problem, device, RANKED)] if found else []
    known = [config for config in ranked if config in set(tiles)][:BY_PREDICTOR]
    by_model = tiles[: BY_MODEL if known else BY_MODEL + BY_PREDICTOR]
    others = random.Random(problem.label).sample(tiles, min(AT_RANDOM, len(tiles)))
    return list(dict.fromkeys([*known, *by_model, *others, *boxed]))


def swept(name: str, device: Device, sizes: int, seconds: float, pool: WorkerPool, tiles: bool) -> list[Row]:
    """Times at as many drawn sizes of a class as `seconds` allow."""
    begun, rows, problems = time.monotonic(), list[Row](), drawn(name, sizes, "sizes")
    configs, flush = [*boxes.FAMILY.configs], flusher(device)
    if tiles:
        likely, served = drawn(name, LIKELY, "candidates"), gpu_tables.predictor(name, device)
        known = served[0].configs(name) if served else []
        configs += candidates(name, likely, device, known, gpu_tables.shipped(device), CANDIDATES)
    print(f"{name}: {len(configs)} candidates after {time.monotonic() - begun:.0f} s", flush=True)
    with ProcessPoolExecutor(JOBS, multiprocessing.get_context("fork")) as choosers:
        how = configs, name, device
        chosen = list(choosers.map(first, problems, *map(itertools.repeat, how), chunksize=8))
    print(f"{name}: chosen after {time.monotonic() - begun:.0f} s", flush=True)

    def submit(problem: Tiled, own: list[Config]) -> tuple[Tiled, dict[Config, Future]]:
        return problem, {config: pool.submit(compile_at, config, [problem], device) for config in own}

    queue = zip(problems, chosen, strict=True)
    waiting = [submit(*each) for each in itertools.islice(queue, AHEAD)]
    while waiting and time.monotonic() - begun < seconds:
        problem, futures = waiting.pop(0)
        compiled = [config for config, future in futures.items() if future.exception() is None]
        row = timed(problem, compiled, device, flush, lambda text: print(text, flush=True))
        if row.times:
            rows.append(row)
        waiting += [submit(*each) for each in itertools.islice(queue, 1)]
    for _, futures in waiting:
        for future in futures.values():
            future.cancel()
    print(f"{name}: {len(rows)} sizes in {time.monotonic() - begun:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="classes, as permute_2")
    parser.add_argument("--sweeps", type=Path, required=True, metavar="FOLDER", help="for a file a class")
    parser.add_argument("--sizes", type=int, default=1300)
    parser.add_argument("--seconds", type=float, default=400.0, help="of each class")
    parser.add_argument("--boxes", action="store_true", help="time no tiles")
    parser.add_argument("--jobs", type=int, help="processes that compile")
    given = parser.parse_args()
    device = current_gpu()
    assert device is not None
    with WorkerPool(given.jobs) as pool:
        for name in given.names:
            rows = swept(name, device, given.sizes, given.seconds, pool, not given.boxes)
            write_sweep(given.sweeps / f"{name}.jsonl", rows, device)


if __name__ == "__main__":
    main()
