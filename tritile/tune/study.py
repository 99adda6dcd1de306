"""How good the tuner is: regret against measuring everything, repeats, transfer, and seconds.

All times that are compared were taken side by side: the winners of the repeats, the model's first pick and
the fastest of an exhaustive search are raced with each other.
"""

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from tritile.core.config import Config
from tritile.core.device import Device
from tritile.core.problem import Tiled
from tritile.errors import TuningError
from tritile.families.space import illegal
from tritile.planning import model
from tritile.planning.trial import Trial
from tritile.tune.measure import engine
from tritile.tune.measure.tasks import Rules, Task, Tuned, whole
from tritile.tune.measure.workshop import Workshop
from tritile.tune.search import fastest_first
from tritile.tune.subject import ProblemSpace, ProblemSubject
from tritile.tune.subject.operands import neighbour

Say = Callable[[str], None]
REPEATS = 5
FLIP = 0.02  # regret above which a repeat's winner counts as a different one
_BEST = 8  # configs of the exhaustive search that join the race
_EVERYTHING = whole(Rules("exhaustive", finalists=24, problem_s=math.inf))


Studied = dict[str, Any]  # the figures of one problem, for JSON


@contextmanager
def _cold_cache() -> Iterator[Path]:
    """Give processes that start meanwhile an empty Triton cache."""
    with tempfile.TemporaryDirectory(prefix="tritile-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield Path(folder)


def _task(problem: Tiled, device: Device) -> Task:
    """Return a task with nothing known of its problem."""
    return Task(ProblemSubject(problem, device), ProblemSpace(problem, device))


def _searched(task: Task, shop: Workshop, rules: Rules) -> tuple[Tuned, dict[Config, Trial]]:
    """Tune a task; return the result, its seconds counted from the very start, and every trial."""
    trials: dict[Config, Trial] = {}
    start = time.monotonic()
    (tuned,) = engine.tune([task], shop, rules, lambda _, trial: trials.__setitem__(trial.config, trial))
    if tuned.best is None:
        raise TuningError(f"{tuned.problem.label}: {tuned.failure}")
    return replace(tuned, seconds=time.monotonic() - start), trials


def _cold_run(problem: Tiled, device: Device, gpu: int | None, jobs: int | None, cache: Path) -> Tuned:
    """Search with nothing compiled and nothing known, in processes that have started."""
    for kept in list(cache.iterdir()):
        shutil.rmtree(kept)
    with Workshop(gpu, jobs) as shop:
        shop.start()
        return _searched(_task(problem, device), shop, Rules())[0]


def _studied(problem: Tiled, device: Device, first: Tuned, shop: Workshop, repeats: int) -> Studied:
    """Return the figures of one problem. A regret is a time over the fastest known, less 1 (0.01: 1% slower).

    `regrets` has one for each repeat. The first repeat, with a cold cache of compiled kernels, took
    `tune_seconds` and tried `configs` of the `space` configs that an exhaustive search measured.
    `transfer_regret` is that of the first repeat's winner on `neighbour`, a problem a quarter larger, raced
    with the winner of a search for `neighbour` itself; None where the config may not run there.
    """
    runs = [first, *(_searched(_task(problem, device), shop, Rules())[0] for _ in range(repeats - 1))]
    exhausted, everything = _searched(_task(problem, device), shop, _EVERYTHING)
    winners = [tuned.best.config for tuned in runs if tuned.best is not None]
    pick = model.pick(problem, device)
    rivals = fastest_first({config: trial.time for config, trial in everything.items()})[:_BEST]
    times = _race(list(dict.fromkeys([*winners, pick, *rivals])), problem, device, shop)
    fastest, near = min(times.values()), neighbour(problem)
    return {
        "problem": problem.label,
        "regrets": [times[config] / fastest - 1 for config in winners],
        "first_pick_regret": times[pick] / fastest - 1,
        "tune_seconds": first.seconds,
        "configs": first.trials,
        "space": len(everything),
        "exhaustive_seconds": exhausted.seconds,
        "best": str(min(times, key=lambda c: (times[c], c.key))),
        "best_us": fastest,
        "neighbour": near.label,
        "transfer_regret": _transfer(winners[0], near, device, shop),
    }


def _transfer(config: Config, problem: Tiled, device: Device, shop: Workshop) -> float | None:
    """Return the regret of a config that was found for another problem; None where it may not run."""
    if illegal(config, problem, device) is not None:
        return None
    own = _searched(_task(problem, device), shop, Rules())[0].best
    assert own is not None
    times = _race(list(dict.fromkeys([config, own.config])), problem, device, shop)
    return times[config] / min(times.values()) - 1


def _race(configs: Sequence[Config], problem: Tiled, device: Device, shop: Workshop) -> dict[Config, float]:
    """Return microseconds of each config, timed in turns."""
    subject = ProblemSubject(problem, device)
    samples = shop.race(subject, configs)
    shop.end(subject)
    return {config: statistics.median(times) for config, times in zip(configs, samples, strict=True)}


def _tail(values: Sequence[float], share: float = 0.95) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _told(found: Studied) -> str:
    """Return the figures of one problem as a line of text."""
    regrets, transfer = found["regrets"], found["transfer_regret"]
    return (
        f"{found['problem']}: regret {100 * statistics.median(regrets):.2f}% "
        f"(worst {100 * max(regrets):.2f}%), "
        f"first pick {100 * found['first_pick_regret']:.1f}%, "
        f"on a neighbour {'none' if transfer is None else f'{100 * transfer:.1f}%'}, "
        f"{found['tune_seconds']:.1f} s for {found['configs']} configs of {found['space']}"
    )


def study(
    problems: Sequence[Tiled],
    suite: Sequence[Tiled],
    device: Device,
    gpu: int | None,
    jobs: int | None = None,
    repeats: int = REPEATS,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Measure the tuner's regret on some problems and its seconds on a suite; return figures for JSON.

    Nothing is remembered, and nothing remembered is used. Raises TuningError where no config works.
    """
    studied: list[Studied] = []
    with _cold_cache() as cache:
        firsts = [_cold_run(problem, device, gpu, jobs, cache) for problem in problems]
    with _cold_cache(), Workshop(gpu, jobs) as shop:
        start = time.monotonic()
        shop.start()
        started = time.monotonic() - start
        for problem, first in zip(problems, firsts, strict=True):
            studied.append(_studied(problem, device, first, shop, repeats))
            say(_told(studied[-1]))
    with _cold_cache(), Workshop(gpu, jobs) as shop:
        shop.start()
        start = time.monotonic()
        tasks = (_task(problem, device) for problem in suite)
        failed = sum(tuned.best is None for tuned in engine.tune(tasks, shop, Rules(), lambda *_: None))
        seconds = time.monotonic() - start if suite else 0.0
    return summary(studied) | {
        "suite_seconds": seconds,
        "suite_problems": len(suite),
        "suite_failed": failed,
        "start_seconds": started,
        "repeats": repeats,
        "problems": studied,
    }


def summary(studied: Sequence[Studied]) -> dict[str, Any]:
    """Return the figures over all problems; regrets of every repeat count."""
    regrets = [regret for one in studied for regret in one["regrets"]]
    picks = [one["first_pick_regret"] for one in studied]
    transfers = [one["transfer_regret"] for one in studied if one["transfer_regret"] is not None]
    return {
        "regret_median": statistics.median(regrets),
        "regret_worst": max(regrets),
        "tune_seconds_median": statistics.median(one["tune_seconds"] for one in studied),
        "flip_rate": sum(regret > FLIP for regret in regrets) / len(regrets),
        "first_pick_regret_median": statistics.median(picks),
        "first_pick_regret_p95": _tail(picks),
        "transfer_regret_median": statistics.median(transfers) if transfers else None,
        "transfer_regret_p95": _tail(transfers) if transfers else None,
    }
