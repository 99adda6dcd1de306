"""Time a shared folder of 100,000 trials in 1,000 objects: `python tests/shared_times.py`. No GPU is needed.

It prints, for a host that never read the folder and for one that has: milliseconds of the first look-up,
seconds until the folder is read, milliseconds of misses meanwhile and after, and MiB of memory. The first
look-up is a miss that waits for the reading, or a hit; SQLite then also checks the host's whole store.
"""

import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tritile.core.config import Config
from tritile.core.device import TARGETS
from tritile.core.problem import MatmulProblem
from tritile.tuner.store.folder import Folder, Line, now, provenance
from tritile.tuner.store.shared import SharedStore
from tritile.tuner.store.trial import Trial
from tritile.tuner.store.trials import Store, row_of

DEVICE, KERNEL = TARGETS["nvidia-h200"], "0123456789abcdef"
PROBLEM = MatmulProblem(1, 257, 129, 65, "bfloat16", "bfloat16")


def fill(root: Path) -> None:
    environment, when = Store(DEVICE, root)._environment(KERNEL), now().isoformat(timespec="seconds")
    for number in range(1000):
        lines = []
        for each in range(100 * (number % 2), 100 * (number % 2) + 100):
            config = Config.of(BLOCK_M=16 * (each % 16 + 1), BLOCK_N=16 * (each // 16 + 1))
            trial = Trial(replace(PROBLEM, m=257 + number // 2), config, 10.0 + each, measured_utc=when)
            lines.append(Line(environment, (*row_of(trial), None), provenance(DEVICE)))
        Folder(str(root / "folder")).put(DEVICE.slug, lines, written_utc=when)


def misses(store: SharedStore, goes_on) -> str:
    times = []
    while goes_on(len(times)):
        since = time.perf_counter()
        store.trials(KERNEL, replace(PROBLEM, n=7))
        times.append((time.perf_counter() - since) * 1e3)
        time.sleep(0.01)
    times.sort()
    return f"median {times[len(times) // 2]:.2f}, longest {times[-1]:.1f}" if times else "none"


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        fill(Path(root))
        for what in ("new", "again"):
            store, before = SharedStore(DEVICE, Path(root, "host"), str(Path(root, "folder"))), memory()
            since = time.perf_counter()
            found = store.trials(KERNEL, PROBLEM)
            first = (time.perf_counter() - since) * 1e3
            during = misses(store, lambda count, store=store: not store._settled.is_set())
            taken = time.perf_counter() - since
            after = misses(store, lambda count: count < 200)
            print(f"{what}: first {first:.0f} ms ({len(found)} trials), read in {taken:.1f} s; misses (ms) "
                  f"meanwhile {during}; after {after}; {memory() - before:.0f} MiB more")  # fmt: skip


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
