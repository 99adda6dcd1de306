"""Train the predictors that ship, by the committed sweeps, and tell what they lose: python tuning/train.py

    python tuning/train.py products permutations        # writes tritile/tables/*.predictor.json: six minutes
    python tuning/train.py products --check             # writes nothing: losses at sizes left out, by class
    python tuning/train.py products --check --beyond    # sizes of over four times the median are left out

A sweep is what `tritile tune --calibrate NAME --sweeps FOLDER` wrote, or tuning/permutations.py, gzipped, and
named after its class. Those of tuning/sweeps are of an H200, those of tuning/sweeps/h100 of an H100. `more`
holds further times: those of a config that was timed before replace it.

A quarter of the sizes at a time is left out, on all GPUs, and tried with networks trained by the rest. Told
are what picks lose to the fastest that was timed, torch a candidate: the mean, the 95th percentile, and the
share of the time of all sizes; the same without torch; the worst; and how far torch's times are off.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from tritile.choose import predictor
from tritile.choose.classes import MEASURED
from tritile.choose.predictor import work_of
from tritile.families.registry import digests
from tritile.tune.calibrate import train
from tritile.tune.calibrate.files import Sweep, joined, read_sweep
from tritile.tune.calibrate.train import Pick, Samples, loss_of

ROOT: Final = Path(__file__).resolve().parent
VERSIONS: Final = {"torch": "2.11.0+cu130", "cublas": "13.1.0.3"}  # as they were swept
BEYOND: Final = 4.0  # times the median work of a class and GPU


def read_all(paths: Iterable[Path]) -> list[Sweep]:
    """The sweeps of files, one for each class; later files add to earlier ones."""
    found: dict[str, Sweep] = {}
    for sweep in map(read_sweep, paths):
        before = found.get(sweep.name)
        found[sweep.name] = sweep._replace(rows=joined(before.rows, sweep.rows)) if before else sweep
    return [*found.values()]


def committed(what: str) -> list[Sweep]:
    """The committed sweeps of "products" or "permutations"."""
    folders = (ROOT / "sweeps", ROOT / "sweeps" / "more"), (ROOT / "sweeps/h100", ROOT / "sweeps/h100/more")
    found = []
    for pair in folders:
        for sweep in read_all(path for folder in pair for path in sorted(folder.glob("*.jsonl.gz"))):
            if (MEASURED[sweep.name].op == "permute") == (what == "permutations"):
                found.append(sweep)
    return found


def told(found: list[Pick]) -> str:
    loss, us = loss_of(found), np.array([(pick.own_us, pick.us, pick.size.fastest) for pick in found])
    own = us[:, 0] / us[:, 2] - 1
    return (
        f"{loss.sizes:4} sizes: mean {loss.mean:.2%}, 95% {loss.p95:.1%}, by time {loss.by_time:.2%}, worst "
        f"{(us[:, 1] / us[:, 2]).max():.2f}; own {own.mean():.2%}, {us[:, 0].sum() / us[:, 2].sum() - 1:.2%}"
        f"; torch off by {loss.torch:.1%}"
    )


def beyond(samples: Samples, steps: int) -> list[Pick]:
    """Picks at sizes of over four times the median work, by networks that were trained without them."""
    kinds = [(size.device.name, size.name) for size in samples.sizes]
    work = np.array([work_of(size.problem) for size in samples.sizes])
    medians = {
        kind: np.median([w for w, each in zip(work, kinds, strict=True) if each == kind]) for kind in kinds
    }
    far = work > BEYOND * np.array([medians[kind] for kind in kinds])
    networks = train.networks_of(samples, np.flatnonzero(~far).tolist(), steps)
    made = train.made_of(samples, networks, {}, {}, {})
    return train.picks(made, [samples.sizes[row] for row in np.flatnonzero(far)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("products", "permutations"))
    parser.add_argument("--check", action="store_true", help="tell what picks lose, and write nothing")
    parser.add_argument("--beyond", action="store_true", help="leave out large sizes, in place of quarters")
    parser.add_argument("--folds", type=int, default=0, help="the seed of the quarters (0)")
    parser.add_argument("--steps", type=int, default=train.STEPS, help=f"of training ({train.STEPS})")
    parser.add_argument("--output", type=Path, default=ROOT.parent / "tritile" / "tables")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for what in asked.what:
        samples = Samples(committed(what))
        print(f"{what}: {len(samples.sizes)} sizes, {len(samples.columns)} columns", flush=True)
        found = (
            beyond(samples, asked.steps)
            if asked.beyond
            else train.held_out(samples, asked.folds, asked.steps)
        )
        by_gpu: dict[tuple[str, str], list[Pick]] = {}
        for pick in found:
            by_gpu.setdefault((pick.size.device.name, pick.size.name), []).append(pick)
        for (gpu, name), own in by_gpu.items():
            print(f"{gpu:22} {name:16} {told(own)}", flush=True)
        if not asked.check:
            losses = train.losses_of(found)
            made = train.made_of(
                samples, train.networks_of(samples, None, asked.steps), losses, digests(), VERSIONS
            )
            path = asked.output / f"{what}.predictor.json"
            predictor.write(made, path)
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
